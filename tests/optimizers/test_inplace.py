"""Arrays are overwritten in place unless another reference to them exists."""

import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx

from sparsejax import optimizers
from sparsejax.mesh import interrupts
from sparsejax.nn.layers import SparseLinear
from sparsejax.optimizers.inplace import HostCopy, overwrite, unshare, variables_of
from sparsejax.sparse import CSR


class Told(Exception):
    pass


def values(modules) -> list[np.ndarray]:
    return [
        np.asarray(
            jax.random.key_data(leaf) if "key" in str(leaf.dtype) else leaf
        ).copy()
        for leaf in jax.tree.leaves(nnx.state(modules))
    ]


def assert_equal(modules, expected) -> None:
    for found, array in zip(values(modules), expected, strict=True):
        np.testing.assert_array_equal(found, array)


def test_copies_keep_their_values():
    # Eight entries: the whole kernel is brought up to date, in place, in each step.
    x = CSR.from_scipy(scipy.sparse.csr_array(np.eye(8, dtype=np.float32)))
    layer = SparseLinear(8, 4, rngs=nnx.Rngs(0))
    optimizer = optimizers.Optimizer(layer, optimizers.adam(1e-2))

    def loss(layer):
        return jnp.mean((layer(x) - 1) ** 2)

    @nnx.jit
    def gradients_of(layer, optimizer):
        return optimizer.value_and_grad(loss)(layer)[1]

    def step():
        optimizer.update(layer, gradients_of(layer, optimizer))

    for change in (step, lambda: optimizer.flush(layer), step):
        copies = nnx.clone((layer, optimizer))
        held = layer.kernel[...]
        before = values(copies)
        change()
        assert_equal(copies, before)
        np.testing.assert_array_equal(held, copies[0].kernel[...])


def addresses(variables) -> list[int]:
    return [v.get_raw_value().unsafe_buffer_pointer() for v in variables]


def test_nothing_is_copied_that_nobody_holds():
    array = jnp.arange(8.0)
    one, two = nnx.Variable(array), nnx.Variable(jnp.ones(3))
    before = addresses([one, two])
    unshare([one, two])  # `array` is held here
    kept = addresses([one, two])
    assert one.get_raw_value() is not array
    assert kept[0] != before[0] and kept[1] == before[1]
    unshare([one, two])
    cycle: list[Any] = [one.get_raw_value()]
    cycle.append(cycle)
    del cycle  # garbage
    unshare([one, two])
    assert addresses([one, two]) == kept


def test_a_copy_may_go_where_its_array_may():
    """Otherwise programs would be compiled again for it."""
    anywhere, here = jnp.ones(3), jax.device_put(jnp.ones(3), jax.devices()[1])
    key, both = jax.random.key(0), [nnx.Variable(anywhere), nnx.Variable(here)]
    both.append(nnx.Variable(key))
    unshare(both)
    assert [v.get_raw_value().committed for v in both] == [False, True, False]
    assert both[1].get_raw_value().devices() == here.devices()
    assert both[2].get_raw_value() is not key


def test_two_variables_of_one_array():
    array = jnp.arange(8.0)
    both = [nnx.Variable(array), nnx.Variable(array)]
    del array
    add = jax.jit(lambda a, b: [a + 1, b + 2], donate_argnums=(0, 1))
    overwrite(both, lambda: (add(*(v.get_raw_value() for v in both)), None))
    np.testing.assert_array_equal(both[1][...] - both[0][...], np.ones(8))


def test_a_copy_in_the_hosts_memory():
    modules = nnx.Rngs(3), SparseLinear(5, 3, rngs=nnx.Rngs(0))
    before = values(modules)
    copy = HostCopy(variables_of(modules))
    modules[0]()
    modules[1].kernel.set_value(modules[1].kernel[...] + 1)
    assert not np.array_equal(values(modules)[-1], before[-1])
    copy.restore()
    assert_equal(modules, before)


def raising(number, frame):
    raise Told(number)


@pytest.fixture
def handlers():
    numbers = signal.SIGUSR1, signal.SIGUSR2
    before = {number: signal.signal(number, raising) for number in numbers}
    yield
    for number, handler in before.items():
        assert signal.signal(number, handler) is raising


def test_no_handler_comes_between_a_program_and_its_variables(handlers):
    variable = nnx.Variable(jnp.zeros(3))
    double = jax.jit(lambda a: a + 1, donate_argnums=0)

    def program():
        arrays = [double(variable.get_raw_value())]
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        return arrays, None

    with pytest.raises(Told) as error:
        overwrite([variable], program)
    assert error.value.__context__ is not None  # the other one's
    np.testing.assert_array_equal(variable[...], np.ones(3))


def test_an_error_comes_before_the_handlers(handlers):
    def program():
        signal.raise_signal(signal.SIGUSR1)
        raise ValueError("ours")

    with pytest.raises(Told) as error:
        overwrite([], program)
    assert str(error.value.__context__) == "ours"
    with interrupts.uninterrupted(), interrupts.uninterrupted():
        pass


def test_handlers_are_asked_for_without_the_wrapper():
    # It makes an enumeration of each, and a step asks for 64.
    with interrupts.uninterrupted():
        assert type(interrupts._getsignal(signal.SIGPIPE)) is int
    assert type(signal.getsignal(signal.SIGPIPE)) is not int
