"""Tries the installed wheel in an environment without any extra, in an empty folder.

Each module is imported, except those of the folders that stand for an extra; the quickstart runs; and
each command that needs an extra says so in one line. Usage: try_wheel.py QUICKSTART
"""

import contextlib
import importlib
import importlib.metadata
import io
import pathlib
import pkgutil
import re
import runpy
import subprocess
import sys
import sysconfig

# Packages that need an extra as a whole, and modules that run a program when imported.
SKIPPED = ("sparsejax.dsstne", "sparsejax.serving", "sparsejax.__main__")
COMMAND = pathlib.Path(sysconfig.get_path("scripts")) / "sparsejax"
EVENTS = "user,item\nann,tea\nann,rye\nbob,tea\nbob,milk\neve,rye\n"
# Each extra, and the words of a command that needs it.
NEEDS = {
    "dsstne": "dsstne generateNetCDF -h",
    "lake": "convert table out.parquet",
    "prepare": "prepare events.csv out",
    "serve": "serve model.predictor",
    "spark": None,  # no command
    "tensorboard": "train events.csv --run a --tensorboard b",
    "tune": "tune events.csv --run run",
}
FOR_DEVELOPERS = {"dev", "docs", "test", "cuda"}


def needed_by(name: str, found: set[str]) -> set[str]:
    """Adds a distribution, and those that it needs without an extra, as far as installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        requirements = importlib.metadata.requires(name) or []
        if name not in found:
            found.add(name)
            for line in requirements:
                if "extra ==" not in line:
                    needed_by(canonical(line), found)
    return found


def canonical(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def check_empty() -> None:
    metadata = importlib.metadata.metadata("sparsejax")
    extras = {*metadata.get_all("Provides-Extra", [])} - FOR_DEVELOPERS
    assert extras == {*NEEDS}, f"NEEDS has no line for {extras ^ {*NEEDS}}"
    installed = {canonical(each.name) for each in importlib.metadata.distributions()}
    named = {canonical(line) for line in importlib.metadata.requires("sparsejax") or []}
    more = named & installed - needed_by("sparsejax", set())
    assert not more, f"installed, but needed only by an extra: {more}"


def import_all() -> int:
    names = [
        f"{package}.{module.name}"
        for package in ("sparsejax", "pallas_kernels")
        for module in modules_of(package)
    ]
    for name in names:
        importlib.import_module(name)
    return len(names)


def modules_of(package: str):
    """The modules of a package, those of its packages, too, without importing SKIPPED."""
    [folder] = importlib.import_module(package).__path__
    for module in pkgutil.iter_modules([folder]):
        if f"{package}.{module.name}" in SKIPPED:
            continue
        yield module
        if module.ispkg:
            for inner in modules_of(f"{package}.{module.name}"):
                yield inner._replace(name=f"{module.name}.{inner.name}")


def check_commands() -> None:
    pathlib.Path("events.csv").write_text(EVENTS)
    pathlib.Path("table/_delta_log").mkdir(parents=True)
    pathlib.Path("table/_delta_log/00000000000000000000.json").write_text("{}\n")
    for extra, words in NEEDS.items():
        if words is None:
            continue
        done = subprocess.run(
            [COMMAND, *words.split()], capture_output=True, text=True, check=False
        )
        lines = done.stderr.splitlines()
        said = [line for line in lines if f"pip install 'sparsejax[{extra}]'" in line]
        assert done.returncode and len(said) == 1 and lines[-1:] == said, (words, done)
        print(said[0])


def main(quickstart: str) -> None:
    check_empty()
    check_commands()
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        runpy.run_path(quickstart)["main"](num_epochs=1)
    assert "to somebody new: [" in told.getvalue(), told.getvalue()
    assert (
        pathlib.Path("report.html").stat().st_size and pathlib.Path("monday").is_dir()
    )
    print(f"{import_all()} modules are imported without extras; the quickstart runs")


if __name__ == "__main__":
    main(sys.argv[1])
