"""The folder of compiled programs, from one session of tests to the next."""

import os
import zlib

import jax
import pytest
from kept_programs import bound


def test_bounded_by_age_and_without_what_was_cut_off(tmp_path):
    bound(tmp_path / "none", 0)
    program = zlib.compress(os.urandom(1000))
    for age, name in enumerate(("new", "older", "oldest")):
        (tmp_path / f"{name}-cache").write_bytes(program)
        os.utime(tmp_path / f"{name}-cache", (1e9 - age, 1e9 - age))
    (tmp_path / "cut-cache").write_bytes(program[:-1])
    (tmp_path / "empty-cache").write_bytes(b"")
    bound(tmp_path, 2 * len(program))
    left = {file.name for file in tmp_path.glob("*-cache")}
    assert left == {"new-cache", "older-cache"}
    bound(tmp_path, 0)
    assert not list(tmp_path.glob("*-cache"))


@pytest.mark.usefixtures("no_kept_programs")
def test_a_test_can_do_without():
    assert jax.config.jax_compilation_cache_dir is None
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_programs_are_kept():
    assert (
        jax.config.jax_compilation_cache_dir == os.environ["JAX_COMPILATION_CACHE_DIR"]
    )
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    assert (
        jax.config.jax_compilation_cache_max_size == -1
    )  # else JAX lists it each time
