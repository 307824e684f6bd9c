"""How a model is trained."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

from sparsejax.options.option import RANKING, Flag, Options, option
from sparsejax.options.reading import Reading

if TYPE_CHECKING:
    from sparsejax.codec import ModelConfig
    from sparsejax.data.sets.click_schema import ClickSchema
    from sparsejax.nn.config import NetworkConfig

_FILE = Flag(type=str | None, value="FILE", default="")
_FOLDER = Flag(type=pathlib.Path | None, value="DIR", default="")


@dataclasses.dataclass(frozen=True, kw_only=True)
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
        None, Flag(value="INT", default="512, of histories 256, of clicks 64 to 4096")
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeated(Options):
    """The options of `train` and `tune` that a run folder records, see `Recorded`.

    Attributes:
      k: Cut-off of the validation metrics: the number of recommendations that count.
      patience: Stop when the validation's ndcg@k, or AUC, has not risen for this many epochs.
      seed: Seed of the initial weights, the order of rows, corruption and dropout.
    """

    k: int = option(20, kinds=RANKING)
    patience: int | None = option(None, Flag(value="INT", default="train all epochs"))
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded(Repeated):
    """The options of `train` that a run folder records. A resume must keep them.

    Attributes:
      deterministic: Give the same bits in every process on the same kind of GPU. It can
        make steps slower. A resume must keep it.
    """

    deterministic: bool = option(False, Flag(gives=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watching(Repeated):
    """How training is measured and ended.

    Attributes:
      validation: Held-out interactions, which are ranked after each epoch: a file with
        the same rows; or the share of the data to hold out, such as .1; or last, which holds
        out the last interaction of each row by time. Other commands then use the model
        of the best epoch. A file called last is written ./last. For clicks, a file or a
        share of the examples.
      num_epochs: Number of passes over the data, including those before a resume. By default
        as many as 200 steps take, but at least 30; of histories as many as 3,500 steps
        take, but 40 to 300; of clicks as many as 1,000 steps take, but at most 10.
      learning_rate: Learning rate of the optimizer, at its highest.
    """

    validation: Any = option(
        None, Flag(type=str | None, value="{FILE,SHARE,last}", default="")
    )
    num_epochs: int | None = option(
        None,
        Flag(
            name="epochs",
            value="INT",
            default="30, of histories 40, or more, of clicks 1",
        ),
    )
    learning_rate: float | None = option(
        None, Flag(value="FLOAT", default=".002, of clicks .005")
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Content(Options):
    """Content of the items.

    Attributes:
      item_features: Content of the items: a CSV, Parquet or JSON file with a column of items,
        and columns of tags, numbers or vectors; or a table, or `ItemFeatures`. Items that are
        in no event are recommended, too. A run that goes on from another one needs it again,
        with all items.
    """

    item_features: Any = option(None, _FILE, kinds=RANKING)


@dataclasses.dataclass(frozen=True)
class TrainMore(Stepping, Watching, Content, Recorded, Reading):
    """The training of a model that is there.

    Attributes:
      data: A file, a folder or an address, see `read`; a table of polars, pandas or Arrow; or a
        data set. Histories are a `SequenceDataset`, or what `read_sequences` takes; clicks a
        `ClickDataset`, or what `read_clicks` takes.
      directory: Folder to write the run to: settings, vocabulary and checkpoints. It must be
        new or empty, except with resume=True. Without one the run is kept in a temporary folder
        until it is saved.
      negatives: The loss of a model of histories is over this many items, drawn for each
        batch, instead of all. For catalogues where all take too long; a second training that
        goes on from this run, without it, ends with all of them.
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
      follow: Train on each file of a folder or a store once, in the order of their names,
        and on those that come later, until SIGTERM or Ctrl-C. For clicks with dynamic
        tables. A file must be whole when it gets its name. The learning rate stays. A resume goes on.
      changes: With follow=True, folder to which the changes of the tables are exported, see
        `export_changes`: a service takes them.
      export_seconds: Seconds between two exports of changes.
      fused: Apply the gradient of the last layer's kernel where it is computed, which
        saves an array of the kernel's size. Not with a tied kernel.
      checkpoint_seconds: Seconds between checkpoints; 0 saves as often as possible.
      resume: Continue from the last checkpoint of the run, or begin if it has no checkpoint. The
        settings must be those the run was begun with; only num_epochs=... may be higher.
      log: Called with the step and the metrics after each epoch, see `fit`.
    """

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
    negatives: int | None = option(
        None, Flag(value="INT", default="all items"), kinds=("histories",)
    )
    weight_decay: float | None = option(
        None,
        Flag(
            value="FLOAT",
            default="0, of adamw .0001, of histories .1, of clicks .3 to 8",
        ),
    )
    warmup_epochs: float = 0.0
    decay: Literal["cosine", "none"] | None = option(
        None, Flag(value="{cosine,none}", default="cosine")
    )
    chunk_rows: int | None = option(None, Flag(value="INT", default="all rows"))
    follow: bool = option(False, Flag(gives=True), kinds=("clicks",))
    changes: str | os.PathLike[str] | None = option(None, _FOLDER, kinds=("clicks",))
    export_seconds: float | None = option(
        None, Flag(value="FLOAT", default="60"), kinds=("clicks",)
    )
    fused: bool = option(False, Flag(gives=True), kinds=RANKING)
    checkpoint_seconds: float = 30.0
    resume: bool = option(False, Flag(gives=True))
    log: Callable[[int, Mapping[str, float]], None] | None = option(None, shell=False)


@dataclasses.dataclass(frozen=True)
class Train(TrainMore):
    """The training of a new model.

    Attributes:
      model: autoencoder, the default, learns which items go together. It sees neither order nor
        repeats, also of histories. sasrec, hstu and gru learn what comes next: histories are in
        the order of their times, or else of the file, and an item may be in one many times.
        dlrm, the default for clicks, dcn, deepfm, wide_deep and din predict clicks.
      config: The configuration of the model, in place of one that suits the data.
      schema: The columns of a file of clicks.
      dynamic: Rows of the dynamic table of each column of 64-bit ids, which get a row when they
        are first seen, and lose it when the table is full. A configuration also says which ids
        they keep, see `DynamicTables`.
    """

    _: dataclasses.KW_ONLY
    model: str | None = option(None, shell=False)
    config: NetworkConfig | ModelConfig | None = option(None, shell=False)
    schema: ClickSchema | None = option(None, shell=False, kinds=("clicks",))
    dynamic: int | None = option(None, Flag(value="INT", default=""), kinds=("clicks",))


@dataclasses.dataclass(frozen=True)
class Training(Train):
    """A training with the facts that were found out for it.

    Attributes:
      suited: The settings of the configuration that the data decides.
      origin: Folder of a run whose model is trained on. Items and categories of the data that it
        does not know are added behind those that it knows, and no known row moves before
        training. Its network and the columns of clicks are taken over; so is the optimizer's
        state, if the optimizer is of the same kind and the learning rate is constant. The data
        should hold all interactions that count: what only the earlier data has is gradually
        forgotten.
      keep_linear: Whether linear parts are kept in the user's cache folder.
    """

    _: dataclasses.KW_ONLY
    suited: Collection[str] = option((), shell=False)
    origin: pathlib.Path | None = option(
        None, Flag(name="from", value="DIR", default="")
    )
    keep_linear: bool = option(False, shell=False)


@dataclasses.dataclass(frozen=True)
class Load(Reading):
    """A run that is there, and how its methods read files.

    Attributes:
      directory: The folder that `save`, `train` or `sparsejax train` has written.
    """

    directory: str | os.PathLike[str] = option(dataclasses.MISSING, shell=False)
