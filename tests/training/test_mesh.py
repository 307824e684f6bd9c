"""Trains on a mesh as on one device, and resumes from a checkpoint of another mesh."""

import contextlib
import math
from typing import Any

import jax
import numpy as np
import pytest
import scipy.sparse
from flax import nnx
from jax.sharding import AxisType

from sparsejax import optimizers
from sparsejax.engine.train.checkpoint import checksums
from sparsejax.mesh.layout import make_mesh
from sparsejax.nn.config import NetworkConfig
from sparsejax.nn.models import FeedForward
from sparsejax.optimizers.inplace import HostCopy, variables_of
from sparsejax.verbs.fit import fit

ROWS, ITEMS = 200, 300
Shape = tuple[int, int] | None


def on(shape: Shape):
    if shape is None:
        return contextlib.nullcontext()
    return jax.set_mesh(make_mesh(data=shape[0], model=shape[1]))


def examples():
    """Inputs, targets and weights."""
    rng = np.random.default_rng(0)
    x = scipy.sparse.random_array((ROWS, ITEMS), density=0.02, rng=rng).tocsr()
    y = scipy.sparse.random_array((ROWS, ITEMS), density=0.02, rng=rng) > 0
    return x, y, rng.random(ROWS)


class Counted(FeedForward):
    """A model that counts how often its loss is traced."""

    traces = 0

    def loss(self, *args, **kwargs):
        Counted.traces += 1
        return super().loss(*args, **kwargs)


def build(rule=None, hidden=(8, 4), **network: Any):
    # No cosines: the slope of a row's is without bound where its vector is near zero.
    noise: dict[str, Any] = {"corruption": 0.3, "dropout": 0.2}
    config = NetworkConfig.autoencoder(hidden, temperature=None, **noise, **network)
    model = Counted(config, inputs=ITEMS, outputs=ITEMS, rngs=nnx.Rngs(0))
    return model, optimizers.Optimizer(model, rule or optimizers.adagrad(0.1))


def trained(shape: Shape, rule=None, network: Any = None, **options: Any):
    """Trains; returns the history without speeds, and all arrays of model and optimizer."""
    x, y, weights = examples()
    with on(shape):
        model, optimizer = build(rule, **(network or {}))
        before = layout(model, optimizer)
        settings: dict[str, Any] = {"batch_size": 128, "num_epochs": 3} | options
        history = fit(model, optimizer, x, y, weights=weights, **settings)
        if shape is not None:
            after = layout(model, optimizer)
            everywhere = jax.sharding.NamedSharding(
                make_mesh(data=shape[0], model=shape[1]), jax.P()
            )
            for path, (sharding, ndim) in after.items():
                # What lay on one device is on all now, the rest has stayed.
                expected = before[path][0]
                if isinstance(expected, jax.sharding.SingleDeviceSharding):
                    expected = everywhere
                assert sharding.is_equivalent_to(expected, ndim), path
        arrays = {
            jax.tree_util.keystr(path): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(
                nnx.state((model, optimizer), nnx.Any(nnx.Param, nnx.OptState))
            )
        }
    for entry in history:
        del entry["examples_per_second"]
    return history, arrays


def layout(model, optimizer):
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state((model, optimizer)))
    return {
        jax.tree_util.keystr(path): (leaf.sharding, leaf.ndim) for path, leaf in leaves
    }


def check_equal(found, expected) -> None:
    history, arrays = found
    for ours, theirs in zip(history, expected[0], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            np.testing.assert_allclose(value, theirs[name], rtol=1e-5, err_msg=name)
    assert arrays.keys() == expected[1].keys()
    for name, array in arrays.items():
        # Adam divides by the root of what may be all rounding.
        np.testing.assert_allclose(
            np.asarray(array),
            np.asarray(expected[1][name]),
            rtol=1e-3,
            atol=1e-5,
            err_msg=name,
        )


@pytest.fixture(scope="module")
def on_one_device():
    return trained(None)


def test_a_mesh_trains_as_one_device_does(on_one_device):
    check_equal(trained((2, 4)), on_one_device)


# Without state, with a number for a row, with weights that are not all of the state, and
# with rows that decay. The state of the others lies as Adam's.
@pytest.mark.parametrize("name", ["sgd", "rowwise_adagrad", "ftrl", "adamw"])
def test_every_kind_of_state_divides_the_items_over_all_devices(name):
    rule = optimizers.get(name, learning_rate=1e-2)
    expected, _ = trained(None, rule, num_epochs=2)
    history, arrays = trained((2, 2), rule, num_epochs=2, fused=True)
    for ours, theirs in zip(history, expected, strict=True):
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-6)
    of_output = [path for path in arrays if "output" in path]
    assert len(of_output) >= 2  # kernel, bias, and their state
    for path in of_output:
        part = arrays[path].addressable_shards[0].data
        assert len(part) == len(arrays[path]) // 4, path


def test_a_tied_kernel_on_a_mesh():
    network = {"hidden": (8,), "tied": True}
    got = trained((2, 4), network=network)
    check_equal(got, trained(None, network=network))
    kernels = [array for path, array in got[1].items() if "kernel" in path]
    assert len(kernels) == 2  # with Adagrad's sums
    assert {len(k.addressable_shards[0].data) for k in kernels} == {
        len(kernels[0]) // 8
    }


@pytest.mark.parametrize("shape", [None, (1, 4)], ids=str)
def test_a_fused_training_goes_on_on_other_meshes(shape, tmp_path, on_one_device):
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "fused": True}
    trained((2, 2), num_epochs=2, **options)
    check_equal(trained(shape, resume=True, **options), on_one_device)


def test_training_on_a_mesh_repeats_its_bits_and_its_programs():
    first = trained((2, 4))
    before = Counted.traces
    again = trained((2, 4))
    assert Counted.traces == before > 0
    assert again[0] == first[0]
    assert checksums(again[1]) == checksums(first[1])


def test_a_checkpoint_goes_on_on_any_mesh(tmp_path, on_one_device):
    # An epoch each on another mesh, random keys and optimizer state included.
    for epochs, shape in enumerate([(2, 4), (8, 1), None], start=1):
        trained(shape, num_epochs=epochs, checkpoint_dir=tmp_path, resume=epochs > 1)
    # Nothing is left to do: what the last one saved is read on yet another.
    check_equal(trained((4, 2), checkpoint_dir=tmp_path, resume=True), on_one_device)


def test_copies_are_others_on_a_mesh():
    x, _, _ = examples()
    options: dict[str, Any] = {"batch_size": 128, "num_epochs": 1}
    outside = build()  # what is whole on all devices shares memory with what it was
    copies = nnx.clone(outside)
    before = arrays_of(copies)
    with on((8, 1)):
        fit(*outside, x, **options)
    assert arrays_of(copies) == before != arrays_of(outside)
    with on((2, 4)):
        modules = build()
        copies, kept = nnx.clone(modules), HostCopy(variables_of(modules))
        before, places = arrays_of(modules), layout(*modules)
        fit(*modules, x, **options)
        assert arrays_of(copies) == before != arrays_of(modules)
        kept.restore()
        assert arrays_of(modules) == before and layout(*modules) == places


def arrays_of(modules) -> dict[str, int]:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(modules, nnx.Param))
    return checksums({jax.tree_util.keystr(path): leaf for path, leaf in leaves})


@pytest.mark.parametrize(
    ("sizes", "axis_type", "message"),
    [
        (
            {"data": 1, "model": 3},
            AxisType.Auto,
            "model must be a divisor of 256, got 3",
        ),
        ({"data": 3, "model": 1}, AxisType.Auto, "data must be a divisor of 64, got 3"),
        ({"model": 6}, AxisType.Auto, "model must be a divisor of 256, got 6"),
        ({"x": 2}, AxisType.Explicit, r'must have axes "data" and "model" .* \(.x.,\)'),
    ],
)
def test_meshes_that_do_not_do(sizes, axis_type, message):
    x, _, _ = examples()
    count = math.prod(sizes.values())
    mesh = jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(axis_type,) * len(sizes),
        devices=jax.devices()[:count],
    )
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        fit(*build(), x)


def test_what_a_mesh_refuses():
    x, _, _ = examples()
    with on((2, 4)):
        model, optimizer = build()
        with pytest.raises(ValueError, match="batch_size=100 must be a multiple of 64"):
            fit(model, optimizer, x, batch_size=100)
    model, optimizer = build()
    with (
        on((2, 4)),
        pytest.raises(ValueError, match="'first.kernel' is not divided over the mesh"),
    ):
        fit(model, optimizer, x)
