"""DSSTNE's commands, with DSSTNE's flags: `sparsejax dsstne train -c config.json ...`."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Callable, Sequence

from sparsejax.dsstne import encoder, generate, neighbours, predict, train
from sparsejax.mesh import processes
from sparsejax.whole_files import check_writable, whole_text_file

# Patterns: a format of printf that begins with a minus; a number with a suffix of C for its type.
_LEFT_FORMAT = re.compile(r"-[-+ #0]*\d*(\.\d*)?[lL]?[efgEFG]")
_OF_C = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?[fFlL]")
LAUNCHED = ("generateNetCDF", "train", "predict", "encoder", "knn-search")


def run(argv: Sequence[str]) -> None:
    """Runs one of DSSTNE's commands.

    If there are several processes, each calls this function. `train`, `predict` and the Train
    of `encoder` divide the work; the first process does everything else, and writes the files.

    Raises:
      SystemExit: after help, or for wrong usage.
    """
    parser = argparse.ArgumentParser(
        prog="sparsejax dsstne",
        description="Amazon DSSTNE's commands, with its flags and files.",
    )
    kinds = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, make, does in (
        ("generateNetCDF", _generate, "write a text of samples as a NetCDF file"),
        ("train", _train, "train a network"),
        ("predict", _predict, "write recommendations"),
        ("encoder", _encoder, "do what a CDL file says"),
        ("knn-search", _search, "write the nearest vectors of each query"),
        ("install", _install, "write launchers with the names of DSSTNE's commands"),
    ):
        kind = kinds.add_parser(name, help=does, description=does, allow_abbrev=False)
        kind.set_defaults(carry_out=make(kind))
    given = vars(parser.parse_args(_joined(argv)))
    given.pop("carry_out")(given)


def _joined(argv: Sequence[str]) -> list[str]:
    """Joins a format such as `-8.3f` to its flag `-p`; argparse would take it for a flag."""
    found: list[str] = []
    for text in argv:
        if found and found[-1] == "-p" and _LEFT_FORMAT.fullmatch(text):
            found[-1] += text
        else:
            found.append(text)
    return found


# A function that runs a command. Its argument has the values of the flags, by name.
_CarryOut = Callable[[dict], None]


def _generate(parser: argparse.ArgumentParser) -> _CarryOut:
    _text(parser, "-d", "dataset", "NAME", "name of the data set in the file")
    _text(parser, "-i", "text", "PATH", "text file of samples, or a folder of them")
    _text(parser, "-o", "out", "FILE", "NetCDF file to write")
    _text(parser, "-f", "features", "FILE", "index of features")
    _text(parser, "-s", "samples", "FILE", "index of samples; new ones are added")
    parser.add_argument(
        "-c", dest="create", action="store_true", help="make a new index of features"
    )
    parser.add_argument(
        "-m", dest="merge", action="store_true", help="add new features to the index"
    )
    _type(parser)
    return lambda given: _in_first(
        lambda: generate.generate(generate.Generate(**_typed(given)))
    )


def _train(parser: argparse.ArgumentParser) -> _CarryOut:
    _text(parser, "-c", "config", "FILE", "the network's JSON")
    _text(parser, "-i", "inputs", "FILE", "NetCDF file of the inputs")
    _text(parser, "-o", "outputs", "FILE", "NetCDF file of the outputs")
    _text(parser, "-n", "network", "FILE", "network file to write; must not exist")
    default = train.Train(config="", inputs="", outputs="", network="")
    for flag, name, does in (
        ("-b", "batch_size", "examples of a step"),
        ("-e", "epochs", "passes over the data"),
    ):
        _number(parser, flag, name, getattr(default, name), does, least=1)
    for flag, name, does in (
        ("-alpha", "alpha", "learning rate"),
        ("-lambda", "l2", "adds lambda w to the gradients of weights"),
        ("-lambda1", "l1", "adds lambda1 sign(w) to the gradients of weights"),
        ("-mu", "mu", "momentum, of the optimizers that have it; of adam 0.9"),
        ("-mu1", "mu1", "second decay rate of adam, there 0.999"),
        ("-seed", "seed", "of the first weights, of noise and of the order"),
    ):
        _number(parser, flag, name, getattr(default, name), does)
    parser.set_defaults(**dict.fromkeys(train.MU))
    parser.add_argument(
        "-optimizer",
        choices=train.OPTIMIZERS,
        default=default.optimizer,
        help=f"update rule (default: {default.optimizer})",
    )
    parser.add_argument(
        "-resume",
        action="store_true",
        help="go on where a training of the same flags was stopped",
    )
    parser.add_argument("-d", dest="ignored", metavar="NAME", help="ignored, as ever")
    _mesh(parser)

    for flag, name in (("-vi", "inputs"), ("-vo", "outputs")):
        parser.add_argument(
            flag,
            dest=f"validation_{name}",
            metavar="FILE",
            help=f"NetCDF file of {name} whose error is measured after each epoch",
        )

    def carry_out(given: dict) -> None:
        del given["ignored"]
        files = [given.pop(f"validation_{name}") for name in ("inputs", "outputs")]
        if None in files and files != [None, None]:
            parser.error("-vi and -vo are needed together")
        defaults = train.MU_OF_ADAM if given["optimizer"] == "adam" else train.MU
        for name, value in defaults.items():
            if given[name] is None:
                given[name] = value
        validation = None if None in files else tuple(files)
        train.train(train.Train(**given, validation=validation))

    return carry_out


def _predict(parser: argparse.ArgumentParser) -> _CarryOut:
    _text(parser, "-d", "dataset", "NAME", "name of the data set, without _input")
    _text(parser, "-n", "network", "FILE", "network file")
    _text(parser, "-i", "inputs", "FILE", "index of the input's features")
    _text(parser, "-o", "outputs", "FILE", "index of the output's features")
    _text(parser, "-r", "text", "PATH", "text file of samples, or a folder of them")
    _text(parser, "-f", "filters", "PATH", "features not to recommend, likewise")
    _text(parser, "-s", "out", "FILE", "file of recommendations to write")
    _number(parser, "-b", "batch_size", 1024, "samples at a time", least=1)
    _number(parser, "-k", "k", 100, "recommendations of a sample", least=1)
    parser.add_argument(
        "-p",
        dest="precision",
        metavar="FORMAT",
        default="4.3f",
        help="form of a score (default: 4.3f)",
    )
    parser.add_argument(
        "-multiply",
        action="store_true",
        help="multiply scores with the filters' values, and leave nothing out",
    )
    parser.add_argument(
        "-l",
        dest="layer",
        metavar="LAYER",
        help="write the units of this layer, in place of recommendations",
    )
    _type(parser)
    _mesh(parser)
    return lambda given: predict.predict(predict.Predict(**_typed(given)))


def _encoder(parser: argparse.ArgumentParser) -> _CarryOut:
    parser.add_argument("file", metavar="FILE", help="a CDL file")
    return lambda given: encoder.encode(encoder.load_cdl(given["file"]))


def _search(parser: argparse.ArgumentParser) -> _CarryOut:
    for flag, name, does in (
        ("--data-files", "data", "vectors to find"),
        ("--input-files", "queries", "vectors to find others for"),
    ):
        parser.add_argument(
            flag,
            dest=name,
            metavar="FILE",
            required=True,
            nargs="+",
            action="extend",
            help=f"{does}: lines key<TAB>1 2 3; several files count as one",
        )
    parser.add_argument(
        "--output-file",
        dest="out",
        metavar="FILE",
        help="file to write; its folder is made (default: standard output)",
    )
    default = neighbours.Search(data=(), queries=())
    for flag, name, does in (
        ("--k", "k", "how many for each query"),
        ("--batch-size", "batch_size", "queries at a time"),
    ):
        _number(parser, flag, name, getattr(default, name), does, least=1)
    does = "digits of a score behind its point"
    _number(parser, "--score-precision", "precision", default.precision, does)
    for flag, name, does in (
        ("--key-val-delim", "key_delimiter", "between a key and its vector"),
        ("--vec-delim", "vector_delimiter", "between numbers"),
        ("--id-score-sep", "score_separator", "between a key and its score"),
    ):
        value = getattr(default, name)
        parser.add_argument(
            flag,
            dest=name,
            metavar="TEXT",
            default=value,
            help=f"{does} (default: {value!r})",
        )
    parser.add_argument(
        "--data-type",
        choices=tuple(neighbours.DTYPES),
        default=default.data_type,
        help=f"of the products' operands (default: {default.data_type})",
    )
    parser.add_argument(
        "--output-keys-only",
        dest="keys_only",
        action="store_true",
        help="leave scores out",
    )
    parser.add_argument("--report-interval", dest="ignored", help="ignored")

    def carry_out(given: dict) -> None:
        del given["ignored"]
        for name in ("data", "queries"):
            given[name] = _files(given[name])
        _in_first(lambda: neighbours.search(neighbours.Search(**given)))

    return carry_out


def _files(texts: Sequence[str]) -> tuple[str, ...]:
    """Splits texts into file names; in a text, names are separated by commas."""
    names = [[text] if os.path.exists(text) else text.split(",") for text in texts]
    return tuple(itertools.chain.from_iterable(names))


def _install(parser: argparse.ArgumentParser) -> _CarryOut:
    parser.add_argument("folder", metavar="DIR", help="an existing folder")

    def install(folder: pathlib.Path) -> None:
        for name in LAUNCHED:
            check_writable(folder / name)
        for name in LAUNCHED:
            with whole_text_file(folder / name) as file:
                python = shlex.quote(sys.executable)
                file.write(
                    f'#!/bin/sh\nexec {python} -m sparsejax dsstne {name} "$@"\n'
                )
            os.chmod(folder / name, 0o755)
        print(f"{folder}: {', '.join(LAUNCHED)}")

    return lambda given: _in_first(lambda: install(pathlib.Path(given["folder"])))


def _in_first(does: Callable[[], None]) -> None:
    """Calls a function in the first process only. A single process does not start JAX for it."""
    if processes.is_joined():
        processes.in_first(does)
    else:
        does()


def _text(
    parser: argparse.ArgumentParser, flag: str, name: str, metavar: str, does: str
) -> None:
    parser.add_argument(flag, dest=name, metavar=metavar, required=True, help=does)


def _number(
    parser: argparse.ArgumentParser,
    flag: str,
    name: str,
    default: float,
    does: str,
    *,
    least: int = 0,
) -> None:
    kind = type(default)

    def number(text: str) -> float:
        # C's suffix for a type is accepted, as in 0.025f.
        value = kind(text[:-1] if _OF_C.fullmatch(text) else text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    number.__name__ = kind.__name__  # argparse shows it in errors
    parser.add_argument(
        flag,
        dest=name,
        metavar=kind.__name__.upper(),
        type=number,
        default=default,
        help=f"{does} (default: {default})",
    )


def _type(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-t",
        dest="type",
        choices=("indicator", "analog"),
        default="indicator",
        help="whether entries have values (default: indicator)",
    )


def _mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-mesh",
        metavar="data=INT,model=INT",
        help="devices that divide batches and weights (default: one device)",
    )


def _typed(given: dict) -> dict:
    others = {name: value for name, value in given.items() if name != "type"}
    return {**others, "analog": given["type"] == "analog"}
