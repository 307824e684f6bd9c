"""Training on data that lives on the device."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax
from jax.typing import ArrayLike

from sparsejax.data import ScannedDataset
from sparsejax.data.reading.sources import Source, Sources
from sparsejax.engine.rank.recommender import Recommender
from sparsejax.engine.train import loop
from sparsejax.engine.train.checkpoint import Checkpoints
from sparsejax.engine.train.dispatch import check_modules
from sparsejax.engine.train.progress import EarlyStopping
from sparsejax.engine.train.resident import Targets, Trainable
from sparsejax.kinds.clicks.model import ClickModel
from sparsejax.kinds.histories.next_items import HistoryModel
from sparsejax.kinds.kind import OfKind, kind_of, refused, used
from sparsejax.mesh.promotion import promoting
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.options.option import RANKING


@runtime_checkable
class Fittable(Trainable, Recommender, Protocol):
    """An item model that `fit` can train: an `nnx.Module` with the methods of both.

    `FeedForward` has them.
    """


@promoting()
@refused("inputs", k=RANKING, wire_dtype=("clicks",), exchange_room=("clicks",))
def fit(
    model: Fittable | HistoryModel | ClickModel,
    optimizer: Optimizer,
    inputs: Sources | ScannedDataset | OfKind,
    targets: Targets | ScannedDataset | Sequence[str] = None,
    *,
    weights: ArrayLike | Mapping[str, float] | str | None = None,
    batch_size: int | None = None,
    num_epochs: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    validation: Source | OfKind | None = None,
    k: int | None = None,
    wire_dtype: jax.typing.DTypeLike | None = None,
    exchange_room: float | None = None,
    early_stopping: EarlyStopping | None = None,
    checkpoint_dir: str | pathlib.Path | Checkpoints | None = None,
    checkpoint_seconds: float = 30.0,
    resume: bool = False,
    fused: bool = False,
    deterministic: bool = False,
    log: Callable[[int, Mapping[str, float]], None] | None = None,
    after_epoch: Callable[[int], None] | None = None,
) -> list[dict[str, float]]:
    """Trains a model, in place, to predict `targets` from `inputs`.

    >>> history = fit(model, optimizer, train, num_epochs=1, validation=heldout)
    >>> sorted(history[0])[:3]
    ['coverage@20', 'epoch', 'examples_per_second']

    The loss of a step is the mean of `weights_b loss_b` over the examples of the batch.
    The data is copied to the device once. Several steps at a time then run as one compiled
    program, which picks its rows there. The order of examples depends on `seed`, the epoch
    and the batch size only. At the end rows are brought up to date (`Optimizer.flush`).

    Parameters and state are overwritten in place. Anything else that holds them, such as
    a copy by `nnx.clone`, keeps its values. After any exception, including Ctrl-C, the
    model is as the last dispatch left it.

    Under `jax.set_mesh(make_mesh(...))` the data is divided over the devices, and the
    batches are the same. Make the model and the optimizer there, too::

        with jax.set_mesh(make_mesh(data=2, model=4)):
            model = FeedForward(config, inputs=size, outputs=size, rngs=nnx.Rngs(0))
            optimizer = Optimizer(model, optimizers.adam(1e-3))
            fit(model, optimizer, train)

    A model of histories is trained on a `SequenceDataset`, or what `scan_sequences` gives,
    to predict each item from those before it. It learns from the last
    `max_length + 1` items of each row::

        train, heldout = histories.split_last()
        model = SASRec(SASRecConfig(), items=train.num_features, rngs=nnx.Rngs(0))
        optimizer = Optimizer(model, optimizers.adam(1e-3))
        fit(model, optimizer, train, validation=heldout, early_stopping=EarlyStopping())

    A click model is trained on a `ClickDataset` or `ScannedClicks`. Its loss is the binary
    cross-entropy of the logits `model(dense, ids)`::

        model = DLRM(DLRMConfig(), num_dense=13, features=train.features, rngs=nnx.Rngs(0))
        optimizer = Optimizer(model, optimizers.adam(5e-4))
        fit(model, optimizer, train, validation=heldout, early_stopping=EarlyStopping())

    To a model with dynamic tables, or tables in host memory, `ids` is a `FeatureBatch`, which
    only an `EmbeddingCollection` reads.

    While it runs on a terminal, a bar shows loss, examples per second and time left.

    Args:
      model: a `FeedForward`, or a module with the methods of `Fittable`; for histories a
        `SASRec`, or a module with the methods of `HistoryModel`; for clicks a `DLRM` or
        another click model, or a module that is called as `model(dense, ids)`.
      optimizer: the optimizer of this model.
      inputs: `[rows, features]`: a `SparseDataset`, a `CSR` or a SciPy matrix; or what
        `scan_parquet` gives, which is read from disk a chunk at a time; or histories, also
        of `scan_sequences`; or clicks, also of `scan_clicks`, from Parquet; or several by
        name, `{name: source}`, among them `DenseDataset`s and arrays `[rows, ...]`. The
        rows are those of the first source with row names. The other sources are matched
        by row name, or by position if they have no names.
      targets: `[rows, items]`, matched by row name if both have names; or the name of a
        sparse input. By default the single input itself (an autoencoder). Or several
        by name, `{name: source}`, for a model whose `loss` takes such a dict of labels. For
        histories, the kind or kinds of events to predict, such as "purchase"; by default all
        events. The model reads all of them.
      weights: `[rows]`, weight of each example; 1 by default. For histories, how much each
        event counts as a target: a weight for each kind, `{"purchase": 1, "view": 0.1}`; the
        name of a column of numbers; or `[entries]`. See `SequenceDataset.with_targets`.
      batch_size: examples a step; a multiple of 64 on a mesh that divides batches. The
        last batch of an epoch may be smaller. By default 512, of clicks as `recipe` has it.
      num_epochs: passes over the data, those before a resume included. By default 20, of
        clicks as `recipe` has it.
      seed: seed of the order of examples.
      shuffle: False trains on the rows in the order of the data, the same in each epoch.
      validation: held-out entries of the rows of `inputs`. After each epoch they are
        ranked among all items that the row does not have in the targets. For histories, a
        `SequenceDataset`, as `split_last` makes it; if some history of `inputs` has an item
        twice, items that a row has are ranked, too; `targets` and `weights` by kind say which
        of its events are to be found. For clicks, examples of the same
        columns, read with the same vocabularies.
      k: cut-off of the validation metrics of items; 20 by default.
      wire_dtype: of clicks on a mesh: the dtype in which rows and gradients of the tables
        cross between devices, such as bfloat16. By default that of the model's collections.
      exchange_room: of clicks on a mesh: for how many ids there are places between each pair
        of devices, as a multiple of what is expected. How many of the ids of a batch differ
        is counted in some batches. "overflows" in the history counts lookups for which the
        places did not suffice; there is a warning if these are above one in a hundred steps.
        By default that of the model's collections.
      early_stopping: stop on a validation metric, and end with the best epoch's weights.
      checkpoint_dir: where to save checkpoints. Only one training at a time can use it.
      checkpoint_seconds: save when this much time has passed since the last checkpoint,
        when an epoch is the best so far, and at the end. 0 saves as often as possible.
      resume: continue from the newest sound checkpoint in `checkpoint_dir`, if there is
        one. The result has the same bits as without the interruption; on a GPU this needs
        `deterministic=True`.
      fused: apply the gradient of each chunk of the output's items where it is made, so
        that no array of the size of its kernel exists beside the kernel and its state.
        The result is the same, up to rounding.
      deterministic: give the same bits in every process on the same kind of GPU, which
        can make steps slower. Without it XLA chooses programs by their time, and adds
        some terms in any order. A resume must keep it.
      log: called after each epoch with the step number and that epoch's history entry,
        by the first process if there are several. It can use model and optimizer. Rows
        may not be up to date: pass `optimizer=optimizer` to `evaluate` and `recommend`.
      after_epoch: called after each epoch with its number, from 1, by every process. It
        can use model and optimizer as `log` can, also for what all processes have to do
        together, such as to measure or to export. It may change the parameters.

    Returns:
      One entry per epoch: "epoch", "step", "loss", "examples_per_second", and the
      validation metrics. Clicks on a mesh that divides tables also have "overflows". Clicks
      with dynamic tables have "found", "inserted", "refused" and "evicted": of an epoch, or of
      what was left of it after a resume, the share of the ids.

    Raises:
      FloatingPointError: the loss is not finite. The message names epoch and step. The
        last good checkpoint stays.
      TypeError: the model or the optimizer has another type.
      ValueError: shapes, names, values or settings do not fit; this kind of data has no
        use for an argument; a checkpoint is of other data.
      NotImplementedError: `fused` with a tied output, with several targets, or with a
        model that has no `SparseOutput` of its own; one of several inputs is scanned;
        scanned clicks are text; scanned histories have `targets` or `weights`.
      FileExistsError: `checkpoint_dir` holds checkpoints and `resume` is False.
      BlockingIOError: another process trains into `checkpoint_dir`. The message says
        which one.
      KeyboardInterrupt: Ctrl-C. The steps that were running have ended, and a checkpoint
        was saved. A second Ctrl-C does not wait for these steps. With several processes,
        one of them was told to end by Ctrl-C or SIGTERM, and all have saved.
    """
    check_modules(model, optimizer)
    if validation is None and early_stopping is not None:
        raise ValueError("early_stopping needs validation=... to measure its metric on")
    if validation is None and k is not None:
        raise ValueError("k is the cut-off of validation metrics: give validation, too")
    if fused and isinstance(targets, Mapping):
        raise NotImplementedError("several targets cannot have a fused update")
    kind = kind_of(inputs)
    usual = kind.defaults.of_loop(inputs)
    batch_size = usual[0] if batch_size is None else batch_size
    how = loop.How(
        batch_size=batch_size,
        num_epochs=usual[1] if num_epochs is None else num_epochs,
        seed=seed,
        shuffle=shuffle,
        fused=fused,
        deterministic=deterministic,
        early_stopping=early_stopping,
        checkpoint_seconds=checkpoint_seconds,
        resume=resume,
        log=log,
        after_epoch=after_epoch,
    )
    options = {
        "targets": targets,
        "weights": weights,
        "validation": validation,
        "stopping": early_stopping,
        "k": 20 if k is None else k,
        "wire_dtype": wire_dtype,
        "exchange_room": exchange_room,
    }
    with loop.on_auto_axes(model, optimizer), loop.alone(checkpoint_dir) as checkpoints:
        job = kind.job(model, inputs, **used(kind, fit, options))
        kind.suit_to_memory(model, optimizer, inputs, batch_size)
        return loop.train(model, optimizer, job, how, checkpoints)
