"""Requests that name the items to rank are answered as a ranking of all items without the
others.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from served import NAMES, tensor

import sparsejax as sj
from sparsejax.predictors.ranking import NameLists
from sparsejax.predictors.runtime import _best_of_some, _Layer
from sparsejax.serving.engine import Engine, Shape
from sparsejax.sparse import CSR


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("with_others", [True, False])
def test_some_items_are_ranked(dtype, with_others):
    """In float64, row by row. Padding, ties, -inf, NaN and rows without candidates."""
    rng = np.random.default_rng(0)
    h, kernel = (
        jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((5, 16), (40, 16))
    )
    kernel = kernel.at[7].set(kernel[3])  # a tie
    bias, scale = (rng.standard_normal(40).astype(np.float32) for _ in range(2))
    bias[[3, 7]], scale[[3, 7]] = 0.25, 2.0
    bias[11] = -np.inf
    if not with_others:
        bias = scale = None
    many = sorted(rng.permutation(40)[:30].tolist())
    rows: list[list[int]] = [[3, 7, 9], [], [11], many, [0, 39]]
    ids = np.array([*itertools.chain(*rows), *[5] * 20], np.int32)
    indptr = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    bias_of, scale_of = (
        None if each is None else jnp.asarray(each) for each in (bias, scale)
    )
    layer = _Layer(kernel, bias_of, scale_of, None, None)
    only = CSR(None, jnp.asarray(ids), jnp.asarray(indptr), num_cols=40)
    best_of = jax.jit(lambda h, k: _best_of_some(h, layer, only, k), static_argnums=1)
    found, scores = map(np.asarray, best_of(h, 6))
    exact: np.ndarray = np.asarray(h, np.float64) @ np.asarray(kernel, np.float64).T
    if bias is not None and scale is not None:
        exact = exact * scale + bias
    for row, candidates in enumerate(rows):
        kept = [i for i in candidates if exact[row, i] > -np.inf]
        best = sorted(kept, key=lambda i: (-round(exact[row, i], 5), i))[:6]
        assert found[row].tolist() == best + [-1] * (6 - len(best))
        np.testing.assert_allclose(
            scores[row, : len(best)], exact[row, best], rtol=1e-5, atol=1e-5
        )
        assert (scores[row, len(best) :] == -np.inf).all()
    _, scores = best_of(h.at[3].set(jnp.nan), 2)
    assert np.isnan(np.asarray(scores)).any(axis=1).tolist() == [0, 0, 0, 1, 0]


def expected(predictor, history: list[str], candidates: list[str]):
    """The best of all items, after all items are removed that are not candidates."""
    unwanted = sorted({*NAMES} - {*candidates} | {*history})
    x, without = (
        CSR(None, np.array(ids, np.int32), np.array([0, len(ids)]), num_cols=9)
        for ids in (
            sorted(map(NAMES.index, history)),
            sorted(map(NAMES.index, unwanted)),
        )
    )
    found = predictor.recommend(x, exclude=without)
    return predictor.names(found)[0], found.scores[0]


def test_candidates_of_rows(client, predictor):
    items = tensor("items", "BYTES", ["item 3", "item 1", "jalapeño"])
    lengths = tensor("lengths", "INT32", [2, 0, 1])
    rows = [["item 3", "item 0", "item 7", "unheard"], [], NAMES]
    candidates = tensor("candidates", "BYTES", [*rows[0], *rows[1], *rows[2]])
    counts = tensor("candidates_lengths", "INT32", [*map(len, rows)])
    status, found = client.infer(items, lengths, candidates, counts)
    assert status == 200
    assert found["lengths"]["data"] == [2, 0, 5]
    assert found["unknown"]["data"] == [1, 0, 0]
    names, scores = found["items"]["data"], found["scores"]["data"]
    for history, some, part in (
        (["item 3", "item 1"], rows[0][:3], slice(0, 2)),
        (["jalapeño"], rows[2], slice(2, 7)),
    ):
        wanted = expected(predictor, history, some)
        assert names[part] == wanted[0]
        count = len(wanted[0])
        np.testing.assert_allclose(scores[part], wanted[1][:count], rtol=1e-5)


def test_unknown_exclusions_are_counted(client):
    items = tensor("items", "BYTES", ["item 3", "strange", "item 1"])
    lengths = tensor("lengths", "INT32", [2, 1])
    without = tensor("exclude", "BYTES", ["item 2", "gone", "sold", "sold"])
    counts = tensor("exclude_lengths", "INT32", [1, 3])
    _, found = client.infer(items, lengths, without, counts)
    assert found["unknown"]["data"] == [1, 3]
    some = tensor("candidates", "BYTES", ["item 5", "unheard"])
    each = tensor("candidates_lengths", "INT32", [1, 1])
    _, found = client.infer(items, lengths, without, counts, some, each)
    assert found["unknown"]["data"] == [1, 4]


def test_candidates_with_other_options(client):
    items = tensor("items", "BYTES", ["item 3"])
    some = tensor("candidates", "BYTES", ["item 3", "item 4", "item 5"])
    without = tensor("exclude", "BYTES", ["item 5"])
    _, found = client.infer(items, some, parameters={"exclude_seen": False, "k": 2})
    assert len(found["items"]["data"]) == 2
    _, found = client.infer(items, some, without, parameters={"exclude_seen": False})
    assert {*found["items"]["data"]} == {"item 3", "item 4"}
    _, found = client.infer(items, some, without)
    assert found["items"]["data"] == ["item 4"]
    _, found = client.infer(items, tensor("candidates", "BYTES", []))
    assert found["items"]["data"] == [] and found["lengths"]["data"] == [0]
    padded = tensor("items", "BYTES", ["item 3", ""], [2, 1])
    both = tensor("candidates", "BYTES", ["item 4", "", "item 5", "item 6"], [2, 2])
    _, found = client.infer(padded, both)
    assert found["lengths"]["data"] == [1, 2] and found["items"]["data"][:2] == [
        "item 4",
        "",
    ]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([tensor("candidates_lengths", "INT32", [1])], "needs the input 'candidates'"),
        (
            [
                tensor("candidates", "BYTES", ["item 1"]),
                tensor("candidates_lengths", "INT32", [1, 0]),
            ],
            "1 rows of items, but 2 of candidates",
        ),
        ([tensor("candidates", "FP32", [1.0])], "must have datatype BYTES"),
    ],
)
def test_candidates_that_are_none(client, inputs, message):
    status, error = client.infer(tensor("items", "BYTES", ["item 3"]), *inputs)
    assert status == 422 and message in error


def test_candidates_of_histories(kinds):
    predictor = sj.load_predictor(kinds / "histories")
    engine = Engine(predictor, [Shape(1, 256)], programs=predictor.model.programs.only)
    history, times = [["item 3", "item 1"]], [[1.0, 2.0]]
    some = NameLists.of([["item 0", "item 1", "item 8"]])
    given, _ = predictor.model.rows_of_names(history, times=times, only=some)
    (ids, *_), _ = engine.run(Shape(1, 256), engine.packed(Shape(1, 256), [given]))
    best = predictor.recommend_names(
        history, times=times, only_items=["item 0", "item 8"]
    )
    assert [f"item {n}" for n in ids if n >= 0] == best[0]
