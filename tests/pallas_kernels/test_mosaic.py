"""What Mosaic GPU is asked."""

import types

from jax._src import lib

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
