"""Options of XLA for single programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
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
        short_fusions = True

    monkeypatch.setattr(xla_options, "gpu_options", noted)
    for model in Scale(), Clicks():
        sj.jit(lambda model: 2 * model.value[...])(model)
    assert asked == [False, True]
    sj.jit(lambda model: 3 * model.value[...], deterministic=True)(Clicks())
    vars(dispatch.run_steps).pop("timed", None)  # made anew
    steps = dispatch.run_steps.timed
    assert steps[False] is not steps[True] and "clicks" == sj.clicks.DLRM.kind
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


@pytest.fixture
def profile(tmp_path):
    """A function that records profiles, with or without the host's events."""

    def record(level):
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = level
        options.python_tracer_level = 0
        return jax.profiler.trace(tmp_path, profiler_options=options)

    return record


@pytest.mark.parametrize("level", [0, 2])
def test_no_graphs_while_a_gpu_is_profiled(monkeypatch, profile, level):
    """XLA would run their operations one by one, and with graphs again: wrong numbers."""
    loops = {"loops_in_graphs": True}
    before = options(monkeypatch, "gpu", **loops)
    with profile(level):
        taken = options(monkeypatch, "gpu", **loops)
        on_mesh = options(monkeypatch, "gpu", model=2, **loops)
        assert options(monkeypatch, "cpu", **loops) == {}
    assert taken == WITHOUT | xla_options.WITHOUT_GRAPHS
    assert on_mesh["xla_gpu_enable_command_buffer"] == ""
    assert options(monkeypatch, "gpu", **loops) == before
    assert before["xla_gpu_enable_command_buffer"].endswith("WHILE")


def test_programs_that_are_profiled_are_others(monkeypatch, profile):
    """Of `sj.jit`, of `fit` and of each `Programs`; afterwards the first ones run again."""
    asked = []

    def options(one_device, profiled, *how):  # that a CPU takes
        asked.append(profiled)
        return {"xla_cpu_enable_fast_min_max": profiled}

    monkeypatch.setattr(xla_options, "_gpu_options", options)
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    step = sj.jit(lambda model, x: model(x).sum())
    programs = xla_options.Programs(lambda x: x)
    matrix = np.eye(16, dtype=np.float32)
    data = sj.SparseDataset.from_scipy(scipy.sparse.csr_array(matrix))
    config = sj.NetworkConfig.autoencoder(hidden=(4,))
    trained = sj.build(config, data, sj.optimizers.adagrad(0.1))

    def run():
        sj.fit(*trained, data, num_epochs=1, batch_size=16, seed=0)
        return step(model, jnp.ones((1, 2))), programs[False]

    with monkeypatch.context() as patched:
        patched.setattr(jax, "default_backend", lambda: "gpu")
        patched.setattr(dispatch, "steps_per_dispatch", lambda entries: 1)
        patched.setattr(dispatch, "fills_dispatches", lambda: False)
        first, program = run()
        assert run()[1] is program and not any(asked)
        with profile(2):
            profiled, other = run()
        assert other is not program and profiled == first
        assert asked.count(True) >= 3
        assert run()[1] is program


def test_a_program_has_a_form_for_a_mesh(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    programs = xla_options.Programs(lambda x: x)
    alone = programs[False]
    with jax.set_mesh(sj.make_mesh(model=1)):
        assert programs[False] is alone
    with jax.set_mesh(sj.make_mesh(model=2)):
        assert programs[False] is not alone
