"""The commands and their flags: the options of the verbs, and options of the shell alone.

Only light packages are imported here, so that `sparsejax --help` answers at once.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, ClassVar, Literal

from sparsejax.kinds.models import DEFAULT_MODEL, MODELS
from sparsejax.options import (
    measuring,
    planning,
    predicting,
    reading,
    staging,
    training,
)
from sparsejax.options.models import Clicks, Described
from sparsejax.options.option import (
    COLUMN,
    FILE,
    FOLDER,
    RANKING,
    SWITCH,
    Flag,
    Options,
    flags_of,
    option,
)
from sparsejax.options.reading import (
    BY_NAME,
    Column,
    Columns,
    Format,
    OfUsers,
    Reading,
    TimeColumn,
)

# Equal to the type in `sparsejax.data`, which is slow to import.
WrittenFormat = Literal["text", "pairs", "adjacency", "parquet"]
_RUN = Flag(value="DIR", positional=True)
_Mesh = "data=INT,model=INT"
_TRAIN = Flag(type=str, value="TRAIN", positional=True)
_TEST = Flag(type=str | None, value="[TEST]", positional=True)


def _argument(value: str) -> Any:
    """A required positional argument; the help names it `value`."""
    return option(dataclasses.MISSING, Flag(value=value, positional=True))


class Command(Options):
    """Base class of the commands. The name of a subclass is that of its command."""


class InShell(Options):
    """Options that are written as flags in messages."""

    @classmethod
    def spelled(cls, name: str) -> str:
        (field,) = (f for f in dataclasses.fields(cls) if f.name == name)
        return flags_of(field)[0].spelled(name) if flags_of(field) else name


class Devices(Options):
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

    heading = "devices"

    mesh: str | None = option(None, Flag(value=f"{_Mesh}|auto"))
    distributed: bool = option(False, SWITCH)
    coordinator: str | None = option(None, Flag(value="HOST:PORT"))
    num_processes: int | None = None
    process_id: int | None = None

    @property
    def several(self) -> bool:
        """Whether there are several processes."""
        explicit = (self.coordinator, self.num_processes, self.process_id)
        return self.distributed or explicit != (None, None, None)


class Compilation(InShell):
    """How programs for the device are compiled.

    Attributes:
      compilation_cache: Keep compiled programs and linear parts in the user's cache
        folder for later commands. Several processes that work together keep none.
    """

    heading = "compilation"

    compilation_cache: bool = True


class Modelled(Described, training.Content):
    """A model, and content of its items.

    Attributes:
      model: autoencoder learns which items go together. sasrec, hstu and gru predict the next
        item: histories are in the order of --time, or else of the file, and an item may be in
        one many times. dlrm, dcn, deepfm, wide_deep, din and tin predict clicks. --config has their
        options.
      content_columns: The columns of --item-features to read.
      words: Columns of --item-features whose words are tags, such as titles. Without it, titles
        are ignored.
    """

    model: str | None = option(
        None,
        Flag(
            type=Literal[*MODELS] | None,  # pyrefly: ignore[invalid-literal]
            value=f"{{{','.join(MODELS)}}}",
            default=DEFAULT_MODEL,
        ),
    )
    content_columns: tuple[str, ...] = option(
        (), Flag(name="columns", value="COLUMN", default="all"), kinds=RANKING
    )
    words: tuple[str, ...] = option((), COLUMN, kinds=RANKING)


class Configured(Modelled):
    """A model that a file may describe.

    Attributes:
      config: JSON file that describes the network, instead of the network options below;
        or a model of histories, such as {"version": 1, "model": "sasrec", "width": 128}, or
        of clicks.
    """

    config: Any = option(None, Flag(type=pathlib.Path | None, value="FILE"))


class Train(Configured, Clicks, training.Training, Devices, Compilation, Command):
    """Trains a model on a file of interactions, or of clicks.

    Attributes:
      tensorboard: Folder for TensorBoard's files: loss, speed and metrics of each epoch.
        Needs pip install 'sparsejax[tensorboard]'.
      export_to: Folder of versions, such as models/films, which serve --watch looks at: the
        next version is written there after training. It recommends up to --k items, or as many
        as the version before.
      gate: Write the version only if it is clearly better in this metric than the newest one
        in the folder that loads, on the events that --validation, last or a file, holds out:
        ndcg, recall or another one that evaluate prints. The newest one must not have been
        trained on them. Clearly: the 95 % interval of the difference is above 0.
    """

    only_with: ClassVar = {"k": ("validation", "export_to"), "gate": ("export_to",)}

    directory: pathlib.Path = option(
        dataclasses.MISSING,
        Flag(
            name="run",
            value="DIR",
            text="Folder to write the run to: settings, vocabulary and checkpoints. It must be "
            "new or empty, except with --resume.",
        ),
    )
    tensorboard: pathlib.Path | None = option(None, FOLDER)
    export_to: pathlib.Path | None = option(None, FOLDER)
    gate: str | None = option(None, Flag(value="METRIC@K", default="any"))


class Tune(
    Modelled,
    Clicks,
    training.Stepping,
    training.Watching,
    Reading,
    Compilation,
    Command,
):
    """Trains with many settings, and keeps those that are best on held-out interactions.

    Tuned are the number of hidden units, temperature, corruption and learning rate; or, of
    models of histories, width, dropout, temperature and learning rate; or, of click models,
    dim and learning rate. Optuna draws them.
    The first trial has the settings of the flags. Trials that look worse than
    others did after as many epochs end early. To continue after an interruption, or with
    more trials, repeat the command. Needs pip install 'sparsejax[tune]'.

    Prints the command that trains on all of DATA with the best settings.

    Attributes:
      data: File of the interactions, or of clicks. A part of it is held out.
      run: Folder to write to: all trials, network.json for train --config, and the run of
        the best trial.
      trials: Number of trials, including those before an interruption.
      limit: Begin no trial after this time, and end the one that is running: 90s, 30m, 2h.
      time: Column of times, or of lists of times.
      validation: Part to hold out of DATA: a share; or last, the last interaction of each
        row by time. Or a file of held-out interactions with the same rows.
    """

    data: str = _argument("DATA")
    run: pathlib.Path = option(pathlib.Path("tuned"), FOLDER)
    trials: int = option(50, least=1)
    limit: str | None = option(
        None, Flag(name="time", value="TIME", default="no limit")
    )
    time: TimeColumn = option(
        BY_NAME,
        Flag(name="time-column", type=Column, value="COLUMN"),
        Flag(name="no-time", gives=None, text="Leave the times out."),
        kinds=RANKING,
    )
    validation: Any = option(
        None,
        Flag(
            type=str | None, value="{FILE,SHARE,last}", default=".1, of histories last"
        ),
    )


class SecondStage(staging.Joining):
    """A run of clicks that ranks the candidates of another run.

    Attributes:
      second_stage: Folder of a run of clicks, which ranks the best items of the first run. Its
        columns are joined by name.
      num_candidates: Number of candidates for each row.
    """

    only_with: ClassVar = dict.fromkeys(
        {
            *(staging.Joining.option_names() - {"rank_by"}),
            "num_candidates",
            "requests",
            "ranking_alone",
        },
        ("second_stage",),
    )

    second_stage: pathlib.Path | None = option(None, FOLDER)
    num_candidates: int = option(500, least=1)


class Evaluate(
    measuring.Evaluate,
    SecondStage,
    staging.Alone,
    Reading,
    Devices,
    Compilation,
    Command,
):
    """Measures how well a model finds held-out interactions, compared with popularity.

    For a click model, measures how well it predicts the labels of one file: AUC, log loss and
    others. Prints a table and, as the last line, the same numbers as JSON.

    Attributes:
      run: Folder of the run that train wrote.
      inputs: Interactions that the model was trained on. The model is shown them; they
        are not recommended. For a click model the examples to measure on, and no TEST.
      heldout: Interactions that the model should find. Rows are matched by name.
    """

    run: pathlib.Path = option(dataclasses.MISSING, _RUN)
    inputs: Any = option(dataclasses.MISSING, _TRAIN, kinds=RANKING)
    heldout: Any = option(None, _TEST)


class Compare(measuring.Ranked, Reading, Devices, Compilation, Command):
    """Compares two runs on the same held-out interactions.

    If one of them was trained on targets, both are measured on these.

    Prints the metrics of both, and for each difference the interval that contains 95 % of the
    resamples of the rows (a paired bootstrap). If it does not contain 0, the difference is
    significant. The last line has the same numbers as JSON.

    Attributes:
      run: Folder of the first run.
      other: Folder of the second run, also of a model of another kind for the same data.
      inputs: Interactions that the models are shown. For click models the examples to
        measure on, and no TEST.
      heldout: Interactions that the models should find. Rows are matched by name.
    """

    run: pathlib.Path = option(dataclasses.MISSING, _RUN)
    other: pathlib.Path = option(dataclasses.MISSING, _RUN)
    inputs: Any = option(dataclasses.MISSING, _TRAIN, kinds=RANKING)
    heldout: Any = option(None, _TEST)


class Predict(
    predicting.Recommend,
    SecondStage,
    staging.Requested,
    Reading,
    Devices,
    Compilation,
    Command,
):
    """Writes the best items for each row, or how probable clicks are.

    The name of the output file decides its form. .csv and .parquet have the columns user,
    item, score and rank. .jsonl has an object with user, items and scores for each row.
    Any other name gives row<TAB>item,score:item,score..., where \\, \\: \\t \\n \\r and
    \\\\ in a name stand for comma, colon, TAB, line end and backslash.

    For a click model, the file has the probability of each example of DATA in their order: .npy
    as float32, .csv below the header probability, any other name a number a line. Of several
    labels each has a column, under its name in .csv and .parquet.

    With --parts, the first argument is a predictor that export wrote, DATA a folder that
    prepare wrote, and --out a folder. All three may be addresses. Parts can run anywhere and
    in any order; one that is complete is not written again.

    Attributes:
      run: Folder of the run that train wrote.
      inputs: File of the interactions to recommend from, or of examples of clicks.
      out: File to write. An existing file is replaced.
      parts: Write recommendations in this many parts, to a folder.
      part: With --parts: write only the part of this number, from 0. Without it all parts
        are written, and the manifest.
      workers: With --parts: number of processes that make all parts here. They share the
        cores and the GPUs.
      finish: With --parts: only write the manifest, or say which parts are missing.
    """

    run: str = option(dataclasses.MISSING, _RUN)
    inputs: Any = option(
        dataclasses.MISSING, Flag(type=str, value="DATA", positional=True)
    )
    out: str = option(dataclasses.MISSING, FILE)
    parts: int | None = None
    part: int | None = option(None, "all")
    workers: int | None = option(None, "one a GPU, or 1")
    finish: bool = option(False, SWITCH)


class Export(predicting.Export, SecondStage, Compilation, Command):
    """Writes a predictor: one file that recommends without the model's code.

    sparsejax.load_predictor reads it. It contains the names of the items; of a click model the
    schema and the categories.

    Attributes:
      run: Folder of the run that train wrote.
      compile: Also compile its programs for the device here, up to 256 items a row, and keep
        them for the processes that load it.
    """

    run: pathlib.Path = option(dataclasses.MISSING, _RUN)
    compile: bool = False


class Convert(Columns, Command):
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
    """

    input: str = _argument("IN")
    output: pathlib.Path = _argument("OUT")
    format: Format | None = option(None, Flag(name="from"))
    to: WrittenFormat | None = option(
        None, Flag(value="{text,pairs,adjacency,parquet}", default="from the name")
    )
    features: str | None = option(None, Flag(value="FILE", default="keep all"))


class Prepare(reading.Prepare, InShell, Command):
    """Turns events into a data set in a folder; they need not fit in memory.

    Other commands take the folder: OUT is what to train on, OUT/test what was held out.
    Needs pip install 'sparsejax[prepare]'.

    Attributes:
      events: File of events, which may be compressed (.gz, .xz, .bz2, .zst, .zip); also a folder,
        or an address such as s3://bucket/folder.
      out: Folder to make, or an address.
      duplicates: Value of an entry that has several events: their sum (add), that of the
        latest (last), or the largest (max).
      min_user: Leave out users with fewer items, again and again until all have as many.
      min_item: Leave out items with fewer users, again and again until all have as many.
      features: Keep only the features of this file, such as a run's vocabulary.parquet,
        in the order of that file.
      split_time: Hold out all interactions from this point in time on, written as in the
        file; a date as 2024-12-31.
      repeats: With --split-time: new, the default, holds out only items that a user did not
        have before; all also holds out repeats.
      split_last: Number of last interactions of each user to hold out.
      split_fraction: Hold out a random part; this is the share that stays in train.
      seed: Seed of the random choice.
      histories: Keep the order and all repeats, for models of histories.
      schema: With --histories: JSON file of an EventSchema, the columns of the events.
      memory: Memory for the engine, for example 4GB.
    """

    events: str = _argument("EVENTS")
    out: str = _argument("OUT")


class Split(InShell, Clicks, Reading, Command):
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
        not have before; all also holds out repeats. The default is new with time, and all with
        last.
      histories: Keep the order and all repeats, for models of histories. Without times the
        order in DATA counts as the order in time.
      targets: Kinds of events to hold out, such as purchases: with last, the last of these of
        each row. The files keep which events are targets, for train and evaluate.
    """

    only_with: ClassVar = {"targets": ("histories",)}

    data: str = _argument("DATA")
    by: Literal["last", "time", "random", "rows", "items"] = option(dataclasses.MISSING)
    out: pathlib.Path = option(dataclasses.MISSING, FOLDER)
    n: int | None = option(None, "1")
    at: str | None = option(None, Flag(value="TIME"))
    fraction: float | None = None
    seed: int | None = option(None, "0")
    repeats: Literal["new", "all"] | None = None
    histories: bool = option(False, SWITCH)
    targets: tuple[str, ...] | None = option(
        None, Flag(value="KIND", default="all kinds"), kinds=("histories",)
    )


class Report(measuring.Paged, Reading, Devices, Compilation, Command):
    """Writes an HTML page about a run: how good it is, recommendations, curves, layers.

    Attributes:
      run: Folder of the run that train wrote.
      inputs: File of the interactions that the model is shown, for recommendations on the
        page.
      heldout: File of the interactions that the model should find, for metrics on the page.
        It needs --train. For a click model, the examples to measure on, without --train.
      out: File to write. An existing file is replaced.
    """

    only_with: ClassVar = {
        **dict.fromkeys(Reading.option_names(), ("inputs", "heldout")),
        "exclude_seen": ("inputs",),
    }

    run: pathlib.Path = option(dataclasses.MISSING, _RUN)
    inputs: Any = option(
        None, Flag(name="train", type=str | None, value="FILE"), kinds=RANKING
    )
    heldout: Any = option(None, Flag(name="test", type=str | None, value="FILE"))
    out: pathlib.Path | None = option(
        None, Flag(value="FILE", default="report.html in DIR")
    )


class Vectors(predicting.InContext, Reading, Compilation, Command):
    """Writes the vector of each item, or of each row of a file, with its name.

    Attributes:
      run: Folder of the run that train wrote.
      out: File to write: .parquet, .npz, or .npy (without names). An existing file is
        replaced.
      data: File of interactions: write the vectors of its rows instead of the items'.
    """

    only_with: ClassVar = dict.fromkeys({*Reading.option_names(), "context"}, ("data",))

    run: pathlib.Path = option(dataclasses.MISSING, _RUN)
    out: pathlib.Path = option(dataclasses.MISSING, FILE)
    data: str | None = option(None, FILE)


class Similar(Compilation, Command):
    """Prints the most similar items: item<TAB>item,cosine:item,cosine...

    Attributes:
      run: Folder of the run that train wrote.
      items: Names of items. Each gives a line of output.
      k: Number of similar items for each.
    """

    run: pathlib.Path = option(dataclasses.MISSING, _RUN)
    items: tuple[str, ...] = _argument("ITEM")
    k: int = 10


class Plan(
    planning.Sized, Configured, Clicks, training.Stepping, OfUsers, Compilation, Command
):
    """Prints how much memory of each GPU training takes, and whether it fits.

    The exit status is 1 if it does not fit. No arrays of that size are made. Items need
    --items, --rows and --entries. For a click model, it prints a placement of the tables.

    Attributes:
      items: Number of items.
      rows: Number of rows of the data; for histories of rows with two entries or more.
      entries: Number of entries of the data, over all rows.
      features: Number of input features, if they are not the items. The targets are
        separate data then.
      examples: For clicks, or columns of events, a file whose categories are counted. Hashed
        columns need none.
      mesh: Number of devices over which each batch is divided (data), and over which the
        kernel of the first layer is divided (model). That of the last layer is divided
        over all devices.
      memory: Memory of a device, for example 141GB.
      negatives: Plan for training with --negatives.
    """

    only_with: ClassVar = {"target_entries": ("features",)}

    # These options do not change the memory, so they are no flags here.
    normalize: bool = option(True, shell=False)
    precision: Literal["highest", "high", "default"] | None = option(None, shell=False)

    items: int | None = option(None, kinds=RANKING, least=1)
    rows: int | None = option(None, kinds=RANKING, least=1)
    entries: int | None = option(None, kinds=RANKING, least=1)
    features: int | None = option(None, "the items", kinds=RANKING, least=1)
    examples: str | None = option(None, FILE, kinds=("clicks", "histories"))
    mesh: str = option("data=1,model=1", Flag(value=_Mesh))
    memory: str | None = option(
        None, Flag(value="SIZE", default="what JAX may take of the device here")
    )
    negatives: int | None = option(None, "all items", kinds=("histories",), least=1)


class Serve(predicting.Serving, Compilation, Command):
    """Answers requests over HTTP and gRPC, by the Open Inference Protocol, until SIGTERM comes.

    What happens is written to stderr, as lines of JSON. Needs pip install 'sparsejax[serve]'.

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
      watch: Seconds between two polls of the folder for a newer version. By default the service
        stays with the first one.
      admin: Port, or HOST:PORT, of the protocol's repository extension: whoever reaches it may
        load the newest version in the folder, and unload it. Off by default; the host is
        127.0.0.1 unless it is given.
      titles: File with two columns: the name of an item, and a title that the page shows beside it.
      grace: Seconds after SIGTERM in which the process ends.
    """

    model: str = _argument("FILE")
    name: str | None = option(
        None,
        Flag(
            value="NAME",
            default="that of the file, without its ending, or of the folder",
        ),
    )
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    tls_cert: pathlib.Path | None = option(None, FILE)
    tls_key: pathlib.Path | None = option(None, FILE)
    shapes: tuple[str, ...] = option(
        (), Flag(value="INTxINT", default="on a CPU up to 64 rows, on a GPU all but 8")
    )
    watch: float | None = None
    admin: str | None = option(None, Flag(value="[HOST:]PORT"))
    titles: str | None = option(None, FILE)
    grace: float = option(30.0, above=0)


class ExportTriton(Command):
    """Writes a predictor into a model repository of NVIDIA's Triton, as the next version.

    Needs pip install 'sparsejax[serve]', as does Triton's Python.

    Attributes:
      model: File that export wrote.
      repository: Folder of the models of a Triton server. It is made if there is none.
      name: The model's name in the repository.
      shapes: Programs to compile: rows x entries. A batch goes into the smallest that holds it.
    """

    model: pathlib.Path = _argument("FILE")
    repository: pathlib.Path = _argument("FILE")
    name: str | None = option(
        None, Flag(value="NAME", default="that of the file, without its ending")
    )
    shapes: tuple[str, ...] = option(
        (), Flag(value="INTxINT", default="on a CPU up to 64 rows, on a GPU all but 8")
    )


class Demo(Compilation, Command):
    """Trains on the data that comes with the package and shows recommendations.

    Takes less than two minutes on two cores.

    Attributes:
      report: HTML page to write. An existing file is replaced.
    """

    report: pathlib.Path = option(pathlib.Path("sparsejax-demo.html"), FILE)
