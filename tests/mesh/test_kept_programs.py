"""Programs cached in a folder, and found by their sources, settings and arguments."""

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.mesh import kept_programs
from sparsejax.mesh.kept_programs import Keepable, kept_in
from sparsejax.mesh.layout import make_mesh

ROOT = __name__.partition(".")[0]
TRACED = []  # the names of what was traced


def plus(x, y, *, how=1):
    TRACED.append("plus")
    return {"sum": x["a"] + how * y, "mean": jnp.mean(x["a"])}


def minus(x, y, *, how=1):
    TRACED.append("minus")
    return {"sum": x["a"] - how * y, "mean": jnp.mean(x["a"])}


def slow(x, y, *, how=1):
    TRACED.append("slow")
    time.sleep(0.3)
    return x["a"] + how * y


@pytest.fixture
def known(monkeypatch):
    """Makes the functions of this test count as functions of our packages."""
    monkeypatch.setattr(kept_programs, "_KNOWN", kept_programs._KNOWN | {ROOT})


@pytest.fixture
def run(tmp_path, known, no_kept_programs):
    """Runs a function as a new process would; returns its result, and whether it was traced."""

    def call(f=plus, *arguments, since=None, options=None, **named):
        options: dict[str, Any] = {"static_argnames": "how"} | (options or {})
        forget()
        with kept_in(tmp_path, since=time.time() if since is None else since):
            found = Keepable(f, **options)(*(arguments or given()), **named)
        return jax.tree.map(np.asarray, found), bool(TRACED)

    return call


def forget() -> None:
    """Clears JAX's caches of traced and compiled functions."""
    jax.clear_caches()
    TRACED.clear()


def given(dtype=np.float32, rows=5):
    # Sums of these are not the same in each order.
    x = np.random.default_rng(0).standard_normal((rows, 3)).astype(dtype)
    return {"a": jnp.asarray(x)}, jnp.asarray(x[::-1])


def files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("*.program"))


def same(one, other) -> bool:
    return jax.tree.all(
        jax.tree.map(
            lambda a, b: a.dtype == b.dtype and a.tobytes() == b.tobytes(), one, other
        )
    )


def test_a_program_is_found_without_being_traced(run, tmp_path):
    want = jax.tree.map(np.asarray, jax.jit(plus)(*given()))
    first, traced = run()
    assert traced and same(first, want) and len(files(tmp_path)) == 1
    again, traced = run()
    assert not traced and same(again, want)
    assert jax.config.jax_enable_compilation_cache


def test_a_program_is_prepared_and_not_run(tmp_path, known, no_kept_programs):
    program = Keepable(plus, static_argnames="how", donate_argnames="y")
    program.compile_ahead(*given())  # nothing is kept here
    assert not TRACED and not files(tmp_path)
    with kept_in(tmp_path, since=time.time()):
        arguments = given()
        program.compile_ahead(*arguments, how=2)
        assert TRACED and not arguments[1].is_deleted() and len(files(tmp_path)) == 1
        forget()
        found = program(*arguments, how=2)
    assert not TRACED and same(
        found, jax.jit(plus, static_argnames="how")(*given(), how=2)
    )


def test_a_program_is_lowered_and_compiled_later(tmp_path, known, no_kept_programs):
    program = Keepable(plus, static_argnames="how")
    with kept_in(tmp_path, since=time.time()):
        compiling = program.lower_ahead(*given())
        assert TRACED and not files(tmp_path)
        TRACED.clear()
        compiling()
        assert len(files(tmp_path)) == 1
        compiling = Keepable(plus, static_argnames="how").lower_ahead(*given())
        found = program(*given())
        compiling()  # it was found, not lowered
    assert not TRACED and same(found, jax.jit(plus)(*given()))


@pytest.mark.parametrize("committed", [False, True])
def test_shapes_stand_for_arrays(tmp_path, known, no_kept_programs, committed):
    program = Keepable(plus, static_argnames="how")
    arrays, others = given(), jax.device_put(given(), jax.devices()[0])
    if committed:
        arrays, others = others, arrays
    shapes = kept_programs.as_shapes(arrays)
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(shapes))
    with kept_in(tmp_path, since=time.time()):
        program.compile_ahead(*shapes)
        forget()
        found = program(*arrays)
        assert not TRACED
        program(*others)  # another program
        assert TRACED
    assert same(found, jax.jit(plus)(*given()))


def test_a_thread_waits_for_the_one_that_compiles(tmp_path, known, no_kept_programs):
    program = Keepable(slow, static_argnames="how")
    forget()
    with kept_in(tmp_path, since=time.time()):
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            running = [threads.submit(program, *given()) for _ in range(3)]
        assert TRACED == ["slow"] and len(files(tmp_path)) == 1
    assert all(same(each.result(), running[0].result()) for each in running)


def test_options_hold_outside_other_programs(tmp_path, known, no_kept_programs):
    options = {"compiler_options": {"xla_cpu_enable_fast_math": False}}
    program = Keepable(plus, inside_others=True, **options)
    other = Keepable(plus, **options)
    for folder in contextlib.nullcontext(), kept_in(tmp_path, since=time.time()):
        with folder:
            found = jax.jit(lambda x, y: program(x, y))(*given())
            assert same(found, program(*given()))
            with pytest.raises(ValueError, match="compiler_options"):
                jax.jit(lambda x, y: other(x, y))(*given())


def test_outside_nothing_is_kept(tmp_path, known):
    assert same(Keepable(plus)(*given()), jax.jit(plus)(*given()))
    assert not files(tmp_path)


def test_within_a_process_it_is_read_once(tmp_path, known, no_kept_programs):
    with kept_in(tmp_path, since=time.time()):
        program = Keepable(plus, static_argnames="how")
        want = program(*given())
        (file,) = files(tmp_path)
        file.unlink()
        assert same(program(*given()), want) and not files(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        "function",
        "shape",
        "dtype",
        "weak type",
        "structure",
        "static",
        "type of static",
        "option",
        "setting",
        "device",
        "mesh",
        "environment",
    ],
)
def test_what_differs_is_another_program(run, tmp_path, changed, monkeypatch):
    run()
    f, arguments, named, options = plus, given(), {}, {}
    with contextlib.ExitStack() as stack:
        match changed:
            case "function":
                f = minus
            case "shape":
                arguments = given(rows=6)
            case "dtype":
                arguments = given(np.float16)
            case "weak type":
                arguments = given()[0], 2.0
            case "structure":
                arguments = {**given()[0], "b": jnp.ones(3)}, given()[1]
            case "static":
                named = {"how": 2}
            case "type of static":
                named = {"how": True}
            case "option":
                options = {"keep_unused": True}
            case "setting":
                stack.enter_context(jax.default_matmul_precision("highest"))
            case "device":
                arguments = jax.device_put(given(), jax.devices()[1])
            case "mesh":
                stack.enter_context(jax.set_mesh(make_mesh(data=1, model=1)))
            case "environment":
                monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
        want = jax.tree.map(np.asarray, jax.jit(f)(*arguments, **named))
        for is_first in True, False:
            found, traced = run(f, *arguments, options=options, **named)
            assert traced == is_first and same(found, want)
    assert len(files(tmp_path)) == 2


def test_a_changed_source_is_another_program(run, tmp_path, monkeypatch):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "module.py").write_text("x = 1")
    package = type(sys)("package")
    package.__path__ = [str(folder)]
    monkeypatch.setattr(kept_programs, "_OURS", (package,))
    assert run()[1] and not run()[1]
    for change in (
        lambda: (folder / "module.py").write_text("x = 2"),
        lambda: (folder / "module.py").rename(folder / "other.py"),
        lambda: (folder / "new.py").write_text(""),
    ):
        change()
        assert run()[1] and not run()[1]
    assert len(files(tmp_path)) == 4
    # What was imported before the change may be something else.
    before = (folder / "new.py").stat().st_ctime - 1
    assert run(since=before)[1] and run(since=before)[1]
    assert len(files(tmp_path)) == 4


@pytest.mark.parametrize("damage", ["emptied", "cut", "changed", "of another"])
def test_a_damaged_file_is_written_anew(run, tmp_path, damage):
    want, _ = run()
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    if damage == "of another":
        run(minus)
        (other,) = set(files(tmp_path)) - {file}
        content = bytearray(other.read_bytes())
    elif damage == "changed":
        content[len(content) // 2] ^= 1
    size = {"emptied": 0, "cut": len(content) // 2}.get(damage, len(content))
    file.write_bytes(content[:size])
    found, traced = run()
    assert same(found, want) and traced
    found, traced = run()
    assert same(found, want) and not traced


def test_what_cannot_be_loaded_is_written_anew(run, tmp_path):
    want, _ = run()
    (file,) = files(tmp_path)
    file.write_bytes(kept_programs._seal(file, b"content") + b"content")
    assert run()[1]
    found, traced = run()
    assert same(found, want) and not traced


def test_the_least_recently_used_are_removed(run, tmp_path, monkeypatch):
    run()
    (first,) = files(tmp_path)
    monkeypatch.setattr(kept_programs, "MAX_BYTES", 5 * first.stat().st_size // 2)
    os.utime(first, (1, 1))
    run(how=2)
    (second,) = set(files(tmp_path)) - {first}
    os.utime(second, (2, 2))
    assert not run()[1]
    run(how=3)
    assert first.exists() and not second.exists() and len(files(tmp_path)) == 2


def test_a_folder_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("")
    with kept_in(tmp_path / "file" / "folder", since=time.time()):
        with pytest.warns(UserWarning, match="programs are not kept ready: .*file"):
            assert same(Keepable(plus)(*given()), jax.jit(plus)(*given()))
        assert same(Keepable(minus)(*given()), jax.jit(minus)(*given()))  # no warning


def scaled(x, y, *, how):
    TRACED.append("scaled")
    return how.factor * y


@dataclasses.dataclass(frozen=True)
class Scale:
    factor: Any = 2.0


@dataclasses.dataclass(frozen=True)
class _Hidden:
    value: Callable[[], float]

    def __mul__(self, other):
        return self.value() * other


def test_what_is_of_ones_own_is_not_kept(tmp_path, monkeypatch, no_kept_programs):
    def run(f, how) -> bool:
        forget()
        with kept_in(tmp_path, since=time.time()):
            Keepable(f, static_argnames="how")(*given(), how=how)
        return bool(TRACED)

    # Neither a function of one's own, nor one of ours with something of one's own.
    assert all(run(plus, 1) for _ in range(2))
    monkeypatch.setattr(scaled, "__module__", "sparsejax.ops")
    assert all(run(scaled, Scale()) for _ in range(2))
    assert not files(tmp_path)
    monkeypatch.setattr(kept_programs, "_KNOWN", kept_programs._KNOWN | {ROOT})
    assert run(scaled, Scale()) and not run(scaled, Scale())
    # Within a function there is no name by which to tell what it is.
    local = dataclasses.make_dataclass("Local", ["factor"], frozen=True)
    assert all(run(scaled, local(2.0)) for _ in range(2))
    assert all(run(scaled, Scale(_Hidden(lambda: 2))) for _ in range(2))
    assert len(files(tmp_path)) == 1


def test_donated_arrays_are_overwritten(run):
    for _ in range(2):
        x, y = given()
        run(plus, x, y, options={"donate_argnames": "y"})
        assert y.is_deleted() and not x["a"].is_deleted()


def test_results_lie_on_the_mesh_as_before(tmp_path, known, no_kept_programs):
    with jax.set_mesh(make_mesh(data=2, model=4)):
        x = jax.device_put(
            np.arange(48.0, dtype=np.float32).reshape(8, 6), jax.P("model")
        )
        arguments = {"a": x}, jax.device_put(np.ones((8, 6), np.float32), jax.P())
        want = jax.jit(plus)(*arguments)
        for is_first in True, False:
            forget()
            with kept_in(tmp_path, since=time.time()):
                found = Keepable(plus, static_argnames="how")(*arguments)
            assert bool(TRACED) == is_first
            assert same(found, want)
            for name in want:
                assert found[name].sharding == want[name].sharding


def laid(x, y, *, how):
    TRACED.append("laid")
    return jax.lax.with_sharding_constraint(y, how.factor[-1])


def test_places_may_be_static(tmp_path, known, no_kept_programs):
    def run(*names) -> tuple[jax.Array, bool]:
        forget()
        lies = tuple(
            jax.NamedSharding(jax.sharding.get_mesh(), jax.P(n)) for n in names
        )
        with kept_in(tmp_path, since=time.time()):
            y = jax.device_put(np.ones((8, 6), np.float32), jax.P())
            program = Keepable(laid, static_argnames="how")
            return program({}, y, how=Scale(lies)), bool(TRACED)

    with jax.set_mesh(mesh := make_mesh(data=2, model=4)):
        for names in ["data"] * 60, ["data", "model"], ["model", "data"]:
            for is_first in True, False:
                found, traced = run(*names)
                assert traced == is_first
                assert found.sharding == jax.NamedSharding(mesh, jax.P(names[-1]))
    with jax.set_mesh(make_mesh(data=4, model=2)):
        assert run("data", "model")[1]
    assert len(files(tmp_path)) == 4


def test_inside_another_program_it_is_a_part(run, tmp_path, known):
    with kept_in(tmp_path, since=time.time()):
        program = Keepable(plus, static_argnames="how")
        jax.grad(lambda x, y: program({"a": x}, y)["mean"])(given()[0]["a"], given()[1])
    assert not files(tmp_path)


_PROCESS = """
import pathlib, sys, time
import numpy as np
from sparsejax.mesh.kept_programs import kept_in
from sparsejax.engine.train.checkpoint import checksums
import jax
x = {"a": jax.numpy.asarray(np.arange(12.0))}
folder = pathlib.Path(sys.argv[1])
(folder / f"ready-{sys.argv[2]}").touch()
while len(list(folder.glob("ready-*"))) < 2:
    time.sleep(0.01)
with kept_in(folder, since=time.time()):
    print(checksums(x))
"""


def test_two_processes_at_once(tmp_path, no_kept_programs):
    command = [sys.executable, "-c", _PROCESS, str(tmp_path)]
    both = [
        subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    told = {process.communicate()[0] for process in both}
    assert [process.returncode for process in both] == [0, 0] and len(told) == 1
    assert len(files(tmp_path)) == 1
    done = subprocess.run([*command, "c"], capture_output=True, text=True, check=True)
    assert {done.stdout} == told and len(files(tmp_path)) == 1
    assert not list(tmp_path.glob(".sparsejax-*"))
