"""Losses computed for some tokens at a time, compared with the losses of all tokens at once."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.optimizers import RowGradient
from sparsejax.sequence.turns import tokens_of_turn

ITEMS, LENGTH, ROWS = 60, 11, 200
ONE = jax.devices()[:1]
CONFIGS = {
    "sasrec": sj.SASRecConfig(max_length=LENGTH, width=8, blocks=1, dropout=0.3),
    "hstu": sj.HSTUConfig(max_length=LENGTH, width=8, blocks=1, dropout=0.3),
    "gru": sj.GRUConfig(max_length=LENGTH, width=8, blocks=1, dropout=0.3),
}
CASES = {
    "ragged": np.random.default_rng(0).integers(0, LENGTH + 2, ROWS),
    "full": np.full(ROWS, LENGTH + 1),
    "one": np.where(np.arange(ROWS) == 150, LENGTH + 1, np.arange(ROWS) % 2),
    "nothing": np.arange(ROWS) % 2,
}


def histories_of(lengths: np.ndarray) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    rows = rng.integers(0, ITEMS, (ROWS, LENGTH + 1))
    inside = np.arange(LENGTH + 1) < lengths[:, None]
    times = np.where(inside, rng.exponential(1e4, rows.shape).cumsum(axis=1), 0)
    rows = np.where(inside, rows, -1)
    return jnp.asarray(rows, jnp.int32), jnp.asarray(times, jnp.float32)


@functools.cache
def program(name: str, negatives: int | None, room: int | None):
    """Losses of two calls, and the gradients of the first."""
    config: Any = dataclasses.replace(CONFIGS[name], negatives=negatives)
    if negatives:
        config = dataclasses.replace(config, sampler="batch")
    model = sj.sequence.build_sequence_model(config, items=ITEMS, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)

    @jax.jit
    def answer(state, histories, times):
        model = nnx.merge(graph, state, copy=True)

        def loss(model):
            return model.loss(histories, times, max_targets=room)

        first, gradients = sj.value_and_grad(loss)(model)
        return [first, loss(model)], gradients

    return functools.partial(answer, state)


@pytest.mark.parametrize(
    ("name", "negatives"), [("sasrec", None), ("hstu", 7), ("gru", 7)]
)
def test_turns_are_as_all_at_once(name, negatives):
    def answer(room, given):
        losses, gradients = program(name, negatives, room)(*given)
        leaves = jax.tree.leaves(gradients, is_leaf=is_row_gradient)
        return losses, [g.todense() if is_row_gradient(g) else g for g in leaves]

    for case, lengths in CASES.items():
        given = histories_of(lengths)
        assert tokens_of_turn(given[0]) == 1024 < ROWS * LENGTH
        losses, gradients = answer(None, given)
        wanted, slopes = answer(ROWS * LENGTH, given)
        np.testing.assert_allclose(losses, wanted, rtol=1e-5, err_msg=case)
        assert (losses[0] != losses[1]) == (case != "nothing")
        assert len(gradients) == len(slopes)
        for a, b in zip(gradients, slopes, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6, err_msg=case)
        largest = max(float(jnp.abs(g).max()) for g in gradients)
        assert (largest > 1e-3) == (case != "nothing")
    histories, times = histories_of(CASES["ragged"])
    long = int(np.argmax(CASES["ragged"]))
    # An id of no item, and an item behind padding.
    for place, item in [(1, ITEMS), (0, -1)]:
        broken = histories.at[long, place].set(item)
        losses, _ = program(name, negatives, None)(broken, times)
        assert np.isnan(losses).all() or (name, item) == ("gru", -1)


def test_work_is_that_of_real_tokens():
    """Turns of a loop are counted when it runs, also on a mesh of one: none are for padding."""
    turns = []

    class Counted(sj.sequence.SASRec):
        def _of_tokens(self, tokens, vectors=None, events=None):
            jax.debug.callback(lambda: turns.append(len(tokens.ids)))
            return super()._of_tokens(tokens, vectors, events)

    config = dataclasses.replace(CONFIGS["sasrec"], dropout=0.0)
    model = Counted(config, items=ITEMS, rngs=nnx.Rngs(0))
    model.eval()
    loss = jax.jit(lambda histories: model.loss(histories))
    for on_mesh in False, True:
        mesh = contextlib.nullcontext()
        if on_mesh:
            mesh = jax.set_mesh(sj.make_mesh(devices=ONE))
        with mesh:
            for case, most in {"one": 1, "ragged": 2, "full": 3}.items():
                turns.clear()
                loss(histories_of(CASES[case])[0])
                jax.effects_barrier()
                assert turns == [1024] * most, case


def test_a_model_of_ones_own_takes_any_places():
    class LastItem(sj.sequence.SequenceModel):
        def __call__(self, histories, times=None):
            return self.output.kernel[...][jnp.maximum(histories, 0)]

    config = sj.SASRecConfig(max_length=LENGTH, width=4)
    model = LastItem(config, items=ITEMS, rngs=nnx.Rngs(0))
    histories, _ = histories_of(CASES["ragged"])
    histories = histories[:, ::-1]  # padding comes first
    room = ROWS * LENGTH
    found, wanted = (
        nnx.jit(
            nnx.value_and_grad(
                lambda model, room=room: model.loss(histories, max_targets=room)
            )
        )(model)
        for room in (None, room)
    )
    for a, b in zip(*(jax.tree.leaves(x) for x in (found, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def is_row_gradient(g: Any) -> bool:
    return isinstance(g, RowGradient)


@functools.cache
def last_program(name: str):
    """The vectors of the last positions, from all positions and from turns, each with
    gradients.
    """
    model = sj.sequence.build_sequence_model(
        CONFIGS[name], items=ITEMS, rngs=nnx.Rngs(0)
    )
    model.eval()
    graph, state = nnx.split(model)
    slopes = jax.random.normal(jax.random.key(0), (ROWS, model.config.width))

    @jax.jit
    def both(state, histories, times):
        def loss(model, of):
            h = of(model, histories, times)
            return jnp.sum(jnp.nan_to_num(h) * slopes), h

        model = nnx.merge(graph, state)
        of_all = functools.partial(loss, of=sj.sequence.SequenceModel.last)
        of_turns = functools.partial(loss, of=type(model).last)
        return [nnx.grad(each, has_aux=True)(model) for each in (of_all, of_turns)]

    return functools.partial(both, state)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["sasrec", "hstu"])
def test_the_last_vectors_are_those_of_all_places(name, case):
    histories, times = (
        x[:, :-1] for x in histories_of(np.minimum(CASES[case], LENGTH))
    )
    size = tokens_of_turn(histories)
    assert size is not None and size < histories.size
    if case == "ragged":
        histories = histories.at[7, 0].set(ITEMS)  # no item: NaN
    (slopes, want), (own, got) = last_program(name)(histories, times)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert np.isnan(got).any() == (case == "ragged")
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(slopes), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
