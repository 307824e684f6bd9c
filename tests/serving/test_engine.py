"""An answer is bitwise that of `Predictor.recommend` for its shape, alone and in a shared
batch.
"""

from typing import cast

import jax
import numpy as np
import pytest
import scipy.special
from served import NAMES

import sparsejax as sj
from sparsejax.predictors.runtime import apart, in_one_array
from sparsejax.serving.engine import Engine, Shape, TooLargeError, shapes_of

SHAPE = Shape(4, 256)
HISTORIES = [["item 3", "item 1"], ["jalapeño"], [], ["item 0", "item 2", "item 5"]]


@pytest.fixture(scope="module")
def engine(predictor) -> Engine:
    return Engine(predictor, [SHAPE])


def rows(engine: Engine, *histories: list[str], **options) -> list:
    given, _ = engine.predictor.model.rows_of_names(histories, **options)
    return given


def outputs(engine: Engine, *requests) -> list[np.ndarray]:
    """The outputs for some requests, whose rows share a batch."""
    found = engine.run(SHAPE, engine.packed(SHAPE, requests))
    count = sum(engine.size_of(each).rows for each in requests)
    return [array[:count] for array in found]


def test_bits_are_those_of_recommend(engine, predictor):
    indptr = np.cumsum([0, *map(len, HISTORIES)])
    ids = [sorted(map(NAMES.index, names)) for names in HISTORIES]
    x = sj.CSR(None, np.concatenate(ids).astype(np.int32), indptr, num_cols=9)
    found = predictor.recommend(x, exclude=x)
    ids, scores = outputs(engine, *(rows(engine, names) for names in HISTORIES))
    np.testing.assert_array_equal(ids, found.ids)
    np.testing.assert_array_equal(scores, found.scores)


@pytest.mark.parametrize("place", range(4))
def test_bits_do_not_depend_on_company(engine, place):
    asked = rows(engine, HISTORIES[0], values=[[2.5, 0.1]], exclude=[["item 7"]])
    alone = outputs(engine, asked)
    company = [rows(engine, names) for names in HISTORIES[1:]]
    together = outputs(engine, *company[:place], asked, *company[place:])
    for one, all_rows in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one[0], all_rows[place])


def test_seen_and_excluded_items_are_not_recommended(engine):
    ids, _ = outputs(
        engine,
        rows(engine, ["item 3"], exclude=[["item 4", "never heard of"]]),
        rows(engine, ["item 3"], exclude_seen=False, exclude=[["item 4"]]),
        rows(engine, ["item 3"], exclude_seen=False),
    )
    assert not {3, 4} & {*ids[0]}
    assert 4 not in ids[1]
    _, scores = outputs(engine, rows(engine, ["item 3"], exclude_seen=False))
    assert scores[0][0] >= outputs(engine, rows(engine, ["item 3"]))[1][0][0]


def test_a_request_is_divided_as_recommend_divides_it(predictor):
    engine = Engine(predictor, [Shape(1, 4), SHAPE])
    parts = engine.pieces(rows(engine, *HISTORIES, *HISTORIES, ["item 1"]))
    assert [size.rows for size, _ in parts] == [4, 4, 1]
    again = [part[0] for _, part in parts]
    assert np.concatenate([cast(sj.CSR, each).indices for each in again]).tolist() == [
        1,
        3,
        8,
        0,
        2,
        5,
        1,
        3,
        8,
        0,
        2,
        5,
        1,
    ]


def test_long_rows_are_divided_until_they_fit(predictor):
    engine = Engine(predictor, [Shape(1, 3), Shape(4, 4)])
    parts = engine.pieces(rows(engine, *HISTORIES))
    assert [size.rows for size, _ in parts] == [2, 2]
    longer = [f"item {n}" for n in range(5)]
    with pytest.raises(TooLargeError, match="row 2 has 5 entries, more than the 4"):
        engine.pieces(rows(engine, [], [], longer))


def test_nothing_is_compiled_after_the_start(engine):
    with pytest.MonkeyPatch.context() as patch:
        compile_now = "jax._src.compiler.compile_or_get_cached"
        patch.setattr(compile_now, lambda *_, **__: pytest.fail("compiled"))
        outputs(engine, rows(engine, *HISTORIES))
        outputs(engine, rows(engine, HISTORIES[0], values=[[1.0, 2.0]]))
    with pytest.raises(TypeError, match=r"(?s)differ|shape"):
        small = Engine.packed(engine, Shape(4, 64), [rows(engine, *HISTORIES)])
        engine.run(SHAPE, small)


def answered(engine: Engine, given) -> list[np.ndarray]:
    """The outputs for each part of a request that is too large for one batch."""
    found = []
    for size, part in engine.pieces(given):
        shape = engine.shape_for(size)
        assert shape is not None
        found.append(engine.run(shape, engine.packed(shape, [part])))
    return [np.concatenate(each) for each in zip(*found, strict=True)]


def test_histories(kinds):
    engine = Engine(sj.load_predictor(kinds / "histories"), [Shape(1, 256)])
    names = [["item 3", "item 1", "unheard", "item 3"], ["item 8"]]
    times = [[1.0, 2.0, 3.0, 4.0], [0.0]]
    model = engine.predictor.model
    given, unknown = model.rows_of_names(names, times=times)
    ids, _ = answered(engine, given)
    expected = engine.predictor.recommend_names(names, times=times)
    assert [[f"item {n}" for n in row] for row in ids] == expected
    assert unknown.tolist() == [1, 0]
    with pytest.raises(ValueError, match="reads no values"):
        model.rows_of_names(names, times=times, values=times)
    with pytest.raises(ValueError, match="also reads times"):
        model.rows_of_names(names)


def test_clicks(kinds):
    predictor = sj.load_predictor(kinds / "clicks")
    records = {"age": [1.0, 2.5], "city": ["c3", "nowhere"], "user": ["u1", None]}
    engine = Engine(predictor)
    (logits,) = answered(engine, predictor.model.rows_of_records(records))
    expected = predictor.predict_records(records)
    np.testing.assert_array_equal(scipy.special.expit(logits), expected)


def test_values_fit_their_names(predictor):
    ask = predictor.model.rows_of_names
    (matrix, seen), _ = ask(
        [["jalapeño", "unheard", "item 2"]], values=[[1.5, 9.0, 2.5]]
    )
    assert (matrix.indices.tolist(), matrix.data.tolist()) == ([2, 8], [2.5, 1.5])
    assert seen.data is None
    for names, values in (
        (["item 1"], [1.0, 2.0]),
        (["item 1"], [np.inf]),
        (["item 1", "item 1"], [1.0, 2.0]),
    ):
        with pytest.raises(ValueError, match=r"finite value for each|comes twice"):
            ask([names], values=[values])


def test_shapes_are_those_of_programs(predictor):
    assert Shape.parse("8x512") == Shape(8, 512)
    for text in ("8", "x512", "0x5", "-1x5", "8x512x2", "8 x 512"):
        with pytest.raises(ValueError, match="rows x entries"):
            Shape.parse(text)
    with pytest.raises(ValueError, match="3x64.*programs of 1, 4 rows"):
        Engine(predictor, [Shape(3, 64)])


def test_the_largest_program_is_among_the_default_ones(predictor, monkeypatch):
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr("jax.default_backend", lambda backend=backend: backend)
        assert {shape.rows for shape in shapes_of(predictor)} == {1, 4}


def test_as_many_candidates_as_the_largest_shape_has_room_for(predictor):
    shapes = [Shape(1, 2), Shape(1, 3), Shape(4, 3), Shape(4, 8)]
    assert Engine(predictor, shapes, programs=predictor.model.programs.only).shapes == (
        *shapes[:2],
        shapes[3],
    )
    assert Engine(
        predictor, shapes[:3], programs=predictor.model.programs.only
    ).shapes == (*shapes[:2],)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_arrays_in_one_and_apart(dtype):
    """Also where not all have four bytes. What was compiled takes one form of them."""
    tree = [
        (np.arange(3, dtype=np.int32), np.array([0, 3], np.int32)),
        np.array([[0.5, -0.0, np.nan]], dtype),
    ]
    likes = jax.tree.leaves(tree)
    both = in_one_array(tree), jax.jit(in_one_array)(tree)
    for made in both:
        assert jax.tree.structure(made) == jax.tree.structure(in_one_array(likes))
        for given in (made, jax.device_get(made)):
            for found, like in zip(apart(given, likes), likes, strict=True):
                assert found.dtype == like.dtype
                np.testing.assert_array_equal(found, like)
