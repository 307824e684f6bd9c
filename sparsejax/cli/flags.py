"""The flags of each command, as dataclasses that tyro reads.

Only light packages are imported here, so that `sparsejax --help` answers at once.
"""

from __future__ import annotations

import dataclasses
import pathlib
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from tyro.conf import (
    Fixed,
    FlagCreatePairsOff,
    Positional,
    Suppress,
    UseAppendAction,
    arg,
)

from sparsejax.runs.models import DEFAULT_MODEL, MODELS


def _value(metavar: str, default: str | None = None) -> Any:
    """How help shows a flag's value and default; without `default`, the real default."""
    hint = None if default is None else f"(default: {default})" if default else ""
    return arg(metavar=metavar, help_behavior_hint=hint)


# As sparsejax.data has them, to read and to write.
Format = Literal["text", "pairs", "jsonl", "adjacency", "parquet"]
WrittenFormat = Literal["text", "pairs", "adjacency", "parquet"]
Precision = Literal["highest", "high", "default"]  # as sparsejax.ops has it
_Formats = _value("{text,pairs,jsonl,adjacency,parquet}", "from name and content")
_File = _value("FILE")
_OptionalFile = _value("FILE", "")
_Column = _value("COLUMN", "")
_Folder = _value("DIR")
_Mesh = "data=INT,model=INT"
# Not called model, which in messages is an axis of the mesh.
Kind = Annotated[
    Literal[
        "autoencoder", "sasrec", "hstu", "gru", "dlrm", "dcn", "deepfm", "wide_deep"
    ]
    | None,
    arg(
        name="model",
        metavar=f"{{{','.join(MODELS)}}}",
        help_behavior_hint=f"(default: {DEFAULT_MODEL})",
    ),
]
# Off unless given.
Flag = Annotated[bool, FlagCreatePairsOff, arg(help_behavior_hint="")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfKinds:
    """A command that works on models of all kinds.

    Attributes:
      given: The fields whose flags were given, also those that have their default.
    """

    given: Annotated[frozenset[str], Fixed, Suppress] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """An autoencoder: its input and its output are all features of the data.

    Attributes:
      hidden: Number of units of each hidden layer, from the first to the last.
      activation: Activation of the hidden layers: linear, or a function of jax.nn, such
        as relu, tanh or gelu.
      loss: One of softmax_cross_entropy, sigmoid_binary_cross_entropy, l2_loss and
        scaled_marginal_cross_entropy.
      normalize: Divide each input row by its L2 norm.
      corruption: Probability of dropping an input entry in training.
      dropout: Probability of dropping a hidden unit in training.
      temperature: Scores are cosines divided by this number. auto chooses it by the number
        of items, and prints it. With None, scores are dot products.
      tied: Use one kernel for both the first and the last layer.
      output_dtype: Type of the operands of the last layer's matrix products. bfloat16 is
        faster on GPUs.
      precision: Precision of products of float32 matrices. highest is float32, high has
        errors of 2^-16. default is the fastest on this device.
      param_dtype: Type in which the first and the last layer are stored. bfloat16 takes half
        the memory. It is rounded at random in training, so that small steps are not lost.
      linear: Rank of a linear part, which is computed from the data and whose scores are
        added. auto chooses it by the number of entries of an item, and prints it.
    """

    hidden: tuple[int, ...] = (256,)
    activation: str = "tanh"
    loss: str = "softmax_cross_entropy"
    normalize: bool = True
    corruption: float = 0.5
    dropout: float = 0.0
    temperature: Annotated[
        float | Literal["auto"] | None, _value("{auto,FLOAT,None}", "auto")
    ] = "auto"
    tied: Flag = False
    output_dtype: Annotated[
        str | None, _value("{bfloat16,None}", "None, that of the parameters")
    ] = None
    precision: Annotated[
        Precision | None, _value("{highest,high,default}", "default")
    ] = None
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    linear: Annotated[
        int | Literal["auto"] | None, _value("{auto,INT,None}", "auto")
    ] = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Histories:
    """A model of histories. --config has its other options.

    Attributes:
      width: Numbers in the vector of an item.
      blocks: Number of blocks, one after the other.
      heads: Heads of each attention, of sasrec and hstu. They divide the width.
    """

    width: Annotated[int | None, _value("INT", "128")] = None
    blocks: Annotated[int | None, _value("INT", "2")] = None
    heads: Annotated[int | None, _value("INT", "2")] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """One device or several, in one process or in several that run the same command.

    Attributes:
      mesh: Number of parts into which each batch (data) and each large kernel (model) is
        divided. data=2,model=4 takes 8 devices, and divides the output's kernel over all
        of them. auto takes all devices: batches are divided over the processes, kernels over
        the devices of each process. The default is one device, and with several
        processes auto.
      distributed: This process is one of several that srun, mpirun or Kubernetes started.
        They find each other through the launcher.
      coordinator: Address of process 0, with a free port. Needed without such a launcher.
      num_processes: Number of processes. Needed without such a launcher.
      process_id: Number of this process, from 0. Needed without such a launcher.
    """

    mesh: Annotated[str | None, _value(f"{_Mesh}|auto", "")] = None
    distributed: Flag = False
    coordinator: Annotated[str | None, _value("HOST:PORT", "")] = None
    num_processes: Annotated[int | None, _value("INT", "")] = None
    process_id: Annotated[int | None, _value("INT", "")] = None

    @property
    def several(self) -> bool:
        """Whether there are several processes."""
        explicit = (self.coordinator, self.num_processes, self.process_id)
        return self.distributed or explicit != (None, None, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
    """How programs for the device are compiled.

    Attributes:
      compilation_cache: Keep compiled programs and linear parts in the user's cache
        folder, and use those that are there. Several processes that work together do not.
    """

    compilation_cache: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns of a table hold what.

    Attributes:
      user: Column of users: its name, or its number from 0.
      item: Column of items, or of lists of items.
      value: Column of values, or of lists of values.
      time: Column of times, or of lists of times.
      no_value: Ignore the values: every entry counts 1.
      no_time: Leave the times out. Histories are then in the order of the file.
      delimiter: Separator of the columns of a CSV file: one or two characters.
      separator: Separator of the items in a cell, if cells hold lists: ' ' or '|'.
      time_format: Format of times, as of strptime: '%d.%m.%Y %H:%M'.
      skip_bad_lines: Leave out lines that cannot be read, of clicks too. A warning counts them
        and says which they are. More than one in a hundred is an error.
    """

    user: Annotated[int | str | None, _Column] = None
    item: Annotated[int | str | None, _Column] = None
    value: Annotated[int | str | None, _Column] = None
    time: Annotated[int | str | None, _Column] = None
    no_value: Flag = False
    no_time: Flag = False
    delimiter: Annotated[str | None, _value("TEXT", "from the content")] = None
    separator: Annotated[str | None, _value("TEXT", "")] = None
    time_format: Annotated[str | None, _value("FORMAT", "ISO 8601")] = None
    skip_bad_lines: Flag = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clicks:
    """The columns of a file of clicks. None of it is needed for saved data sets.

    Attributes:
      schema: JSON file of a ClickSchema, in place of the three flags below: it also says how
        numbers are transformed, and which categories are hashed.
      label: Column with 1 for a click and 0 for none.
      dense: Columns of numbers.
      categories: Columns of categories, or of lists of them.
      dynamic: Rows of the dynamic table of each column of 64-bit ids, which get a row when they
        are first seen, and lose it when the table is full: columns of the kind "key" in
        --schema; without one, those of --categories. --config says more, such as
        {"dynamic": {"num_rows": 50000000, "evict": "lfu", "admit": {"count": 2}}}.
    """

    schema: Annotated[pathlib.Path | None, _OptionalFile] = None
    label: Annotated[str | None, _Column] = None
    dense: Annotated[tuple[str, ...], _Column] = ()
    categories: Annotated[tuple[str, ...], _Column] = ()
    dynamic: Annotated[int | None, _value("INT", "")] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting:
    """How held-out interactions count that the model cannot find.

    Attributes:
      unknown: Held-out interactions with items that were not trained on: miss counts
        them as missed; skip leaves them out, and with them the users who have no others.
      unknown_users: Users who have no interactions that the model is shown: count ranks
        items for them, too; skip leaves them out.
      keep_seen: Also rank the items that a row already has, for data in which
        interactions repeat. Otherwise repeated interactions count as missed.
    """

    unknown: Literal["miss", "skip"] = "miss"
    unknown_users: Literal["count", "skip"] = "count"
    keep_seen: Flag = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correcting:
    """How the probabilities of a click model are corrected.

    Attributes:
      calibrate: File of examples, none of which were trained on or dropped, by which the
        probabilities are corrected.
      method: platt keeps the order of the examples. isotonic follows any curve that rises, and
        needs thousands of examples.
      negatives_kept: The share of the examples without a click that the training data kept.
    """

    calibrate: Annotated[str | None, _OptionalFile] = None
    method: Annotated[
        Literal["platt", "isotonic"] | None, _value("{platt,isotonic}", "platt")
    ] = None
    negatives_kept: Annotated[float | None, _value("SHARE", "1")] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(OfKinds):
    """Trains a model on a file of interactions, or of clicks.

    Attributes:
      data: File of the interactions to train on, or of examples of clicks.
      run: Folder to write the run to: settings, vocabulary and checkpoints. It must be
        new or empty, except with --resume.
      origin: Folder of a run whose model is trained on. Items and categories of DATA that it
        does not know are added behind those that it knows, and no known row moves before
        training. Its network and the columns of clicks are taken over; so is the optimizer's state, if --optimizer is of the same
        kind and the learning rate is constant. DATA should hold all interactions that
        count: what only the earlier data has is gradually forgotten.
      format: Format of the files.
      validation: Held-out interactions, which are ranked after each epoch: a file with
        the same rows; or the share of DATA to hold out, such as .1; or last, which holds
        out the last interaction of each row by time. Other commands then use the model
        of the best epoch. A file called last is written ./last. For clicks, a file or a
        share of the examples.
      k: Cut-off of the validation metrics: the number of recommendations that count.
      patience: Stop when the validation's ndcg@k, or AUC, has not risen for this many epochs.
      kind: autoencoder learns which items go together. sasrec, hstu and gru learn what
        comes next: histories are in the order of --time, or else of the file, and an item
        may be in one many times. dlrm, dcn, deepfm and wide_deep predict clicks. --config
        has their options.
      negatives: The loss of a model of histories is over this many items, drawn for each
        batch, instead of all. For catalogues where all take too long; a second training
        --from this run, without the flag, ends with all of them.
      config: JSON file that describes the network, instead of the network options below;
        or a model of histories, such as {"version": 1, "model": "sasrec", "width": 128}, or
        of clicks.
      optimizer: One of adam, adamw, adamax, lazy_adam, rmsprop, adadelta, adagrad,
        rowwise_adagrad, ftrl, sgd, momentum and nesterov. For histories adamw has b2 .98
        and a weight decay of .1; for clicks one that falls with the number of examples.
      learning_rate: Learning rate of the optimizer, at its highest.
      weight_decay: In each step, subtract from each weight this share of it, times the
        learning rate. Only for adamw, sgd, momentum and nesterov.
      warmup_epochs: Raise the learning rate from 0 over this many epochs, which may be a
        fraction.
      decay: cosine lowers the learning rate along a cosine, to 0 at the last epoch. A
        resume cannot raise --epochs then, since that changes the curve. none keeps it.
      batch_size: Rows per step.
      chunk_rows: Read DATA while training, about this many rows at a time, for Parquet
        that does not fit in memory: saved data sets, tables with a list of items on each
        row, or pairs sorted by user; or clicks. No batch mixes rows of two chunks. Cannot
        be used with --validation, except with a file of clicks.
      follow: Train on each file of the folder or store DATA once, in the order of their names,
        and on those that come later, until SIGTERM or Ctrl-C. For clicks with --dynamic. A file
        must be whole when it gets its name. The learning rate stays. --resume goes on.
      changes: With --follow, folder to which the changes of the tables are exported: serve
        --changes takes them.
      export_seconds: Seconds between two exports of changes.
      item_features: Content of the items: a CSV, Parquet or JSON file with a column of items,
        and columns of tags, numbers or vectors. Items that are in no event are recommended, too.
        A run --from another one needs the file again, with all items.
      content_columns: The columns of --item-features to read.
      words: Columns of --item-features whose words are tags, such as titles. Without it,
        titles are left out.
      fused: Apply the gradient of the last layer's kernel where it is computed, which
        saves an array of the kernel's size. Not with --tied.
      deterministic: Give the same bits in every process on the same kind of GPU. It can
        make steps slower. A resume must keep it.
      epochs: Number of passes over the data, including those before a resume. By default
        as many as 200 steps take, but at least 30; of histories as many as 3,500 steps
        take, but 40 to 300; of clicks as many as 1,000 steps take, but at most 10.
      seed: Seed of the initial weights, the order of rows, corruption and dropout.
      checkpoint_seconds: Seconds between checkpoints; 0 saves as often as possible.
      resume: Continue from the last checkpoint of the run, or begin if it has no checkpoint. The
        settings must be those the run was begun with; only --epochs may be higher.
      tensorboard: Folder for TensorBoard's files: loss, speed and metrics of each epoch.
        Needs pip install '.[tensorboard]'.
      export_to: Folder of versions, such as models/films, which serve --watch looks at: the
        next version is written there after training. It recommends up to --k items, or as many
        as the version before.
      gate: Write the version only if it is clearly better in this metric than the newest one
        in the folder that loads, on the events that --validation, last or a file, holds out:
        hit_rate, map, mrr, ndcg or recall. The newest one must not have been trained on them.
        Clearly: the 95 % interval of the difference is above 0.
      network: The network to train.
      histories: The model of histories to train.
      columns: Which columns of a table hold what. By default their names say it.
      clicks: The columns of a file of clicks.
      devices: The devices to train on.
      compilation: How programs for the device are compiled.
    """

    data: Annotated[Positional[str], arg(metavar="DATA")]
    run: Annotated[pathlib.Path, _Folder]
    origin: Annotated[
        pathlib.Path | None, arg(name="from", metavar="DIR", help_behavior_hint="")
    ] = None
    format: Annotated[Format | None, _Formats] = None
    validation: Annotated[str | None, _value("{FILE,SHARE,last}", "")] = None
    k: int = 20
    patience: Annotated[int | None, _value("INT", "train all epochs")] = None
    kind: Kind = None
    negatives: Annotated[int | None, _value("INT", "all items")] = None
    config: Annotated[pathlib.Path | None, _OptionalFile] = None
    optimizer: Annotated[
        str | None, _value("STR", "adam, of histories and clicks adamw")
    ] = None
    learning_rate: Annotated[float | None, _value("FLOAT", ".002, of clicks .005")] = (
        None
    )
    weight_decay: Annotated[
        float | None,
        _value("FLOAT", "0, of adamw .0001, of histories .1, of clicks .3 to 8"),
    ] = None
    warmup_epochs: float = 0.0
    decay: Annotated[
        Literal["cosine", "none"] | None, _value("{cosine,none}", "cosine")
    ] = None
    batch_size: Annotated[
        int | None, _value("INT", "512, of histories 256, of clicks 64 to 4096")
    ] = None
    chunk_rows: Annotated[int | None, _value("INT", "all rows")] = None
    follow: Flag = False
    changes: Annotated[pathlib.Path | None, _value("DIR", "")] = None
    export_seconds: Annotated[float | None, _value("FLOAT", "60")] = None
    item_features: Annotated[str | None, _value("FILE", "")] = None
    content_columns: Annotated[
        tuple[str, ...],
        arg(name="columns", metavar="COLUMN", help_behavior_hint="(default: all)"),
    ] = ()
    words: Annotated[tuple[str, ...], _Column] = ()
    fused: Flag = False
    deterministic: Flag = False
    epochs: Annotated[
        int | None, _value("INT", "30, of histories 40, or more, of clicks 1")
    ] = None
    seed: int = 0
    checkpoint_seconds: float = 30.0
    resume: Flag = False
    tensorboard: Annotated[pathlib.Path | None, _value("DIR", "")] = None
    export_to: Annotated[pathlib.Path | None, _value("DIR", "")] = None
    gate: Annotated[str | None, _value("METRIC@K", "any")] = None
    network: Network = Network()
    histories: Histories = Histories()
    columns: Columns = Columns()
    clicks: Clicks = Clicks()
    devices: Devices = Devices()
    compilation: Compilation = Compilation()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnsOfTune(Columns):
    """The flags of `Columns`, but --time is something else."""

    time: Annotated[int | str | None, arg(name="time-column", metavar="COLUMN")] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tune(OfKinds):
    """Trains with many settings, and keeps those that are best on held-out interactions.

    Tuned are the number of hidden units, temperature, corruption and learning rate; or, of
    models of histories, width, dropout, temperature and learning rate; or, of click models,
    dim and learning rate. Optuna draws them.
    The first trial has the settings of the flags. Trials that look worse than
    others did after as many epochs end early. To continue after an interruption, or with
    more trials, repeat the command. Needs pip install '.[tune]'.

    Prints the command that trains on all of DATA with the best settings.

    Attributes:
      data: File of the interactions, or of clicks. A part of it is held out.
      run: Folder to write to: all trials, network.json for train --config, and the run of
        the best trial.
      trials: Number of trials, including those before an interruption.
      time: Begin no trial after this time, and end the one that is running: 90s, 30m, 2h.
      kind: The model, as for train.
      validation: Part to hold out of DATA: a share; or last, the last interaction of each
        row by time. Or a file of held-out interactions with the same rows.
      k: Cut-off of the nDCG that decides: the number of recommendations that count.
      epochs: Number of passes over the data in a trial, as for train.
      patience: End a trial when its nDCG has not risen for this many epochs.
      format: Format of the files.
      optimizer: Name of the optimizer, as for train.
      learning_rate: Learning rate of the first trial.
      batch_size: Rows per step.
      item_features: Content of the items, as for train.
      content_columns: The columns of --item-features to read.
      words: Columns of --item-features whose words are tags, as for train.
      seed: Seed of the trials' settings and of each training.
      network: The network of the first trial, if it is an autoencoder. Also fixes what is not
        tuned.
      histories: The model of histories of the first trial. Also fixes what is not tuned.
      columns: Which columns of a table hold what. By default their names say it.
      clicks: The columns of a file of clicks.
      compilation: How programs for the device are compiled.
    """

    data: Annotated[Positional[str], arg(metavar="DATA")]
    run: Annotated[pathlib.Path, _Folder] = pathlib.Path("tuned")
    trials: int = 50
    time: Annotated[str | None, _value("TIME", "no limit")] = None
    kind: Kind = None
    validation: Annotated[
        str | None, _value("{FILE,SHARE,last}", ".1, of histories last")
    ] = None
    k: int = 20
    epochs: Annotated[int | None, _value("INT", "as for train")] = None
    patience: Annotated[int | None, _value("INT", "train all epochs")] = None
    format: Annotated[Format | None, _Formats] = None
    optimizer: Annotated[str | None, _value("STR", "as for train")] = None
    learning_rate: Annotated[float | None, _value("FLOAT", "as for train")] = None
    batch_size: Annotated[int | None, _value("INT", "as for train")] = None
    item_features: Annotated[str | None, _value("FILE", "")] = None
    content_columns: Annotated[
        tuple[str, ...],
        arg(name="columns", metavar="COLUMN", help_behavior_hint="(default: all)"),
    ] = ()
    words: Annotated[tuple[str, ...], _Column] = ()
    seed: int = 0
    network: Network = Network()
    histories: Histories = Histories()
    columns: ColumnsOfTune = ColumnsOfTune()
    clicks: Clicks = Clicks()
    compilation: Compilation = Compilation()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(OfKinds):
    """Measures how well a model finds held-out interactions, compared with popularity.

    For a click model, measures how well it predicts the labels of one file: AUC, log loss and
    others. Prints a table and, as the last line, the same numbers as JSON.

    Attributes:
      run: Folder of the run that train wrote.
      train: Interactions that the model was trained on. The model is shown them; they
        are not recommended. For a click model the examples to measure on, and no TEST.
      test: Interactions that the model should find. Rows are matched by name.
      history: More interactions that the model is shown and that are not recommended.
        May be given several times.
      fold_in: Instead of TEST, for rows that the model was not trained on: the share of
        each row's interactions that the model is shown. It should find the others.
      seed: Seed of the choice that --fold-in makes.
      candidates: File with a list of items for each row: rank only these items and the
        held-out ones.
      popularity: File of the interactions that popularity is counted from. Its items
        count as those that the model was trained on.
      baselines: Also measure models without training, made of the same interactions as
        popularity: nearest items (ItemKNN), and EASE if its matrices fit in memory.
      groups: For clicks, a column of categories: also measure the AUC within each of them.
      by_entries: Also measure items with few and with many interactions in TRAIN apart.
      exclude_items: Rank none of these items, such as those sold out: names separated by commas,
        or a file with one name per line. Held-out interactions with them count as missed.
      only_items: Rank only these items: names separated by commas, or a file with one name per
        line.
      k: Number of recommendations that count, or several numbers, such as 5,10.
      format: Format of all files.
      columns: Which columns of a table hold what. By default their names say it.
      counting: How interactions count that the model cannot find.
      correcting: How the probabilities of a click model are corrected.
      devices: The devices to compute on.
      compilation: How programs for the device are compiled.
    """

    run: Annotated[Positional[pathlib.Path], _Folder]
    train: Annotated[Positional[str], arg(metavar="TRAIN")]
    test: Annotated[Positional[str | None], _value("[TEST]", "")] = None
    history: Annotated[UseAppendAction[tuple[str, ...]], _OptionalFile] = ()
    fold_in: Annotated[float | None, _value("FLOAT", "")] = None
    seed: Annotated[int | None, _value("INT", "0")] = None
    candidates: Annotated[str | None, _value("FILE", "rank all items")] = None
    popularity: Annotated[str | None, _value("FILE", "TRAIN")] = None
    baselines: Flag = False
    groups: Annotated[str | None, _Column] = None
    by_entries: Flag = False
    exclude_items: Annotated[str | None, _value("{NAME[,NAME...],FILE}", "")] = None
    only_items: Annotated[str | None, _value("{NAME[,NAME...],FILE}", "all")] = None
    k: Annotated[str, arg(metavar="INT[,INT...]")] = "20"
    format: Annotated[Format | None, _Formats] = None
    columns: Columns = Columns()
    counting: Counting = Counting()
    correcting: Correcting = Correcting()
    devices: Devices = Devices()
    compilation: Compilation = Compilation()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare(OfKinds):
    """Says whether one run is better than another, on the same held-out interactions.

    Prints the metrics of both, and of each difference an interval that 95 % of the resamples
    of the rows are in (a paired bootstrap). An interval without 0 is more than the luck of
    which rows were measured. The last line has the same numbers as JSON.

    Attributes:
      run: Folder of the first run.
      other: Folder of the second run, also of a model of another kind for the same data.
      train: Interactions that the models are shown. For click models the examples to
        measure on, and no TEST.
      test: Interactions that the models should find. Rows are matched by name.
      candidates: File with a list of items for each row: rank only these items and the
        held-out ones.
      exclude_items: Rank none of these items, such as those sold out: names separated by commas,
        or a file with one name per line. Held-out interactions with them count as missed.
      only_items: Rank only these items: names separated by commas, or a file with one name per
        line.
      k: Number of recommendations that count, or several numbers, such as 5,10.
      format: Format of all files.
      columns: Which columns of a table hold what. By default their names say it.
      counting: How interactions count that the model cannot find.
      devices: The devices to compute on.
      compilation: How programs for the device are compiled.
    """

    run: Annotated[Positional[pathlib.Path], _Folder]
    other: Annotated[Positional[pathlib.Path], _Folder]
    train: Annotated[Positional[str], arg(metavar="TRAIN")]
    test: Annotated[Positional[str | None], _value("[TEST]", "")] = None
    candidates: Annotated[str | None, _value("FILE", "rank all items")] = None
    exclude_items: Annotated[str | None, _value("{NAME[,NAME...],FILE}", "")] = None
    only_items: Annotated[str | None, _value("{NAME[,NAME...],FILE}", "all")] = None
    k: Annotated[str, arg(metavar="INT[,INT...]")] = "20"
    format: Annotated[Format | None, _Formats] = None
    columns: Columns = Columns()
    counting: Counting = Counting()
    devices: Devices = Devices()
    compilation: Compilation = Compilation()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predict(OfKinds):
    """Writes the best items for each row, or how probable clicks are.

    The name of the output file decides its form. .csv and .parquet have the columns user,
    item, score and rank. .jsonl has an object with user, items and scores for each row.
    Any other name gives row<TAB>item,score:item,score..., where \\, \\: \\t \\n \\r and
    \\\\ in a name stand for comma, colon, TAB, line end and backslash.

    For a click model, the file has the probability of each example of DATA in their order: .npy
    as float32, .csv below the header probability, any other name a number a line.

    With --parts, the first argument is a predictor that export wrote, DATA a folder that
    prepare wrote, and --out a folder. All three may be addresses. Parts can run anywhere and
    in any order; one that is complete is not written again.

    Attributes:
      run: Folder of the run that train wrote.
      data: File of the interactions to recommend from, or of examples of clicks.
      out: File to write. An existing file is replaced.
      parts: Write recommendations in so many parts, to a folder.
      part: With --parts: write only the part of this number, from 0. Without it all parts
        are written, and the manifest.
      workers: With --parts: number of processes that make all parts here. They share the
        cores and the GPUs.
      finish: With --parts: only write the manifest, or say which parts are missing.
      users: Only these rows, in this order: names separated by commas, or a file with one
        name per line.
      k: Number of items for each row.
      keep_seen: Also recommend what a row already has in DATA, for data in which interactions
        repeat.
      exclude_seen: Do not recommend it. This is the default.
      exclude: Also do not recommend a row's interactions in this file. Rows are matched by
        name; nothing is excluded for a row that is not in the file.
      exclude_items: Recommend none of these items, such as those sold out: names separated by
        commas, or a file with one name per line.
      only_items: Recommend only these items: names separated by commas, or a file with one
        name per line.
      format: Format of the files that are read.
      columns: Which columns of a table hold what. By default their names say it.
      devices: The devices to compute on.
      compilation: How programs for the device are compiled.
    """

    run: Annotated[Positional[str], _Folder]
    data: Annotated[Positional[str], arg(metavar="DATA")]
    out: Annotated[str, _File]
    parts: Annotated[int | None, _value("INT", "")] = None
    part: Annotated[int | None, _value("INT", "all")] = None
    workers: Annotated[int | None, _value("INT", "one a GPU, or 1")] = None
    finish: Flag = False
    users: Annotated[str | None, _value("{NAME[,NAME...],FILE}", "all rows")] = None
    k: int = 10
    keep_seen: Flag = False
    exclude_seen: Flag = False
    exclude: Annotated[str | None, _OptionalFile] = None
    exclude_items: Annotated[str | None, _value("{NAME[,NAME...],FILE}", "")] = None
    only_items: Annotated[str | None, _value("{NAME[,NAME...],FILE}", "all")] = None
    format: Annotated[Format | None, _Formats] = None
    columns: Columns = Columns()
    devices: Devices = Devices()
    compilation: Compilation = Compilation()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(OfKinds):
    """Writes a predictor: one file that recommends without the model's code.

    sparsejax.load_predictor reads it. It contains the names of the items; of a click model the
    schema and the categories.

    Attributes:
      run: Folder of the run that train wrote.
      out: File to write. An existing file is replaced.
      k: Largest number of items that the predictor recommends to a row.
      batch_size: Largest number of rows that the predictor scores at a time.
      unknown_ids: For dynamic tables, what an id without a row reads: init is the vector that it
        would begin with.
      int8: On a Hopper GPU items are also held in int8, which is read first: the answers are the
        same, and come sooner where there are many items.
      compile: Also compile its programs for the device here, up to 256 items a row, and keep
        them for the processes that load it.
      correcting: How the probabilities of a click model are corrected.
      compilation: How programs for the device are compiled.
    """

    run: Annotated[Positional[pathlib.Path], _Folder]
    out: Annotated[Positional[pathlib.Path], arg(metavar="FILE")]
    k: int = 10
    batch_size: int = 512
    unknown_ids: Annotated[
        Literal["init", "zeros"] | None, _value("{init,zeros}", "init")
    ] = None
    int8: bool = False
    compile: bool = False
    correcting: Correcting = Correcting()
    compilation: Compilation = Compilation()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    """Converts a file of interactions to another format.

    Only parquet keeps features without entries. Times are kept by parquet and pairs.

    Attributes:
      input: File to read, which may be compressed (.gz, .xz, .bz2, .zst, .zip); also a folder,
        or an address such as s3://bucket/folder.
      output: File to write, compressed if its name ends in .gz or .xz. An existing file
        is replaced.
      format: Format of IN.
      to: Format of OUT. Needed unless its name ends in .parquet or in .csv, which is
        pairs.
      features: Keep only the features of this file, such as a run's vocabulary.parquet,
        in the order of that file.
      columns: Which columns of a table hold what. By default their names say it.
    """

    input: Annotated[Positional[str], arg(metavar="IN")]
    output: Annotated[Positional[pathlib.Path], arg(metavar="OUT")]
    format: Annotated[Format | None, arg(name="from"), _Formats] = None
    to: Annotated[
        WrittenFormat | None, _value("{text,pairs,adjacency,parquet}", "from the name")
    ] = None
    features: Annotated[str | None, _value("FILE", "keep all")] = None
    columns: Columns = Columns()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepare:
    """Turns events into a data set in a folder; they need not fit in memory.

    Other commands take the folder: OUT is what to train on, OUT/test what was held out.
    Needs pip install '.[prepare]'.

    Attributes:
      events: File of events, which may be compressed (.gz, .xz, .bz2, .zst, .zip); also a folder,
        or an address such as s3://bucket/folder.
      out: Folder to make, or an address.
      duplicates: Value of an entry that has several events: their sum (add), that of the
        latest (last), or the largest (max).
      min_user: Leave out users with fewer items, again and again until all have as many.
      min_item: Leave out items with fewer users, likewise.
      features: Keep only the features of this file, such as a run's vocabulary.parquet,
        in the order of that file.
      split_time: Hold out all interactions from this point in time on, written as in the
        file; a date as 2024-12-31.
      repeats: With --split-time: new, the default, holds out only items that a user did not
        have before; all also holds out repeats.
      split_last: Hold out so many of the last interactions of each user.
      split_fraction: Hold out a random part; this is the share that stays in train.
      seed: Seed of the random choice.
      memory: Memory for the engine, for example 4GB.
      format: Format of EVENTS.
      columns: Which columns of a table hold what. By default their names say it.
    """

    events: Annotated[Positional[str], arg(metavar="EVENTS")]
    out: Annotated[Positional[str], arg(metavar="OUT")]
    duplicates: Literal["add", "last", "max"] = "add"
    min_user: int = 1
    min_item: int = 1
    features: Annotated[str | None, _value("FILE", "keep all")] = None
    split_time: Annotated[str | None, _value("TIME", "")] = None
    repeats: Annotated[Literal["new", "all"] | None, _value("{new,all}", "")] = None
    split_last: Annotated[int | None, _value("INT", "")] = None
    split_fraction: Annotated[float | None, _value("FLOAT", "")] = None
    seed: int = 0
    memory: Annotated[str | None, _value("SIZE", "80 % of all")] = None
    format: Annotated[Format | None, _Formats] = None
    columns: Columns = Columns()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Splits interactions or clicks into DIR/train.parquet and DIR/heldout.parquet.

    Attributes:
      data: File of the interactions, or of examples of clicks.
      by: Interactions to hold out. last: the last ones of each row by time. time: all
        interactions from one point in time on, which is closest to how a model is used.
        random: a random share of each row. rows: a random share of the rows, whole.
        items: all interactions of a random share of the items. Clicks are split by time or by
        rows.
      out: Folder to make.
      n: With last: number of interactions to hold out of each row. At least one stays in
        train.
      at: With time: the point in time, written as in the file; a date as 2024-12-31.
      fraction: With time, random, rows and items: share that stays in train.
      seed: With random, rows and items: seed of the random choice.
      repeats: With time, or with last of histories: new holds out only items that a user did
        not have before; all also holds out repeats. new is the default with time, all with
        last.
      histories: Keep the order and all repeats, for models of histories. Without times
        the order in DATA is that of time.
      format: Format of DATA.
      columns: Which columns of a table hold what. By default their names say it.
      clicks: The columns of a file of clicks. --time names that of times.
    """

    data: Annotated[Positional[str], arg(metavar="DATA")]
    by: Literal["last", "time", "random", "rows", "items"]
    out: Annotated[pathlib.Path, _Folder]
    n: Annotated[int | None, _value("INT", "1")] = None
    at: Annotated[str | None, _value("TIME", "")] = None
    fraction: Annotated[float | None, _value("FLOAT", "")] = None
    seed: Annotated[int | None, _value("INT", "0")] = None
    repeats: Annotated[Literal["new", "all"] | None, _value("{new,all}", "")] = None
    histories: Flag = False
    format: Annotated[Format | None, _Formats] = None
    columns: Columns = Columns()
    clicks: Clicks = Clicks()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(OfKinds):
    """Writes an HTML page about a run: how good it is, recommendations, curves, layers.

    Attributes:
      run: Folder of the run that train wrote.
      train: File of the interactions that the model is shown, for recommendations on the
        page.
      test: File of the interactions that the model should find, for metrics on the page.
        It needs --train. For a click model, the examples to measure on, without --train.
      groups: For clicks, a column of categories: also measure the AUC within each of them.
      titles: File with two columns: the name of an item, and what to show in its place.
      out: File to write. An existing file is replaced.
      k: Number of recommendations that count, or several numbers, such as 5,10.
      format: Format of both files.
      columns: Which columns of a table hold what. By default their names say it.
      counting: How interactions count that the model cannot find.
      devices: The devices to compute on.
      compilation: How programs for the device are compiled.
    """

    run: Annotated[Positional[pathlib.Path], _Folder]
    train: Annotated[str | None, _OptionalFile] = None
    test: Annotated[str | None, _OptionalFile] = None
    groups: Annotated[str | None, _Column] = None
    titles: Annotated[str | None, _OptionalFile] = None
    out: Annotated[pathlib.Path | None, _value("FILE", "report.html in DIR")] = None
    k: Annotated[str, arg(metavar="INT[,INT...]")] = "20"
    format: Annotated[Format | None, _Formats] = None
    columns: Columns = Columns()
    counting: Counting = Counting()
    devices: Devices = Devices()
    compilation: Compilation = Compilation()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vectors(OfKinds):
    """Writes the vector of each item, or of each row of a file, with its name.

    Attributes:
      run: Folder of the run that train wrote.
      out: File to write: .parquet, .npz, or .npy (without names). An existing file is
        replaced.
      data: File of interactions: write the vectors of its rows instead of the items'.
      format: Format of the file of interactions.
      columns: Which columns of a table hold what. By default their names say it.
      compilation: How programs for the device are compiled.
    """

    run: Annotated[Positional[pathlib.Path], _Folder]
    out: Annotated[pathlib.Path, _File]
    data: Annotated[str | None, _OptionalFile] = None
    format: Annotated[Format | None, _Formats] = None
    columns: Columns = Columns()
    compilation: Compilation = Compilation()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Similar(OfKinds):
    """Prints the most similar items: item<TAB>item,cosine:item,cosine...

    Attributes:
      run: Folder of the run that train wrote.
      items: Names of items. Each gives a line of output.
      k: Number of similar items for each.
      compilation: How programs for the device are compiled.
    """

    run: Annotated[Positional[pathlib.Path], _Folder]
    items: Annotated[Positional[tuple[str, ...]], _value("ITEM", "")]
    k: int = 10
    compilation: Compilation = Compilation()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(OfKinds):
    """Says how much of each GPU's memory training takes, and whether it fits.

    The exit status is 1 if it does not fit. No arrays of that size are made. Items need
    --items, --rows and --entries. For a click model, it says where the tables should lie.

    Attributes:
      items: Number of items.
      rows: Number of rows of the data; of histories those with two entries or more.
      entries: Number of entries of the data, over all rows.
      features: Number of input features, if they are not the items. The targets are
        separate data then.
      target_entries: Number of entries of the targets, over all rows.
      values: The entries have values.
      times: The entries have times. Among the models of histories, hstu reads them.
      item_features: Content of the items, as for train. --items counts all that are in it.
      content_columns: The columns of --item-features to read.
      words: Columns of --item-features whose words are tags, as for train.
      examples: For clicks, a file whose categories are counted. Hashed columns need none.
      mesh: Number of devices over which each batch is divided (data), and over which the
        kernel of the first layer is divided (model). That of the last layer is divided
        over all devices.
      memory: Memory of a device, for example 141GB.
      compile: Also print the memory that the compiler needs, for a mesh of devices of the
        kind that is here. There may be fewer devices than the mesh has.
      kind: The model, as for train. The length of histories is chosen as for train, by the
        mean number of entries of a row.
      negatives: Plan for training with --negatives.
      config: JSON file that describes the network, instead of the network options below;
        or a model of histories.
      optimizer: Name of the optimizer, as for train.
      batch_size: Rows per step.
      fused: Plan for training with --fused.
      network: The network to plan for.
      histories: The model of histories to plan for.
      clicks: The columns of a file of clicks.
      compilation: How programs for the device are compiled.
    """

    items: Annotated[int | None, _value("INT", "")] = None
    rows: Annotated[int | None, _value("INT", "")] = None
    entries: Annotated[int | None, _value("INT", "")] = None
    features: Annotated[int | None, _value("INT", "the items")] = None
    target_entries: Annotated[int | None, _value("INT", "those of the inputs")] = None
    values: Flag = False
    times: Flag = False
    item_features: Annotated[str | None, _OptionalFile] = None
    content_columns: Annotated[
        tuple[str, ...],
        arg(name="columns", metavar="COLUMN", help_behavior_hint="(default: all)"),
    ] = ()
    words: Annotated[tuple[str, ...], _Column] = ()
    examples: Annotated[str | None, _OptionalFile] = None
    mesh: Annotated[str, _value(_Mesh)] = "data=1,model=1"
    memory: Annotated[
        str | None, _value("SIZE", "what JAX may take of the device here")
    ] = None
    compile: Flag = False
    kind: Kind = None
    negatives: Annotated[int | None, _value("INT", "all items")] = None
    config: Annotated[pathlib.Path | None, _OptionalFile] = None
    optimizer: Annotated[str | None, _value("STR", "as for train")] = None
    batch_size: Annotated[int | None, _value("INT", "as for train")] = None
    fused: Flag = False
    network: Network = Network()
    histories: Histories = Histories()
    clicks: Clicks = Clicks()
    compilation: Compilation = Compilation()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve:
    """Answers requests over HTTP and gRPC, by the Open Inference Protocol, until SIGTERM comes.

    What happens is written to stderr, as lines of JSON. Needs pip install '.[serve]'.

    Attributes:
      model: File that export wrote, or its address in a store; or a folder of versions, such
        as models/films with models/films/3/model.predictor; or the folder of a run, whose
        model then recommends up to 100 items a row.
      name: The model's name in the protocol.
      host: Name or address to listen at. 0.0.0.0 is all of IPv4 that this machine has, and
        :: all of IPv6 and IPv4.
      port: Port of HTTP; 0 takes a free one.
      grpc_port: Port of gRPC, which is off by default.
      tls_cert: File of the certificates, for TLS.
      tls_key: File of the certificate's key.
      shapes: Programs to compile: rows x entries. A batch goes into the smallest that holds it.
      max_wait: Seconds for which a batch that is not full waits on an idle device.
      watch: Seconds between looks for a newer version in the folder. By default the service
        stays with the first one.
      keep: Versions before the one that serves which still answer, in memory, who names them.
      swap: Where a newer version is loaded. beside: while the older one serves, so the device
        needs room for both. drain: after the older one has answered what it has; until the
        newer one is loaded requests are answered with status 503.
      histories: A saved data set of what users had before: a request may then name users.
      similar: Serve a second model, called similar: items like given items.
      exclude_file: Recommend none of these items, such as those sold out: a file with a name on
        each line. It is read again when it changes.
      changes: Folder of changes that train --follow writes: the tables of a click model become
        what they were at the last export, without a restart.
      admin: Port, or HOST:PORT, of the protocol's repository extension: whoever reaches it may
        load the newest version in the folder, and unload it. Off by default; the host is
        127.0.0.1 unless it is given.
      page: A page for a person at the address itself, with a form that asks the models.
      grace: Seconds after SIGTERM in which the process ends.
      compilation: How programs for the device are compiled.
    """

    model: Annotated[Positional[str], _File]
    name: Annotated[
        str | None,
        _value("NAME", "that of the file, without its ending, or of the folder"),
    ] = None
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: Annotated[int | None, _value("INT", "")] = None
    tls_cert: Annotated[pathlib.Path | None, _OptionalFile] = None
    tls_key: Annotated[pathlib.Path | None, _OptionalFile] = None
    shapes: Annotated[
        tuple[str, ...], _value("INTxINT", "on a CPU up to 64 rows, on a GPU all but 8")
    ] = ()
    max_wait: float = 0.0
    watch: Annotated[float | None, _value("FLOAT", "")] = None
    keep: int = 0
    swap: Literal["beside", "drain"] = "beside"
    histories: Annotated[str | None, _OptionalFile] = None
    similar: bool = False
    exclude_file: Annotated[str | None, _OptionalFile] = None
    changes: Annotated[str | None, _value("DIR", "")] = None
    admin: Annotated[str | None, _value("[HOST:]PORT", "")] = None
    page: bool = True
    grace: float = 30.0
    compilation: Compilation = Compilation()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportTriton:
    """Writes a predictor into a model repository of NVIDIA's Triton, as the next version.

    Needs pip install '.[serve]', as does Triton's Python.

    Attributes:
      model: File that export wrote.
      repository: Folder of the models of a Triton server. It is made if there is none.
      name: The model's name in the repository.
      shapes: Programs to compile: rows x entries. A batch goes into the smallest that holds it.
    """

    model: Annotated[Positional[pathlib.Path], _File]
    repository: Annotated[Positional[pathlib.Path], _File]
    name: Annotated[
        str | None, _value("NAME", "that of the file, without its ending")
    ] = None
    shapes: Annotated[
        tuple[str, ...], _value("INTxINT", "on a CPU up to 64 rows, on a GPU all but 8")
    ] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo:
    """Trains on the data that comes with the package and shows recommendations.

    Takes less than two minutes on two cores.

    Attributes:
      report: HTML page to write. An existing file is replaced.
      compilation: How programs for the device are compiled.
    """

    report: Annotated[pathlib.Path, _File] = pathlib.Path("sparsejax-demo.html")
    compilation: Compilation = Compilation()


Command = (
    Train
    | Tune
    | Evaluate
    | Compare
    | Predict
    | Export
    | Convert
    | Prepare
    | Split
    | Report
    | Vectors
    | Similar
    | Plan
    | Serve
    | ExportTriton
    | Demo
)

# Commands that read files, with the flags of Columns.
Reading = Train | Evaluate | Compare | Predict | Convert | Split | Report | Vectors


def flags_of(kind: type) -> dict[str, str]:
    """The flag of each field that has one, including the fields of nested dataclasses.

    >>> flags_of(Export)
    {'k': '--k', 'batch_size': '--batch-size'}

    Args:
      kind: the dataclass of a command, or of some of its flags.
    """
    return {name: flag for name, flag, _ in _fields_of(kind)}


def _fields_of(kind: type) -> Iterator[tuple[str, str, Any]]:
    """Name, flag and annotation of each field that has a flag."""
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        settings = getattr(hint, "__metadata__", ())
        if dataclasses.is_dataclass(hint):
            yield from _fields_of(typing.cast(type, hint))
        elif Positional not in settings and Fixed not in settings:
            names = (getattr(setting, "name", None) for setting in settings)
            word = next(filter(None, names), name.replace("_", "-"))
            yield name, f"--{word}", hint


def check_lists(kind: type, argv: Sequence[str]) -> None:
    """Raises ValueError where the flag of a list is given twice: the last one alone would count.

    >>> check_lists(Train, ["data", "--dense", "age", "--dense", "price", "--fused"])
    Traceback (most recent call last):
    ...
    ValueError: --dense is given twice: write --dense age price
    """
    parts: list[list[str]] = [[""]]  # a flag, and the words after it
    for word in argv:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            parts.append([flag.replace("_", "-"), *([value] if value else [])])
        else:
            parts[-1].append(word)
    for _, flag, hint in _fields_of(kind):
        type_ = getattr(hint, "__origin__", hint)
        is_list = tuple in (type_, typing.get_origin(type_))
        given = [part[1:] for part in parts if part[0] == flag]
        adds = UseAppendAction in getattr(hint, "__metadata__", ())
        if is_list and not adds and len(given) > 1:
            words = " ".join(word for part in given for word in part)
            raise ValueError(f"{flag} is given twice: write {flag} {words}")


def given(kind: type, argv: Sequence[str]) -> frozenset[str]:
    """The fields of a command whose flags are among the words of a command line.

    >>> sorted(given(Export, ["run", "out", "--k", "10"]))
    ['k']
    """
    words = {word.partition("=")[0].replace("_", "-") for word in argv}
    return frozenset(
        name
        for name, flag in flags_of(kind).items()
        if words & {flag, flag.replace("--", "--no-", 1)}
    )
