"""Settings that our code makes in Mosaic GPU."""

import concurrent.futures
import types

import jax
import jax.numpy as jnp
from jax._src import lib
from jax.experimental.mosaic.gpu import core

from pallas_kernels import mosaic


def test_ptxas_is_asked_once(monkeypatch):
    asked = []
    extension = types.SimpleNamespace(
        _get_ptxas_isa_version=lambda: asked.append(1) or 90
    )
    library = types.SimpleNamespace(_mosaic_gpu_ext=extension)
    monkeypatch.setattr(lib, "mosaic_gpu", library, raising=False)
    mosaic.ask_once.__wrapped__()
    assert [extension._get_ptxas_isa_version() for _ in range(3)] == [90] * 3
    assert len(asked) == 1


def test_a_jax_without_it_is_left_alone(monkeypatch):
    monkeypatch.delattr(lib, "mosaic_gpu", raising=False)
    mosaic.ask_once.__wrapped__()


def test_programs_are_compiled_when_they_are_lowered(monkeypatch):
    """In a thread, from the very bytes that XLA gets."""
    asked = {}

    def ffi_call(target, result, **options):
        def launch(x, *, kernel_hash, module, **settings):
            assert target == "mosaic_gpu_v2"
            asked[kernel_hash] = module
            done.set_result(settings)
            return x

        return launch

    monkeypatch.setattr(core, "KNOWN_KERNELS", {})
    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    mosaic.compile_beside.__wrapped__()

    def double(x_gmem, out_gmem):
        out_gmem[...] = x_gmem[...] * 2

    done = concurrent.futures.Future()
    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    traced = jax.jit(lambda x: mosaic.kernel(double, out_type=x)(x)).trace(x)
    assert "@mosaic_gpu_v2" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert not any(done.result(timeout=300).values())
    assert asked == core.KNOWN_KERNELS
    assert len(asked) == 1


def test_a_jax_that_keeps_programs_elsewhere_is_left_alone(monkeypatch):
    monkeypatch.delattr(core, "KNOWN_KERNELS")
    mosaic.compile_beside.__wrapped__()
