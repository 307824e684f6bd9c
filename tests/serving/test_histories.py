"""Requests that name users: their earlier items are read from a saved data set."""

import contextlib

import numpy as np
import pytest
import scipy.sparse
from served import NAMES, Client, listening, tensor

import sparsejax as sj
from sparsejax.serving.engine import Shape
from sparsejax.serving.histories import Histories
from sparsejax.serving.protocol import Asked, Limits, RefusedError, Tensor
from sparsejax.serving.questions import Lists, form_of
from sparsejax.serving.service import Service, Settings

# The data know an item that the model lacks, and other numbers of the others.
FEATURES = ["gone", *reversed(NAMES)]
USERS = ["ann", "bob", "new"]


def saved(folder, *, values: bool) -> str:
    rows = np.zeros((3, 10))
    rows[0, [0, 2, 9]] = 1, 2, 3  # gone, item 7 and item 0
    rows[1, 5] = 4  # item 4
    matrix = scipy.sparse.csr_array(rows if values else rows > 0)
    data = sj.SparseDataset.from_scipy(matrix, row_names=USERS, feature_names=FEATURES)
    data.save(folder / "before.parquet")
    return str(folder / "before.parquet")


def texts(name: str, data: list[str], shape=None) -> Tensor:
    return Tensor(name, "BYTES", (len(data),) if shape is None else shape, data)


def numbers(name: str, data: list[float], kind: str = "FP32") -> Tensor:
    return Tensor(name, kind, (len(data),), np.array(data, np.float64))


def seconds(times: np.ndarray) -> list[float]:
    return (times.astype(np.int64) / (1 if times.dtype.kind == "i" else 1e6)).tolist()


def asked(*tensors: Tensor) -> Asked:
    return Asked(None, {}, {each.name: each for each in tensors})


def test_answers_are_those_of_both(tmp_path, predictor, file):
    path = saved(tmp_path, values=False)
    service = Service("films", Settings(shapes=(Shape(4, 256),), histories=path))
    service.load(file)
    users = tensor("users", "BYTES", ["bob", "ann", "nobody"])
    with contextlib.closing(service), listening(service) as port:
        client = Client(port)
        alone = client.infer(users)[1]
        items = tensor("items", "BYTES", ["item 1", "what", "item 4"])
        lengths = tensor("lengths", "INT32", [2, 1, 0])
        both = client.infer(users, items, lengths)[1]
        padded = tensor("items", "BYTES", ["item 1", "", "item 4", "", "", ""], [3, 2])
        filled = client.infer(users, padded)[1]
        names = [each["name"] for each in client.get("/v2/models/films")[1]["inputs"]]
    assert "users" in names
    before = [["item 4"], ["item 0", "item 7"], []]
    expected = predictor.recommend_names(before)
    assert alone["items"]["data"] == [name for row in expected for name in row]
    assert alone["unknown"]["data"] == [0, 0, 0]
    assert alone["unknown_users"]["data"] == [0, 0, 1]
    now = [["item 4", "item 1"], ["item 0", "item 7", "item 4"], []]
    expected = predictor.recommend_names(now)
    assert both["items"]["data"] == [name for row in expected for name in row]
    assert both["unknown"]["data"] == [1, 0, 0]
    assert filled["items"]["data"] == both["items"]["data"]


def test_values_of_the_request_count(tmp_path, predictor):
    form = form_of(predictor, Histories(saved(tmp_path, values=True)))
    users, items = texts("users", ["ann"]), texts("items", ["item 0", "item 1"])
    row = sj.CSR.from_scipy(
        scipy.sparse.csr_array(np.array([[9.0, 1, 0, 0, 0, 0, 0, 2, 0]]))
    )
    for tensors, values in (
        ([users], [3, 2]),
        ([users, items], [1, 1, 2]),
        ([users, items, numbers("values", [9, 1])], row.data),
    ):
        found = form.question(asked(*tensors), Limits()).given[0]
        assert isinstance(found, sj.CSR)
        np.testing.assert_array_equal(found.data, values)
        assert len(tensors) == 1 or [*found.indices] == [*row.indices]


def test_the_order_is_that_of_time(tmp_path, kinds):
    predictor = sj.load_predictor(kinds / "histories")
    names = np.array([f"item {n}" for n in range(9)], np.dtypes.StringDType())
    rows = np.array(["ann", "bob"], np.dtypes.StringDType())
    items, path = np.array([3, 1, 3], np.int32), tmp_path / "before.parquet"
    for times in (
        np.array([5, 6, 7]),
        np.array(["2024-01-01", "2024-01-02", "2024-01-03"], "M8[us]"),
    ):
        data = sj.SequenceDataset(np.array([0, 3, 3]), items, rows, names, times=times)
        data.save(path)
        form = form_of(predictor, Histories(path))
        users = texts("users", ["ann", "bob"])
        question = form.question(asked(users), Limits())
        given, _ = predictor.model.rows_of_names(
            [["item 3", "item 1", "item 3"], []],
            times=[seconds(times), []],
        )
        for found, expected in zip(question.given[:-1], given[:-1], strict=True):
            np.testing.assert_array_equal(found, expected)
    new = texts("items", ["item 5"]), Tensor("lengths", "INT32", (2,), np.array([1, 0]))
    last = seconds(times)[-1]
    question = form.question(
        asked(users, *new, numbers("times", [last + 60], "FP64")), Limits()
    )
    assert np.asarray(question.given[0])[0].tolist() == [3, 1, 3, 5]
    with pytest.raises(RefusedError, match="times"):
        form.question(asked(users, *new), Limits())


def test_long_histories_are_cut(tmp_path, predictor, kinds):
    names = np.array([f"item {n}" for n in range(9)], np.dtypes.StringDType())
    items, path = np.array([0, 1, 2, 3, 2, 4, 1], np.int32), tmp_path / "long.parquet"
    users, times = np.array(["ann"], np.dtypes.StringDType()), np.arange(7)
    sj.SequenceDataset(np.array([0, 7]), items, users, names, times=times).save(path)
    ann, new = texts("users", ["ann"]), texts("items", ["item 7"])
    form = form_of(predictor, Histories(path), 4)
    given = form.question(asked(ann, new), Limits()).given
    for each in given:
        assert isinstance(each, sj.CSR) and each.indices.tolist() == [1, 2, 4, 7]
    # Its item that comes twice is no error beside values.
    given = form.question(asked(ann, new, numbers("values", [9])), Limits()).given[0]
    assert isinstance(given, sj.CSR) and given.indices.tolist() == [1, 2, 4, 7]
    assert given.data is not None and given.data.tolist() == [1, 1, 1, 9]
    excluded = form.question(asked(ann, texts("exclude", ["item 5"])), Limits()).given
    assert isinstance(excluded[-1], sj.CSR)
    assert excluded[-1].indices.tolist() == [1, 2, 4, 5]
    ordered = sj.load_predictor(kinds / "histories")
    for room, count in ((3, 3), (4, 6), (None, 7)):
        given = form_of(ordered, Histories(path), room).question(asked(ann), Limits())
        last = names[items[-count:]].tolist()
        expected, _ = ordered.model.rows_of_names([last], times=[times[-count:]])
        for found, wanted in zip(given.given[:-1], expected[:-1], strict=True):
            np.testing.assert_array_equal(found, wanted)
        seen, wanted = given.given[-1], expected[-1]
        assert isinstance(seen, sj.CSR) and isinstance(wanted, sj.CSR)
        assert seen.indices.tolist() == wanted.indices.tolist()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([texts("users", ["ann", "bob"]), texts("items", ["a"])], "must be .rows."),
        ([texts("users", ["ann"], (1, 1))], "must be .rows."),
        ([numbers("users", [1])], "must have datatype BYTES"),
        ([texts("users", ["ann"] * 1025)], "more than the 1024 allowed"),
        (
            [texts("users", ["ann"]), numbers("lengths", [1], "INT32")],
            "the input 'items' is missing",
        ),
    ],
)
def test_users_that_do_not_fit(tmp_path, predictor, tensors, message):
    form = Lists(predictor, Histories(saved(tmp_path, values=False)))
    with pytest.raises(RefusedError, match=message):
        form.question(asked(*tensors), Limits())


def test_histories_that_a_model_cannot_use(tmp_path, predictor, kinds):
    path = saved(tmp_path, values=False)
    with pytest.raises(RefusedError, match="unknown input 'users'"):
        Lists(predictor).question(asked(texts("users", ["ann"])), Limits())
    for kind, message in (
        ("histories", "rows have no order"),
        ("clicks", "a model of clicks reads no histories"),
    ):
        with pytest.raises(ValueError, match=message):
            form_of(sj.load_predictor(kinds / kind), Histories(path))
    names = np.array(["a"], np.dtypes.StringDType())
    sj.SequenceDataset(np.array([0, 1]), np.array([0], np.int32), names, names).save(
        tmp_path / "no times.parquet"
    )
    with pytest.raises(ValueError, match="have no times"):
        form_of(
            sj.load_predictor(kinds / "histories"),
            Histories(tmp_path / "no times.parquet"),
        )
    service = Service("films", Settings(histories=str(tmp_path / "none")))
    with contextlib.closing(service), pytest.raises(ValueError, match="none"):
        service.load(kinds / "items")
