"""Training on data that is stored on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from sparsejax.engine.rank.recommender import Recommender
from sparsejax.engine.train import loop
from sparsejax.engine.train.dispatch import check_modules
from sparsejax.engine.train.resident import Trainable
from sparsejax.kinds.kind import kind_of
from sparsejax.mesh.promotion import promoting
from sparsejax.options.option import verb
from sparsejax.options.training import Fit


@runtime_checkable
class Fittable(Trainable, Recommender, Protocol):
    """The protocol of item models that `fit` can train: an `nnx.Module` with the methods of both
    bases.

    `FeedForward` has them.
    """


@promoting()
@verb(Fit)
def fit(asked: Fit) -> list[dict[str, float]]:
    """Trains a model, in place, to predict `targets` from `inputs`.

    >>> history = fit(model, optimizer, train, num_epochs=1, validation=heldout)
    >>> sorted(history[0])[:3]
    ['coverage@20', 'epoch', 'examples_per_second']

    The loss of a step is the mean of `weights_b loss_b` over the examples of the batch.
    The data is copied to the device once. Several steps at a time then run as one compiled
    program, which gathers its rows there. The order of examples depends only on `seed`, the epoch
    and the batch size. At the end, pending updates of rows are applied (`Optimizer.flush`).

    Parameters and state are overwritten in place. Copies, such as those made by `nnx.clone`, keep
    their values. After an exception, including Ctrl-C, the model has the state after the last
    dispatch.

    Under `jax.set_mesh(make_mesh(...))` the data is divided over the devices, and the batches do
    not change. Make the model and the optimizer under the mesh, too::

        with jax.set_mesh(make_mesh(data=2, model=4)):
            model = FeedForward(config, inputs=size, outputs=size, rngs=nnx.Rngs(0))
            optimizer = Optimizer(model, optimizers.adam(1e-3))
            fit(model, optimizer, train)

    A history model is trained on a `SequenceDataset`, or a result of `scan_sequences`, to predict
    each item from the items before it. It learns from the last `max_length + 1` items of each
    row::

        train, heldout = histories.split_last()
        model = SASRec(SASRecConfig(), items=train.num_features, rngs=nnx.Rngs(0))
        optimizer = Optimizer(model, optimizers.adam(1e-3))
        fit(model, optimizer, train, validation=heldout, early_stopping=EarlyStopping())

    A click model is trained on a `ClickDataset` or `ScannedClicks`. Its loss is the binary
    cross-entropy of the logits `model(dense, ids)`::

        model = DLRM(DLRMConfig(), num_dense=13, features=train.features, rngs=nnx.Rngs(0))
        optimizer = Optimizer(model, optimizers.adam(5e-4))
        fit(model, optimizer, train, validation=heldout, early_stopping=EarlyStopping())

    If a model has dynamic tables, or tables in host memory, `ids` is a `FeatureBatch`, which only
    an `EmbeddingCollection` can read.

    On a terminal, a progress bar shows loss, examples per second and remaining time.

    Returns:
      An entry for each epoch: "epoch", "step", "loss", "examples_per_second", and the validation
      metrics. Clicks on a mesh that divides tables also have "overflows". Clicks with dynamic
      tables have "found", "inserted", "refused" and "evicted": shares of the ids of the epoch, or
      of its remaining part after a resume.

    Raises:
      FloatingPointError: the loss is not finite. The message names epoch and step. The
        last good checkpoint stays.
      TypeError: the model or the optimizer has an unsupported type.
      ValueError: shapes, names, values or settings do not match; an argument does not apply to
          this kind of data; or a checkpoint belongs to other data.
      NotImplementedError: `fused` with a tied output, with several targets, or with a
        model that has no `SparseOutput` of its own; one of several inputs is scanned;
        scanned clicks are text; scanned histories have `targets` or `weights`.
      FileExistsError: `checkpoint_dir` holds checkpoints and `resume` is False.
      BlockingIOError: another process trains into `checkpoint_dir`. The message says
        which one.
      KeyboardInterrupt: Ctrl-C was pressed. The running steps have ended, and a checkpoint was
          saved. A second Ctrl-C does not wait for these steps. With several processes, one of them
          received Ctrl-C or SIGTERM, and all have saved.
    """
    check_modules(asked.model, asked.optimizer)
    kind = kind_of(asked.inputs)
    asked.check_kind(kind.name)
    if asked.fused and isinstance(asked.targets, Mapping):
        raise NotImplementedError("several targets cannot have a fused update")
    model, optimizer = asked.model, asked.optimizer
    size, epochs = kind.defaults.of_loop(asked.inputs)
    how = asked.as_type(
        loop.How,
        batch_size=size if asked.batch_size is None else asked.batch_size,
        num_epochs=epochs if asked.num_epochs is None else asked.num_epochs,
    )
    with (
        loop.on_auto_axes(model, optimizer),
        loop.alone(asked.checkpoint_dir) as checkpoints,
    ):
        job = kind.job(asked)
        kind.suit_to_memory(model, optimizer, asked.inputs, how.batch_size)
        return loop.train(model, optimizer, job, how, checkpoints)
