"""The package as it is built and set up."""

import os
import re
import stat
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import jax
import jaxtyping
import pytest
import scipy.sparse

import sparsejax
from sparsejax import sparse

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"sparsejax", "pallas_kernels", "tests", "examples", "benchmarks", "docs"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_there_is_one_version():
    assert sparsejax.__version__ == PROJECT["version"]
    assert metadata.version("sparsejax") == PROJECT["version"]
    headings = re.findall(
        r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert headings[0] == PROJECT["version"]


def test_every_dependency_has_one_lower_bound():
    """`make test-oldest` turns each `>=` into `==`."""
    for dependency in PROJECT["dependencies"]:
        assert re.fullmatch(r"[a-z-]+>=[\d.]+", dependency), dependency


def test_top_level_folders():
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    paths = [line.split("/") for line in listing.stdout.splitlines()]
    folders = {path[0] for path in paths if len(path) > 1}
    assert folders - FOLDERS <= {".ci", ".github"}


def test_wheel_holds_the_packages_and_their_data_and_runs(tmp_path):
    pytest.importorskip("hatchling", reason="comes with the extra `dev`")
    build = "import hatchling.build, sys; hatchling.build.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    [wheel] = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    expected = {
        path.relative_to(ROOT).as_posix()
        for package in ("sparsejax", "pallas_kernels")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    info = f"sparsejax-{PROJECT['version']}.dist-info"
    assert {name for name in names if not name.startswith(info)} == expected
    assert {"sparsejax/py.typed", "pallas_kernels/py.typed"} <= names
    assert f"{info}/licenses/LICENSE" in names
    assert any(name.endswith(".parquet") for name in names)

    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    shows = "import sparsejax as sj; print(sj.__file__); print(sj.datasets.msweb().train.num_rows)"
    shown = subprocess.run(
        [sys.executable, "-c", shows],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert shown == [str(installed / "sparsejax" / "__init__.py"), "32711"]


def test_the_suite_has_eight_cpu_devices():
    assert len(jax.devices("cpu")) == 8


def test_the_suite_checks_annotations(request):
    if not request.config.getoption("--check-annotations"):
        pytest.skip("only with --check-annotations")
    with pytest.raises(jaxtyping.TypeCheckError):
        sparse.CSR.from_scipy(scipy.sparse.eye_array(2), nse="two")  # pyrefly: ignore


def test_every_public_name_is_there():
    names = dir(sparsejax)
    assert {"fit", "load_predictor"} < set(names)
    for name in names:
        assert getattr(sparsejax, name) is not None
    with pytest.raises(AttributeError):
        sparsejax.nothing  # noqa: B018 # pyrefly: ignore


def test_importing_is_cheap(tmp_path):
    """So that `sparsejax --help` answers at once."""
    code = """
import sys, sparsejax.cli.main
print(*sys.modules)
from sparsejax.cli import commands
from sparsejax.data import SparseDataset, read
SparseDataset.load(sys.argv[1]).align_features(["/products"]).save(sys.argv[2])
for path in sys.argv[3:]:
    assert read(path).num_rows == 2
print(*sys.modules)
"""
    files = {
        "lists.txt": "ann tea rye\nbob tea\n",
        "plain.csv": "user,item\nann,tea\nbob,rye\n",
        "timed.csv": "user,item,time\nann,tea,3\nbob,rye,4\n",
        "dated.csv": "user,item,time\nann,tea,2024-12-31\nbob,rye,2025-01-01\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    texts = [str(tmp_path / name) for name in files]
    given = ROOT / "sparsejax" / "data" / "msweb" / "test.parquet"
    first, then = subprocess.run(
        [sys.executable, "-c", code, given, tmp_path / "some.parquet", *texts],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert "sparsejax" in first.split()
    assert not {"jax", "flax", "numpy", "scipy", "pyarrow"} & set(first.split())
    # These take long, and only a GPU, a library's form, a frame, a checkpoint, a linear part
    # that is computed or a model of clicks needs them.
    late = {"jax.experimental.mosaic.gpu", "jax.experimental.sparse", "pandas"}
    late |= {"scipy.optimize", "scipy.linalg", "scipy.special", "orbax.checkpoint"}
    late |= {"sparsejax.embeddings.collection"}
    assert "pyarrow" in then.split()
    assert not late & set(then.split())


# A stand-in for an interpreter: a shell script that answers the finder's question.
GOOD = "echo {name}"
OLD = "echo is Python 3.11; exit 1"
NO_VENV = "echo lacks venv and ensurepip; exit 1"
SWITCHED_OFF = "echo 'pyenv: python3.13: command not found' >&2; exit 127"


def _interpreter(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body.format(name=path)}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def _find(home: Path, *preferred: str, **environment: str):
    """Runs the finder with `home/bin` as all there is on PATH."""
    return subprocess.run(
        ["/bin/sh", str(ROOT / ".ci" / "find-python"), *preferred],
        env={"HOME": str(home), "PATH": str(home / "bin"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_finder_passes_over_what_does_not_run(tmp_path):
    _interpreter(tmp_path / "bin" / "python3.13", SWITCHED_OFF)
    good = _interpreter(tmp_path / "bin" / "python3.12", GOOD)
    _interpreter(tmp_path / "bin" / "python3", OLD)
    found = _find(tmp_path)
    assert (found.returncode, found.stdout) == (0, f"{good}\n")


def test_finder_prefers_the_versions_it_is_given(tmp_path):
    newer = _interpreter(tmp_path / "bin" / "python3.13", GOOD)
    older = _interpreter(tmp_path / "bin" / "python3.12", GOOD)
    assert _find(tmp_path).stdout == f"{newer}\n"
    assert _find(tmp_path, "3.12", "3.13").stdout == f"{older}\n"


def test_finder_looks_in_pyenv(tmp_path):
    _interpreter(tmp_path / "bin" / "python3.13", SWITCHED_OFF)
    _interpreter(tmp_path / "bin" / "python3", OLD)
    _interpreter(tmp_path / ".pyenv/versions/3.11.7/bin/python", OLD)
    good = _interpreter(tmp_path / ".pyenv/versions/3.13.0/bin/python", GOOD)
    assert _find(tmp_path).stdout == f"{good}\n"

    elsewhere = tmp_path / "elsewhere"
    other = _interpreter(elsewhere / "versions/3.12.1/bin/python", GOOD)
    assert _find(tmp_path, PYENV_ROOT=str(elsewhere)).stdout == f"{other}\n"


def test_finder_says_what_is_missing(tmp_path):
    _interpreter(tmp_path / "bin" / "python3.13", SWITCHED_OFF)
    _interpreter(tmp_path / "bin" / "python3.12", NO_VENV)
    _interpreter(tmp_path / "bin" / "python3", OLD)
    found = _find(tmp_path)
    assert found.returncode == 1
    assert not found.stdout
    assert "needs Python 3.12 or newer" in found.stderr
    for line in (
        "python3.13 does not run",
        "python3.12 lacks venv and ensurepip",
        "python3 is Python 3.11",
    ):
        assert f"\n  {line}\n" in found.stderr
    assert "make PYTHON=" in found.stderr


def test_finder_says_that_there_is_nothing(tmp_path):
    found = _find(tmp_path)
    assert found.returncode == 1
    assert f"none in {tmp_path}/.pyenv/versions" in found.stderr


def test_finder_takes_or_refuses_an_explicit_python(tmp_path):
    _interpreter(tmp_path / "bin" / "python3.13", GOOD)
    old = _interpreter(tmp_path / "old", OLD)
    refused = _find(tmp_path, PYTHON=str(old))
    assert refused.returncode == 1
    assert f"\n  {old} is Python 3.11\n" in refused.stderr

    taken = _find(tmp_path, PYTHON=sys.executable)
    assert taken.stdout == f"{sys.executable}\n"
