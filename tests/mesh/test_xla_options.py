"""Options of XLA for single programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.engine.train import dispatch
from sparsejax.mesh import xla_options

WITHOUT = xla_options.WITHOUT_TRITON | xla_options.WITHOUT_TIMED_FUSIONS


@pytest.fixture(autouse=True)
def _options_are_made_anew(monkeypatch):
    anew = xla_options._gpu_options.__wrapped__
    monkeypatch.setattr(xla_options, "_gpu_options", anew)


def options(monkeypatch, backend, *, model=None, **wanted):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    if model is None:
        return xla_options.gpu_options(**wanted)
    with jax.set_mesh(sj.make_mesh(model=model)):
        return xla_options.gpu_options(**wanted)


def test_without_a_gpu_there_are_none(monkeypatch):
    assert options(monkeypatch, "cpu", loops_in_graphs=True) == {}


# A CPU's compiler reads these options, too, and refuses those that it cannot read.
@pytest.mark.parametrize("loops", [False, True])
def test_the_installed_xla_takes_them(monkeypatch, loops):
    taken = options(monkeypatch, "gpu", loops_in_graphs=loops)
    assert taken["xla_gpu_enable_triton_gemm"] is False
    assert taken["xla_gpu_experimental_enable_fusion_autotuner"] is False
    assert ("xla_gpu_enable_command_buffer" in taken) == loops


def test_steps_of_clicks_have_timed_fusions(monkeypatch):
    asked, real = [], xla_options.gpu_options

    def noted(**how):
        asked.append(how["timed_fusions"])
        return real(**how)

    class Scale(nnx.Module):
        def __init__(self):
            self.value = nnx.Variable(jnp.ones(2))

    class Clicks(Scale):
        kind = "clicks"

    monkeypatch.setattr(xla_options, "gpu_options", noted)
    for model in Scale(), Clicks():
        sj.jit(lambda model: 2 * model.value[...])(model)
    assert asked == [False, True]
    sj.jit(lambda model: 3 * model.value[...], deterministic=True)(Clicks())
    vars(dispatch.run_steps).pop("timed", None)  # made anew
    steps = dispatch.run_steps.timed
    assert steps[False] is not steps[True] and "clicks" == sj.embeddings.DLRM.kind
    assert asked[2:] == [False, True, False]
    monkeypatch.undo()
    assert options(monkeypatch, "gpu", timed_fusions=True) == xla_options.WITHOUT_TRITON


def test_options_that_xla_refuses_are_left_out(monkeypatch):
    names = {"xla_gpu_enable_command_buffer": "FUSION,OTHER"}
    monkeypatch.setattr(xla_options, "LOOPS_IN_GRAPHS", names)
    taken = options(monkeypatch, "gpu", loops_in_graphs=True)
    assert taken == WITHOUT


def test_the_mesh_decides_not_the_devices_that_are_visible(monkeypatch):
    """On a mesh of several, arrays cross while others work, and loops are no graphs."""
    assert jax.device_count() > 1
    wanted = {"loops_in_graphs": True, "timed_fusions": True}
    alone = xla_options.WITHOUT_TRITON | xla_options.LOOPS_IN_GRAPHS
    assert options(monkeypatch, "gpu", **wanted) == alone
    assert options(monkeypatch, "gpu", model=1, **wanted) == alone
    taken = options(monkeypatch, "gpu", model=2, **wanted)
    assert taken == WITHOUT | xla_options.OVERLAPPED | xla_options.COPIED


def test_a_program_has_a_form_for_a_mesh():
    programs = xla_options.Programs(lambda x: x)
    alone = programs[False]
    with jax.set_mesh(sj.make_mesh(model=1)):
        assert programs[False] is alone
    with jax.set_mesh(sj.make_mesh(model=2)):
        assert programs[False] is not alone
