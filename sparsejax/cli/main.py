"""The command line: `sparsejax train | evaluate | predict | report | ...`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import re
import sys
import traceback
import warnings
from collections.abc import Generator, Sequence
from typing import Annotated, Literal

import tyro
from tyro.conf import (
    FlagCreatePairsOff,
    OmitArgPrefixes,
    Positional,
    UseAppendAction,
    arg,
)

import sparsejax
from sparsejax.mesh import interrupts

Format = Literal["text", "pairs", "adjacency", "parquet"]  # as sparsejax.data has it
_Formats = arg(metavar="{text,pairs,adjacency,parquet}")
_File = arg(metavar="FILE")
_Column = arg(metavar="COLUMN")
_Folder = arg(metavar="DIR")
Flag = Annotated[bool, FlagCreatePairsOff]  # off unless given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """Its input and its output are all features of the data.

    Attributes:
      hidden: Units of each hidden layer.
      activation: A function of jax.nn, as relu, tanh or gelu, or linear.
      loss: softmax_cross_entropy, sigmoid_binary_cross_entropy, l2_loss or
        scaled_marginal_cross_entropy.
      normalize: Divide each input row by its L2 norm.
      corruption: Probability with which an input entry is dropped in training.
      dropout: Probability with which a hidden unit is dropped in training.
      temperature: Make scores cosines divided by this; None: dot products.
      tied: Share one kernel between the first and the last layer.
      output_dtype: Of the operands of the output's products: bfloat16 is faster on GPUs.
    """

    hidden: tuple[int, ...] = (256,)
    activation: str = "tanh"
    loss: str = "softmax_cross_entropy"
    normalize: bool = True
    corruption: float = 0.5
    dropout: float = 0.0
    temperature: Annotated[float | None, arg(metavar="{FLOAT,None}")] = 0.1
    tied: Flag = False
    output_dtype: Annotated[str | None, arg(metavar="{bfloat16,None}")] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """One or several, in one process or in several, which run the same command.

    Attributes:
      mesh: How many parts batches and kernels are divided into, as data=2,model=4. By
        default one device is used; by several processes all, each kernel divided over
        the devices of a process and each batch over the processes.
      distributed: This is one of several processes, which srun, mpirun or Kubernetes has
        started and tells of each other.
      coordinator: Where process 0 listens, if nothing tells the processes.
      num_processes: How many there are.
      process_id: Which one this is, from 0.
    """

    mesh: Annotated[str | None, arg(metavar="data=INT,model=INT")] = None
    distributed: Flag = False
    coordinator: Annotated[str | None, arg(metavar="HOST:PORT")] = None
    num_processes: Annotated[int | None, arg(metavar="INT")] = None
    process_id: Annotated[int | None, arg(metavar="INT")] = None

    @property
    def several(self) -> bool:
        """Whether there are several processes."""
        explicit = (self.coordinator, self.num_processes, self.process_id)
        return self.distributed or explicit != (None, None, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """Of files that are tables; unless given they are known by their names.

    Attributes:
      user: The column of users, by name or by number from 0.
      item: The column of items, or of lists of them.
      value: The column of values, or of lists of them.
      time: The column of times, or of lists of them.
      no_value: Ignore values: every entry counts 1.
      delimiter: What separates the columns of CSV, where it is not clear: one or two
        characters.
    """

    user: Annotated[int | str | None, _Column] = None
    item: Annotated[int | str | None, _Column] = None
    value: Annotated[int | str | None, _Column] = None
    time: Annotated[int | str | None, _Column] = None
    no_value: Flag = False
    delimiter: Annotated[str | None, arg(metavar="TEXT")] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting:
    """What counts of that which cannot be found.

    Attributes:
      unknown: What held-out interactions with items that were not trained on are: missed,
        or skipped with the users who have no others.
      keep_seen: Rank also what a row already has, where interactions repeat. Otherwise
        repeated ones are missed.
    """

    unknown: Literal["miss", "skip"] = "miss"
    keep_seen: Flag = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Trains an autoencoder on a file of interactions.

    Attributes:
      data: The interactions to train on.
      run: Folder for the model: settings, vocabulary, checkpoints. It must not exist, or
        be empty.
      format: Format of the files, where it is not clear from name and content.
      validation: A file of held-out interactions of the same rows; or a share of DATA to
        hold out, as .1; or last, which holds out the last of each row by time. They are
        ranked after every epoch, and the model of the best epoch is used later. A file
        of such a name is ./last.
      k: Cut-off of the validation metrics.
      patience: Stop when ndcg@k of the validation has not risen for so many epochs.
      config: The network as JSON, instead of the network options below.
      optimizer: adam, adamw, lazy_adam, rmsprop, adadelta, adagrad, rowwise_adagrad, sgd,
        momentum or nesterov.
      learning_rate: Size of its steps.
      weight_decay: Share of each weight that a step takes off, times the learning rate.
        For adamw (.0001 unless given), sgd, momentum and nesterov.
      warmup_epochs: Raise the learning rate from 0 over so many epochs, or parts of one.
      cosine_decay: Lower the learning rate to 0 along a cosine, until the last epoch. More
        epochs are another schedule then, so that a resume cannot raise them.
      batch_size: Rows a step.
      chunk_rows: Read DATA while training, about so many rows at a time: for Parquet
        that does not fit in memory: saved data sets, tables with a list of items on each
        row, or pairs sorted by user. Rows of different chunks are not mixed. Without
        --validation.
      fused: Apply the output's gradient where it is made, which saves an array of its
        kernel's size. Not with a tied output.
      epochs: Passes over the data, those before a resume included.
      seed: Another seed, another model.
      checkpoint_seconds: Time between checkpoints; 0 is as often as possible.
      resume: Continue from the last checkpoint, if there is one. The other options must
        be those that the run was begun with; only epochs may be raised.
      tensorboard: Folder to write the loss, the speed and the metrics of each epoch to,
        for TensorBoard. Needs the extra tensorboard.
      network: The network.
      columns: The columns of the files.
      devices: What to train on.
    """

    data: Annotated[Positional[str], arg(metavar="DATA")]
    run: Annotated[pathlib.Path, _Folder]
    format: Annotated[Format | None, _Formats] = None
    validation: Annotated[str | None, arg(metavar="{FILE,SHARE,last}")] = None
    k: int = 20
    patience: Annotated[int | None, arg(metavar="INT")] = None
    config: Annotated[pathlib.Path | None, _File] = None
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    weight_decay: Annotated[float | None, arg(metavar="FLOAT")] = None
    warmup_epochs: float = 0.0
    cosine_decay: Flag = False
    batch_size: int = 512
    chunk_rows: Annotated[int | None, arg(metavar="INT")] = None
    fused: Flag = False
    epochs: int = 20
    seed: int = 0
    checkpoint_seconds: float = 30.0
    resume: Flag = False
    tensorboard: Annotated[pathlib.Path | None, _Folder] = None
    network: Network = Network()
    columns: Columns = Columns()
    devices: Devices = Devices()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measures how well held-out interactions are found, beside mere popularity.

    Prints a table and, as the last line, the same numbers as JSON.

    Attributes:
      run: Folder of the trained model.
      train: What the model was trained on, and is shown of each row; not recommended.
      test: What it should find; rows are matched by name.
      history: More that the model is shown of each row, and that is not recommended.
        May be given several times.
      fold_in: Instead of TEST, for rows that the model was not trained on: the share of
        each row's interactions that it is shown; the rest is what it should find.
      seed: Of that choice.
      candidates: For each row a list of items: rank only these and the held-out ones.
      popularity: The interactions that popularity is counted from, and that say which
        items were trained on; by default TRAIN.
      k: Number of recommendations that count.
      format: Format of all files, where it is not clear from name and content.
      columns: The columns of the files.
      counting: What counts.
      devices: What to compute on.
    """

    run: Annotated[Positional[pathlib.Path], _Folder]
    train: Annotated[Positional[str], arg(metavar="TRAIN")]
    test: Annotated[Positional[str | None], arg(metavar="[TEST]")] = None
    history: Annotated[UseAppendAction[tuple[str, ...]], _File] = ()
    fold_in: Annotated[float | None, arg(metavar="FLOAT")] = None
    seed: int = 0
    candidates: Annotated[str | None, _File] = None
    popularity: Annotated[str | None, _File] = None
    k: int = 20
    format: Annotated[Format | None, _Formats] = None
    columns: Columns = Columns()
    counting: Counting = Counting()
    devices: Devices = Devices()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predict:
    """Writes the best items for each row.

    The name of OUT says in which form: .csv or .parquet, with the columns user, item,
    score and rank; .jsonl, an object with user, items and scores for each row; else
    row<TAB>item,score:item,score..., where \\, \\: \\t \\n \\r and \\\\ in a name stand
    for comma, colon, TAB, line end and backslash.

    Attributes:
      run: Folder of the trained model.
      data: The interactions to recommend from.
      out: File to write. It is replaced if it exists.
      users: Only these rows, in this order: names with commas between, or a file with a
        name on each line.
      k: Number of items for each row.
      exclude_seen: Do not recommend what a row already has in DATA.
      exclude: Do not recommend a row's interactions in this file; rows are matched by
        name, and one that the file lacks has nothing excluded.
      format: Format of the files, where it is not clear from name and content.
      columns: The columns of the files.
      devices: What to compute on.
    """

    run: Annotated[Positional[pathlib.Path], _Folder]
    data: Annotated[Positional[str], arg(metavar="DATA")]
    out: Annotated[pathlib.Path, _File]
    users: Annotated[str | None, arg(metavar="{NAME[,NAME...],FILE}")] = None
    k: int = 10
    exclude_seen: Flag = False
    exclude: Annotated[str | None, _File] = None
    format: Annotated[Format | None, _Formats] = None
    columns: Columns = Columns()
    devices: Devices = Devices()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Writes a predictor: one file that recommends without the model's code.

    For sparsejax.load_predictor. The items' names are in it.

    Attributes:
      run: Folder of the trained model.
      out: File to write. It is replaced if it exists.
      k: Number of items for each row, at most.
      batch_size: Rows scored at a time, at most.
    """

    run: Annotated[Positional[pathlib.Path], _Folder]
    out: Annotated[Positional[pathlib.Path], arg(metavar="FILE")]
    k: int = 10
    batch_size: int = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    """Converts a file of interactions to another format.

    Features without entries are kept by parquet only.

    Attributes:
      input: File to read; .gz and .xz are read, too. Of Parquet, also a folder, or an
        address such as s3://bucket/folder.
      output: File to write, compressed if it ends in .gz or .xz. It is replaced if it
        exists.
      format: Format of IN, where it is not clear from name and content.
      to: Format of OUT, where its name does not end in .parquet or .csv (pairs).
      features: Keep only the features of this file, a run's vocabulary.parquet for
        example, and in its order.
      columns: The columns of IN.
    """

    input: Annotated[Positional[str], arg(metavar="IN")]
    output: Annotated[Positional[pathlib.Path], arg(metavar="OUT")]
    format: Annotated[Format | None, arg(name="from"), _Formats] = None
    to: Annotated[Format | None, _Formats] = None
    features: Annotated[str | None, _File] = None
    columns: Columns = Columns()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Splits interactions into DIR/train.parquet and DIR/heldout.parquet.

    Attributes:
      data: The interactions.
      by: What is held out. last: the last of each row by time; time: all from one point
        in time on, which is nearest to how a model is used; random: a share of each row;
        rows: whole rows.
      out: Folder to make.
      n: With last, how many of each row; 1 unless given. One always stays in train.
      at: With time, the point in time, as in the file; of dates, as 2024-12-31.
      fraction: With time, random and rows, the share that stays in train.
      seed: With random and rows, another seed, another choice; 0 unless given.
      format: Format of DATA, where it is not clear from name and content.
      columns: The columns of DATA.
    """

    data: Annotated[Positional[str], arg(metavar="DATA")]
    by: Literal["last", "time", "random", "rows"]
    out: Annotated[pathlib.Path, _Folder]
    n: Annotated[int | None, arg(metavar="INT")] = None
    at: Annotated[str | None, arg(metavar="TIME")] = None
    fraction: Annotated[float | None, arg(metavar="FLOAT")] = None
    seed: Annotated[int | None, arg(metavar="INT")] = None
    format: Annotated[Format | None, _Formats] = None
    columns: Columns = Columns()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Writes an HTML page about a run: curves, metrics, layers, recommendations.

    Attributes:
      run: Folder of the trained model.
      train: What the model is shown of each row, for recommendations on the page.
      test: What it should find, for metrics beside popularity; needs --train.
      out: File to write, by default report.html in the folder of the run.
      k: Cut-off of the metrics.
      format: Format of both files, where it is not clear from name and content.
      columns: The columns of the files.
      counting: What counts.
      devices: What to compute on.
    """

    run: Annotated[Positional[pathlib.Path], _Folder]
    train: Annotated[str | None, _File] = None
    test: Annotated[str | None, _File] = None
    out: Annotated[pathlib.Path | None, _File] = None
    k: int = 20
    format: Annotated[Format | None, _Formats] = None
    columns: Columns = Columns()
    counting: Counting = Counting()
    devices: Devices = Devices()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vectors:
    """Writes the vector of each item, or of each row of a file, with its name.

    Attributes:
      run: Folder of the trained model.
      out: File to write: .parquet, .npz, or .npy (without names). It is replaced if it
        exists.
      data: Interactions whose rows' vectors are wanted, instead of the items'.
      format: Format of DATA, where it is not clear from name and content.
      columns: The columns of DATA.
    """

    run: Annotated[Positional[pathlib.Path], _Folder]
    out: Annotated[pathlib.Path, _File]
    data: Annotated[str | None, _File] = None
    format: Annotated[Format | None, _Formats] = None
    columns: Columns = Columns()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Similar:
    """Prints the most similar items: item<TAB>item,cosine:item,cosine...

    Attributes:
      run: Folder of the trained model.
      items: Names of items.
      k: Number of similar items for each.
    """

    run: Annotated[Positional[pathlib.Path], _Folder]
    items: Annotated[Positional[tuple[str, ...]], arg(metavar="ITEM")]
    k: int = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Says what training takes of each GPU's memory, and whether it fits.

    The exit status is 1 if it does not. Nothing of that size is made.

    Attributes:
      items: Number of items.
      rows: Rows of the data.
      entries: Entries of the data, in all its rows.
      features: Number of input features, where they are not the items. The targets are
        other data then.
      target_entries: Entries of the targets; as many as of the inputs unless given.
      values: The entries have values.
      mesh: Devices over which batches (data) and the kernels of the first and the last
        layer (model) are divided.
      memory: Of a device, as 141GB. Unless given, what JAX may take of the one here.
      compile: Also say what the compiler takes, for such a mesh of devices of the kind
        here: there need not be so many.
      config: The network as JSON, instead of the network options below.
      optimizer: Its name, as for train.
      batch_size: Rows a step.
      fused: As for train.
      network: The network.
    """

    items: int
    rows: int
    entries: int
    features: Annotated[int | None, arg(metavar="INT")] = None
    target_entries: Annotated[int | None, arg(metavar="INT")] = None
    values: Flag = False
    mesh: Annotated[str, arg(metavar="data=D,model=M")] = "data=1,model=1"
    memory: Annotated[str | None, arg(metavar="SIZE")] = None
    compile: Flag = False
    config: Annotated[pathlib.Path | None, _File] = None
    optimizer: str = "adam"
    batch_size: int = 512
    fused: Flag = False
    network: Network = Network()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo:
    """Trains on the data that comes with the package and shows recommendations.

    Takes less than two minutes on two cores.

    Attributes:
      report: HTML page to write about it. It is replaced if it exists.
    """

    report: Annotated[pathlib.Path, _File] = pathlib.Path("sparsejax-demo.html")


Command = (
    Train
    | Evaluate
    | Predict
    | Export
    | Convert
    | Split
    | Report
    | Vectors
    | Similar
    | Plan
    | Demo
)

# Commands that read files, by columns.
Reading = Train | Evaluate | Predict | Convert | Split | Report | Vectors


# What other programs call some flags, too far from their names here to be guessed.
_CALLED_OTHERWISE = {
    "--lr": "--learning-rate",
    "--num-epochs": "--epochs",
    "--output": "--out",
    "--top-k": "--k",
    "--wd": "--weight-decay",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    0: done; 1: a line on stderr says what is wrong, or a plan does not fit; 2: wrong
    usage; 130: interrupted.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    # Orbax logs what a killed process left behind, and tracebacks of what it also raises;
    # what matters is a warning or an error of ours.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    command = None
    try:
        command = _parse(argv)
        devices = getattr(command, "devices", Devices())
        with interrupts.noted(), _one_line_messages(), _on(devices):
            _run(command, argv)
        sys.stdout.flush()
    except SystemExit as stopped:  # --help, --version, wrong usage, a plan too large
        return int(stopped.code or 0)
    except BaseException as error:  # noqa: BLE001 - raised again, if it is a bug
        return _failed(error, command)
    return 0


def _failed(error: BaseException, command: Command | None) -> int:
    """Says why a command failed and returns its exit status; raises what is a bug."""
    from sparsejax.mesh import processes

    status, after = 1, _what_next(command)
    if isinstance(error, KeyboardInterrupt):
        _say(f"interrupted{after}")
        status = 130
    elif isinstance(error, BrokenPipeError):  # whoever read the output has enough
        # At exit Python flushes stdout once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif processes.is_lost_peer(error):
        _say(f"error: another process was lost{after} ({_message(error)})")
    elif isinstance(error, processes.OtherProcessError) or _is_for_users(error):
        _say(f"error: {_in_flags(_message(error), command)}")
    elif processes.is_joined():
        traceback.print_exception(error)
    else:
        raise error
    processes.leave(status)
    return status


def _what_next(command: Command | None) -> str:
    """What to do after training that was broken off."""
    if not isinstance(command, Train):
        return ""
    from sparsejax.cli import run

    if run.has_checkpoints(command.run):
        return "; to continue, repeat the command with --resume"
    return " before a checkpoint was saved; repeat the command to begin again"


@contextlib.contextmanager
def _on(devices: Devices) -> Generator[None]:
    """Joins the processes, of which the first alone prints, and sets the mesh."""
    if devices == Devices():
        yield
        return

    import jax

    from sparsejax.mesh import processes

    with contextlib.ExitStack() as stack:
        if devices.several:
            processes.join_processes(
                devices.coordinator, devices.num_processes, devices.process_id
            )
            # Gloo, of CPUs, prints to the process's stdout, which is for results.
            sys.stdout = os.fdopen(os.dup(1), "w")
            os.dup2(2, 1)
            if not processes.is_first():
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(nowhere))
                stack.enter_context(contextlib.redirect_stderr(nowhere))
        stack.enter_context(jax.set_mesh(processes.mesh_of(devices.mesh)))
        yield


def _parse(argv: Sequence[str]) -> Command:
    """The command; prints what is asked for, or what is wrong, and raises SystemExit."""
    try:
        if argv == ["--version"]:
            print(f"sparsejax {sparsejax.__version__}")
            raise SystemExit(0)
        return tyro.cli(
            Command,
            prog="sparsejax",
            description="Recommendations from sparse data. --version prints the version.",
            args=argv,
            config=(OmitArgPrefixes,),
        )
    except SystemExit as stopped:
        flags = {word.partition("=")[0] for word in argv} if stopped.code else set()
        for flag in flags & _CALLED_OTHERWISE.keys():
            _say(f"{flag} is called {_CALLED_OTHERWISE[flag]} here")
        raise
    finally:
        sys.stdout.flush()


def _run(command: Command, argv: Sequence[str]) -> None:
    from sparsejax.cli import commands, demo

    match command:
        case Train() | Plan():
            if command.config and (given := _given(Network, argv)):
                raise ValueError(
                    f"--config describes the whole network: leave out {given[0]}, or "
                    "--config"
                )
            if isinstance(command, Train):
                commands.train(command)
            elif not commands.plan(command):
                raise SystemExit(1)
        case Evaluate():
            commands.evaluate(command)
        case Predict():
            commands.predict(command)
        case Export():
            commands.export(command)
        case Convert():
            commands.convert(command)
        case Split():
            commands.split(command)
        case Report():
            commands.report(command)
        case Vectors():
            commands.vectors(command)
        case Similar():
            commands.similar(command)
        case Demo():
            demo.main(command.report)


def _given(flags: type, argv: Sequence[str]) -> list[str]:
    """Which flags of a dataclass are on the command line."""
    words = {word.partition("=")[0].replace("_", "-") for word in argv}
    names = [field.name.replace("_", "-") for field in dataclasses.fields(flags)]
    known = (f"--{prefix}{name}" for name in names for prefix in ("", "no-"))
    return [flag for flag in known if flag in words]


def _is_for_users(error: BaseException) -> bool:
    """Whether the message helps; any other error is a bug, which needs its traceback."""
    kinds = (ValueError, OSError, ArithmeticError, MemoryError, NotImplementedError)
    # For a network or a batch that is too large JAX has no class of its own.
    return isinstance(error, kinds) or "Out of memory" in str(error)


@contextlib.contextmanager
def _one_line_messages() -> Generator[None]:
    def show(message, category, filename, lineno, file=None, line=None) -> None:
        _say(f"warning: {_message(message)}")

    with warnings.catch_warnings():
        # Each one, not the first from each place in the code.
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:  # what Python would report as "Exception ignored" changes no result
            yield
        finally:
            sys.unraisablehook = hook


def _message(error: BaseException | str) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(as_flags(str(error)).split("\n")) or type(error).__name__


def as_flags(text: str) -> str:
    """A message in which arguments of Python are the flags of commands."""
    text = text.replace("indicator=True", "--no-value")
    text = text.replace("exclude=None", "--keep-seen")
    return re.sub(
        r"\b(user|item|value|time|delimiter)=(?=COLUMN|['\"])", r"--\1 ", text
    )


def _in_flags(text: str, command: Command | None) -> str:
    """A message that names flags of a command where it names arguments of Python."""
    nested = (command, getattr(command, "network", None))
    fields = [f for c in nested if c is not None for f in dataclasses.fields(c)]
    named = [f.name for f in fields if "Positional" not in str(f.type)]
    flags = {name: name.replace("_", "-") for name in named} | {"num_epochs": "epochs"}

    def flag(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        if name not in flags or (value is None and "_" not in name):
            return match[0]  # `k` may also be a word
        if value == "True":
            return f"--{flags[name]}"
        return f"--{flags[name]}" + ("" if value is None else f" {value}")

    return re.sub(
        r"(?<![\w/.'-])(?P<name>[a-z]\w*)(=(?P<value>[^\s,;)]+))?(?![\w/.'])",
        flag,
        text,
    )


def _say(line: str) -> None:
    print(f"sparsejax: {line}", file=sys.stderr)
