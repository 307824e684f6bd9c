"""Settings and fixtures of all tests."""

import contextlib
import datetime
import gc
import inspect
import os
import pathlib
import signal
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator

import hypothesis
import jax
import jaxtyping
import kept_programs
import numpy as np
import platformdirs
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.pallas import mosaic_gpu as plgpu

# Compiled programs are kept for the next session of tests, also of another clone, and for
# the processes that tests start. JAX's key of a program has all that it depends on: the
# program, the versions of jaxlib and XLA with their flags and options, and the devices
# with the processor's features. So what is found is what would be compiled.
# JAX does not bound the folder: it would list all of it whenever it writes a program.
PROGRAMS = pathlib.Path(
    os.environ.setdefault(
        "JAX_COMPILATION_CACHE_DIR",
        str(platformdirs.user_cache_path("sparsejax", appauthor=False) / "tests"),
    )
)
MAX_BYTES = 2**30
TESTS = pathlib.Path(__file__).parent
# This folder has fixtures of its own, see `make test-as-user`.
collect_ignore = ["as_user"]
RENAMED = pytest.StashKey[set[str]]()
OUTSIDE = pytest.StashKey[set[str]]()
SHARES = 7  # number of shares of release_tests.txt; CI runs one share a day
# This case takes ten minutes.
IN_NO_SHARE = {"serving/test_fuzz.py::test_a_service_alone"}
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def _keep_programs(folder: str | None, seconds: float) -> tuple[str | None, float]:
    """Caches programs that take at least this long to compile; returns the former settings."""
    before = (
        jax.config.jax_compilation_cache_dir,
        jax.config.jax_persistent_cache_min_compile_time_secs,
    )
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    compilation_cache.reset_cache()
    return before


_keep_programs(str(PROGRAMS), 0.0)

# Not the user's cache folder: test workers, and the commands that they start, share this folder.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = tempfile.TemporaryDirectory()
    os.environ["XDG_CACHE_HOME"] = _cache.name

# Mesh tests need eight devices; other tests use the first, and are not slower for it.
jax.config.update("jax_num_cpu_devices", 8)
# A wrong shape should fail, not broadcast.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing makes many objects, few of which are garbage: collecting took a sixth of the time.
gc.set_threshold(50_000)

hypothesis.settings.register_profile(
    "sparsejax",
    deadline=None,  # the first example of a shape is slow, because it compiles
    # Equal examples in each session find their programs cached; `--random-examples` draws new
    # ones.
    derandomize=True,
    # Few, because most examples compile, and a test runs in several forms.
    max_examples=15,
)
hypothesis.settings.register_profile(
    "random", hypothesis.settings.get_profile("sparsejax"), derandomize=False
)
hypothesis.settings.load_profile("sparsejax")


# A shell makes its background processes ignore SIGINT; this undoes that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _few_programs_and_objects() -> Iterator[None]:
    """Drops compiled programs when there are many, and excludes old objects from garbage
    collection.

    On a CPU each program maps some regions of memory; Linux allows a process 65,530 of them.
    Collecting garbage among all objects of earlier modules takes seconds, and both `overwrite` and
    damaged checkpoints start a collection.
    """
    yield
    regions = pathlib.Path("/proc/self/maps")
    if not regions.exists() or regions.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()
        gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_mesh_is_left() -> Iterator[None]:
    """Fails a test that leaves a mesh set, and unsets it: all later tests would run on it.

    A call of `jax.set_mesh` sets the mesh, and only the end of its `with` unsets it.
    """
    before = jax.sharding.get_mesh()
    yield
    left = jax.sharding.get_mesh()
    if left != before:
        jax.set_mesh(before)
        pytest.fail(
            f"the test leaves a mesh set, {left}: write `with jax.set_mesh(...)`"
        )


@pytest.fixture(scope="module")
def symbolic_sizes() -> Iterator[None]:
    """For exports: where annotations require an int, an exported program has a symbol."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def wrong_types() -> Iterator[None]:
    """For tests that pass arguments of wrong types to check our own error messages: annotations
    are not checked.
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def is_here(request) -> Callable[[warnings.WarningMessage], bool]:
    """A function that tests whether a warning points to the test, or to the check of
    annotations.
    """
    files = str(request.path), inspect.getsourcefile(jaxtyping.jaxtyped)
    return lambda warning: warning.filename in files


@pytest.fixture
def no_kept_programs(monkeypatch) -> Iterator[None]:
    """For tests that count compilations or have their own cache: disables the cache of
    programs.
    """
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    before = _keep_programs(None, 1.0)  # these are JAX's defaults
    yield
    _keep_programs(*before)


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def running(request, capfd):
    """A context in which GPU programs run; it fails if they have a race."""

    @contextlib.contextmanager
    def context(*, detect_races: bool = True) -> Iterator[None]:
        interpret = plgpu.force_gpu_interpret_mode(
            plgpu.InterpretGPUParams(detect_races=detect_races)
        )
        on_gpu = request.param == "gpu"
        with contextlib.nullcontext() if on_gpu else interpret:
            yield
        assert "RACE" not in capfd.readouterr().out.upper()

    return context


@pytest.fixture
def run_program(running):
    """A function that compiles and runs a function with a GPU program; its arrays are copied to
    the host.
    """

    def call(function, *arguments):
        with running():
            return jax.tree.map(np.asarray, jax.jit(function)(*arguments))

    return call


@pytest.fixture(scope="module")
def bucket():
    """The address of an empty bucket of a local server that speaks S3, and its query."""
    server = pytest.importorskip("moto.moto_server.threaded_moto_server")
    fs = pytest.importorskip("pyarrow.fs")
    server = server.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    query = f"?region=us-east-1&scheme=http&endpoint_override={host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        create = f"s3://shop{query}&allow_bucket_creation=true"
        fs.FileSystem.from_uri(create)[0].create_dir("shop")
        yield "s3://shop", query
    server.stop()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sparsejax")
    group.addoption(
        "--check-annotations",
        action="store_true",
        help="check each annotation of the packages at run time (a quarter slower)",
    )
    group.addoption(
        "--random-examples",
        action="store_true",
        help="draw new examples of properties; their programs are compiled anew",
    )
    group.addoption(
        "--share-of-release",
        choices=[*map(str, range(SHARES)), "today"],
        help=f"also run one of {SHARES} shares of release_tests.txt",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--share-of-release") == "today":
        # Workers get a number, because the day may change while they are started.
        day = datetime.datetime.now(datetime.UTC).toordinal() % SHARES
        config.option.share_of_release = str(day)
    if config.getoption("--random-examples"):
        hypothesis.settings.load_profile("random")
    if config.getoption("--check-annotations"):
        # The hook must be installed before the packages are first imported.
        jaxtyping.install_import_hook(
            ["sparsejax", "pallas_kernels"], "annotations.check"
        )


@pytest.hookimpl(tryfirst=True)  # this must run before `-m` selects tests
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Marks the tests named in two lists, and skips GPU tests if there is no GPU."""
    config.stash[RENAMED] = set()
    released: set[str] = set()
    share = config.getoption("--share-of-release")
    for mark in ("slow", "release"):
        names = set((TESTS / f"{mark}_tests.txt").read_text().splitlines())
        found = set()
        for item in items:
            name = item.nodeid.partition("/")[2]
            if named := names & {name, name.partition("[")[0]}:
                found |= named
                if mark == "release":
                    released.add(name)
                    day = zlib.crc32(name.encode()) % SHARES
                    if day == int(share or -1) and name not in IN_NO_SHARE:
                        continue
                item.add_marker(mark)
        config.stash[RENAMED] |= names - found
    names = {item.nodeid.partition("/")[2] for item in items}
    in_ci = {name.partition("[")[0] for name in names - released}
    config.stash[OUTSIDE] = {name.partition("[")[0] for name in released} - in_ci
    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_report_header(config: pytest.Config) -> str | None:
    """Names the share of the release tests that is run."""
    share = config.getoption("--share-of-release")
    if share is None:
        return None
    return (
        f"release_tests.txt: share {share} of {SHARES} is run, too; "
        f"--share-of-release={share} runs it again"
    )


@pytest.fixture
def renamed_tests(pytestconfig) -> set[str]:
    """Names in the two lists that no collected test has."""
    return pytestconfig.stash[RENAMED]


@pytest.fixture
def functions_outside_ci(pytestconfig) -> set[str]:
    """Functions all of whose collected cases are named in release_tests.txt."""
    return pytestconfig.stash[OUTSIDE]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Limits the size of the folder of compiled programs, after all processes have ended."""
    if not hasattr(session.config, "workerinput"):
        kept_programs.bound(PROGRAMS, MAX_BYTES)
