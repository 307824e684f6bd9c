"""Options to train a model."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sparsejax.options.option import ANY_FILE, RANKING, SWITCH, Flag, Options, option
from sparsejax.options.reading import Reading

if TYPE_CHECKING:
    from jax.typing import ArrayLike, DTypeLike

    from sparsejax.codec import ModelConfig
    from sparsejax.data import ScannedDataset
    from sparsejax.data.reading.sources import Source, Sources
    from sparsejax.data.sets.click_schema import ClickSchema
    from sparsejax.data.sets.event_schema import EventSchema
    from sparsejax.engine.train.checkpoint import Checkpoints
    from sparsejax.engine.train.progress import EarlyStopping
    from sparsejax.engine.train.resident import Targets
    from sparsejax.kinds.clicks.model import ClickModel
    from sparsejax.kinds.histories.next_items import HistoryModel
    from sparsejax.kinds.kind import OfKind
    from sparsejax.nn.config import NetworkConfig
    from sparsejax.optimizers.optimizer import Optimizer
    from sparsejax.verbs.fit import Fittable

_FOLDER = Flag(type=pathlib.Path | None, value="DIR")


class Stepping(Options):
    """The optimizer, and the batches of its steps.

    Attributes:
      optimizer: One of adam, adamw, adamax, lazy_adam, rmsprop, adadelta, adagrad,
        rowwise_adagrad, ftrl, sgd, momentum and nesterov. For histories adamw has b2 .98
        and a weight decay of .1; for clicks one that falls with the number of examples.
      batch_size: Rows per step. The default for clicks is the power of 2 that is nearest to the
        root of the number of examples.
    """

    optimizer: str | None = option(
        None, Flag(value="STR", default="adam, of histories and clicks adamw")
    )
    batch_size: int | None = option(
        None, "512, of histories 256, of clicks 64 to 4096", least=1
    )


class Seeded(Options):
    """Options of a training with a random seed.

    Attributes:
      seed: Seed of the initial weights, the order of rows, corruption and dropout.
    """

    seed: int = option(0, least=0, below=2**32)


class Exact(Seeded):
    """Options of a training whose results can be reproduced bit by bit.

    Attributes:
      deterministic: Give the same bits in every process on the same kind of GPU. It can
        make steps slower. A resume must keep it.
    """

    deterministic: bool = option(False, SWITCH)


class Saved(Options):
    """Options for saving and reporting during a training.

    Attributes:
      checkpoint_seconds: Seconds between checkpoints; 0 saves as often as possible.
      resume: Continue from the last checkpoint of the run, or begin if it has no checkpoint. The
        settings must be those the run was begun with; only num_epochs=... may be higher.
      log: Function that is called with the step and the metrics after each epoch, see `fit`.
    """

    checkpoint_seconds: float = option(30.0, least=0.0)
    resume: bool = option(False, SWITCH)
    log: Callable[[int, Mapping[str, float]], None] | None = option(None, shell=False)


class Repeated(Seeded):
    """The options of `train` and `tune` that a run folder records, see `Recorded`.

    Attributes:
      k: Cut-off of the validation metrics: the number of recommendations that count.
      patience: Stop when the validation's ndcg@k, or AUC, has not risen for this many epochs.
      targets: Kinds of events that the model learns to predict, and is measured on. It reads
        events of all kinds. A run that goes on from another one has its targets and weights,
        unless others are given.
      weights: Weight of each target, by its kind; or the name of a column of numbers.
    """

    k: int = option(20, kinds=RANKING, least=1)
    patience: int | None = option(None, "train all epochs", least=1)
    targets: str | Sequence[str] | None = option(
        None,
        Flag(type=tuple[str, ...] | None, value="KIND", default="all kinds"),
        kinds=("histories",),
    )
    weights: Mapping[str, float] | str | None = option(
        None,
        Flag(
            type=str | None,
            value="{KIND=FLOAT[,KIND=FLOAT...],COLUMN}",
            default="1",
            read="weights",
        ),
        kinds=("histories",),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.targets is not None:  # converted to the form stored in a run folder
            kinds = [self.targets] if isinstance(self.targets, str) else self.targets
            object.__setattr__(self, "targets", tuple(kinds))


class Recorded(Repeated, Exact):
    """The options of `train` that a run folder records. A resume must keep them."""


class Watching(Repeated):
    """Validation during training, and when training ends.

    Attributes:
      validation: Held-out interactions, which are ranked after each epoch: a file with
        the same rows; or the share of the data to hold out, such as .1; or last, which holds
        out the last interaction of each row by time. Other commands then use the model
        of the best epoch. A file called last is written ./last. For clicks, a file or a
        share of the examples.
      num_epochs: Number of passes over the data, including those before a resume. By default as
        many as 200 steps take, but at least 30; for histories as many as 3,500 steps take, but
        40 to 300; for clicks as many as 1,000 steps take, but at most 10.
      learning_rate: Learning rate of the optimizer, at its highest.
    """

    validation: Any = option(None, Flag(type=str | None, value="{FILE,SHARE,last}"))
    num_epochs: int | None = option(
        None,
        Flag(
            name="epochs",
            value="INT",
            default="30, of histories 40, or more, of clicks 1",
        ),
        least=1,
    )
    learning_rate: float | None = option(None, ".002, of clicks .005", least=0.0)


class Content(Options):
    """Content of the items.

    Attributes:
      item_features: Content of the items: a CSV, Parquet or JSON file with a column of items,
        and columns of tags, numbers or vectors; or a table, or `ItemFeatures`. Items that are
        in no event are recommended, too. A run that goes on from another one needs it again,
        with all items.
    """

    item_features: Any = option(None, ANY_FILE, kinds=RANKING)


class TrainMore(Stepping, Watching, Content, Recorded, Saved, Reading, kw_only=False):
    """Options to train an existing model further.

    Attributes:
      data: A file, a folder or an address, see `read`; a table of polars, pandas or Arrow; or a
        data set. For histories a `SequenceDataset`, or a source for `read_sequences`; for
        clicks a `ClickDataset`, or a source for `read_clicks`.
      directory: Folder to write the run to: settings, vocabulary and checkpoints. It must be
        new or empty, except with resume=True. Without one the run is kept in a temporary folder
        until it is saved.
      negatives: Number of items that are drawn for each batch: the loss of a model of histories
        is over these instead of all items. For catalogues where all items take too long; a
        second training that goes on from this run, without it, ends with all of them.
      weight_decay: In each step, subtract from each weight this share of it, times the
        learning rate. Only for adamw, sgd, momentum and nesterov. The default for clicks is
        4 (12,000 / examples)^(1/3), but at most 5; up to 8 for many rare categories.
      warmup_epochs: Raise the learning rate from 0 over this many epochs, which may be a
        fraction.
      decay: cosine lowers the learning rate along a cosine, to 0 at the last epoch. A
        resume cannot raise num_epochs=... then, since that changes the curve. none keeps it.
      chunk_rows: Read the data while training, about this many rows at a time, for Parquet
        that does not fit in memory: saved data sets, tables with a list of items on each
        row, or pairs sorted by user; or clicks. No batch mixes rows of two chunks. Cannot
        be used with validation=..., except with a file of clicks.
      follow: Train on each file of a folder or a store once, in the order of their names, and
        on files that arrive later, until SIGTERM or Ctrl-C. For clicks with dynamic tables. A
        file must be whole when it gets its name. The learning rate stays. A resume goes on.
      changes: With follow=True, folder to which the changes of the tables are exported, see
        `export_changes`: a service reads them.
      export_seconds: Seconds between two exports of changes.
      fused: Apply the gradient of the last layer's kernel where it is computed, which
        saves an array of the kernel's size. Not with a tied kernel.
    """

    only_with: ClassVar = {
        "k": ("validation",),
        "patience": ("validation",),
        "changes": ("follow",),
        "export_seconds": ("changes",),
    }

    data: Any = option(
        dataclasses.MISSING,
        Flag(
            type=str,
            value="DATA",
            positional=True,
            text="File of the interactions to train on, or of examples of clicks.",
        ),
    )
    directory: str | os.PathLike[str] | None = option(None, shell=False)
    _: dataclasses.KW_ONLY
    negatives: int | None = option(None, "all items", kinds=("histories",), least=1)
    weight_decay: float | None = option(
        None, "0, of adamw .0001, of histories .1, of clicks .3 to 8", least=0.0
    )
    warmup_epochs: float = option(0.0, least=0.0)
    decay: Literal["cosine", "none"] | None = option(None, "cosine")
    chunk_rows: int | None = option(None, "all rows", least=1)
    follow: bool = option(False, SWITCH, kinds=("clicks",))
    changes: str | os.PathLike[str] | None = option(None, _FOLDER, kinds=("clicks",))
    export_seconds: float | None = option(None, "60", kinds=("clicks",), least=0.0)
    fused: bool = option(False, SWITCH, kinds=RANKING)


class Train(TrainMore, kw_only=False):
    """The training of a new model.

    Attributes:
      model: autoencoder, the default, learns which items go together. It sees neither order nor
        repeats, even in histories. sasrec, hstu and gru predict the next item: histories are in
        the order of their times, or else of the file, and an item may be in one many times.
        dlrm, the default for clicks, dcn, deepfm, wide_deep, din and tin predict clicks.
      config: The configuration of the model, in place of one that suits the data.
      schema: The columns of a file of clicks, a `ClickSchema`; or of the events of histories,
        an `EventSchema`.
      dynamic: Rows of the dynamic table of each column of 64-bit ids, which get a row when they
        are first seen, and lose it when the table is full. A configuration also says which ids
        they keep, see `DynamicTables`.
    """

    _: dataclasses.KW_ONLY
    model: str | None = option(None, shell=False)
    config: NetworkConfig | ModelConfig | None = option(None, shell=False)
    schema: ClickSchema | EventSchema | None = option(
        None, shell=False, kinds=("clicks", "histories")
    )
    dynamic: int | None = option(None, kinds=("clicks",), least=1)


class Training(Train, kw_only=False):
    """Options of a training, with facts derived from the data and from earlier runs.

    Attributes:
      suited: Names of the settings of the configuration that the data decides.
      origin: Folder of a run whose model is trained on. Items and categories of the data that
        it does not know are added behind those that it knows, and no known row moves before
        training. The new run has its network and its columns of clicks or of events. It also has the
        optimizer's state, if the optimizer is of the same kind and the learning rate is
        constant. The data should hold all interactions that count: interactions that only the
        earlier data has are gradually forgotten.
      keep_linear: Whether linear parts are kept in the user's cache folder.
    """

    _: dataclasses.KW_ONLY
    suited: Collection[str] = option((), shell=False)
    origin: pathlib.Path | None = option(None, Flag(name="from", value="DIR"))
    keep_linear: bool = option(False, shell=False)


class Load(Reading, kw_only=False):
    """An existing run, and how its methods read files.

    Attributes:
      directory: The folder that `save`, `train` or `sparsejax train` has written.
    """

    directory: str | os.PathLike[str] = option(dataclasses.MISSING, shell=False)


class Looping(Exact, Saved):
    """Options of `fit` that apply to all kinds of data.

    Attributes:
      batch_size: Number of examples in a step; a multiple of 64 on a mesh that divides batches.
        The last batch of an epoch may be smaller. By default 512; for clicks the batch size of
        `recipe`.
      num_epochs: Number of passes over the data, including those before a resume. By default
        20; for clicks the number of `recipe`.
      seed: Seed of the order of examples.
      shuffle: False trains on the rows in the order of the data, in each epoch.
      early_stopping: Stop on a validation metric, and end with the best epoch's weights.
      checkpoint_seconds: Save when this much time has passed since the last checkpoint,
        when an epoch is the best so far, and at the end. 0 saves as often as possible.
      resume: Continue from the newest sound checkpoint in `checkpoint_dir`, if there is one.
        The result has the bits of a training without interruption; on a GPU this needs
        `deterministic=True`.
      fused: Apply the gradient of each chunk of the output's items as soon as it is computed,
        so that no array of the size of its kernel exists beside the kernel and its state. The
        result is equal, up to rounding.
      deterministic: Give the same bits in every process on the same kind of GPU, which can make
        steps slower. Without it XLA chooses programs by their time, and adds some terms in any
        order. A resume must keep it.
      log: Function that is called after each epoch with the step number and that epoch's
        history entry, by the first process if there are several. It can use model and
        optimizer. Rows may not be up to date: pass `optimizer=optimizer` to `evaluate` and
        `recommend`.
      after_epoch: Function that is called after each epoch with its number, from 1, by every
        process. It can use model and optimizer as `log` can, also for work that all processes
        have to do together, such as measuring or exporting. It may change the parameters.
    """

    batch_size: int | None = option(None, least=1)
    num_epochs: int | None = option(None, least=1)
    shuffle: bool = True
    early_stopping: EarlyStopping | None = None
    fused: bool = False
    after_epoch: Callable[[int], None] | None = None


class Fit(Looping, kw_only=False):
    """The arguments of a call of `fit`.

    Attributes:
      model: A `FeedForward`, or a module with the methods of `Fittable`; for histories a
        `SASRec`, or a module with the methods of `HistoryModel`; for clicks a `DLRM` or
        another click model, or a module that is called as `model(dense, ids)`.
      optimizer: The optimizer of this model.
      inputs: `[rows, features]`: a `SparseDataset`, a `CSR` or a SciPy matrix; or the result of
        `scan_parquet`, which is read from disk a chunk at a time; or histories, also those of
        `scan_sequences`; or clicks, also those of `scan_clicks`, from Parquet; or several
        sources by name, `{name: source}`, among them `DenseDataset`s and arrays `[rows, ...]`.
        The rows are those of the first source with row names. The other sources are matched by
        row name, or by position if they have no names.
      targets: `[rows, items]`, matched by row name if both have names; or the name of a
        sparse input. By default the single input itself (an autoencoder). Or several
        by name, `{name: source}`, for a model whose `loss` takes such a dict of labels. For
        histories, the kind or kinds of events to predict, such as "purchase"; by default all
        events. The model reads all of them.
      weights: `[rows]`, weight of each example; 1 by default. For histories, how much each
        event counts as a target: a weight for each kind, `{"purchase": 1, "view": 0.1}`; the
        name of a column of numbers; or `[entries]`. See `SequenceDataset.with_targets`.
      validation: Held-out entries of the rows of `inputs`. After each epoch they are
        ranked among all items that the row does not have in the targets. For histories, a
        `SequenceDataset`, as `split_last` makes it; if some history of `inputs` has an item
        twice, items that a row has are ranked, too; `targets` and `weights` by kind say which
        of its events are to be found. For clicks, examples of the same
        columns, read with the same vocabularies.
      k: Cut-off of the validation metrics of items; 20 by default.
      wire_dtype: Dtype in which rows and gradients of tables, or of the vectors of items, are
        sent between devices, such as bfloat16; for clicks and histories on a mesh. By default
        that of the model's collections, or of the vectors.
      exchange_room: Capacity for ids between each pair of devices, as a multiple of the
        expected number; for clicks on a mesh. The distinct ids of some batches are counted for
        it. "overflows" in the history counts lookups that exceeded the capacity; there is a
        warning if this happens in more than one in a hundred steps. By default that of the
        model's collections.
      checkpoint_dir: Folder to save checkpoints in. Only one training at a time can use it.
    """

    only_with: ClassVar = {
        "early_stopping": ("validation",),
        "k": ("validation",),
        "checkpoint_seconds": ("checkpoint_dir",),
    }

    model: Fittable | HistoryModel | ClickModel
    optimizer: Optimizer
    inputs: Sources | ScannedDataset | OfKind
    targets: Targets | ScannedDataset | Sequence[str] = None
    _: dataclasses.KW_ONLY
    weights: ArrayLike | Mapping[str, float] | str | None = None
    validation: Source | OfKind | None = None
    k: int | None = option(None, kinds=RANKING, least=1)
    wire_dtype: DTypeLike | None = option(None, kinds=("clicks", "histories"))
    exchange_room: float | None = option(None, kinds=("clicks",))
    checkpoint_dir: str | pathlib.Path | Checkpoints | None = None

    @property
    def row_weights(self) -> ArrayLike | None:
        """`weights` of examples, if each row is an example; else None."""
        if isinstance(self.weights, str | Mapping):
            raise TypeError(
                "weights by kinds of events, or by a column, are for histories: give one "
                "number for each row"
            )
        return self.weights

    @property
    def cut_off(self) -> int:
        """The value of `k`, or its default."""
        return 20 if self.k is None else self.k
