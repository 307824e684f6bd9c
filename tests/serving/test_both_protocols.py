"""Equal requests over HTTP and gRPC are answered as the predictor answers, for each kind."""

import contextlib
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from flax import nnx
from open_inference.grpc import protocol as messages
from open_inference.grpc import service as stubs
from served import NAMES, Client, listening, over_grpc, prefixed, tensor

import sparsejax as sj
from sparsejax.serving.engine import Shape
from sparsejax.serving.service import Service, Settings

FIELDS = {
    "BYTES": "bytes_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "INT32": "int_contents",
}
NUMBERS = {"FP32": np.float32, "FP64": np.float64, "INT32": np.int32}
SOLD_OUT = "item 0"
SEEN = {"ann": ["item 2", "item 7"], "bob": ["item 4"]}  # of `users`, of items
PLAYED = {"ann": (["item 3", "item 1"], [5.0, 6.0])}  # of histories
Asked = tuple[Client, stubs.GRPCInferenceServiceStub, sj.Predictor]


@pytest.fixture(scope="module")
def asked(file, kinds, tmp_path_factory) -> Iterator[dict[str, Asked]]:
    """For each kind, the clients of its service on both ports, and its predictor."""
    folder: pathlib.Path = tmp_path_factory.mktemp("both")
    (folder / "sold-out.txt").write_text(f"{SOLD_OUT}\n")
    had = np.array([[name in row for name in NAMES] for row in SEEN.values()])
    sj.SparseDataset.from_scipy(
        scipy.sparse.csr_array(had), row_names=[*SEEN], feature_names=NAMES
    ).save(folder / "items.parquet")
    names = np.array([f"item {n}" for n in range(9)], np.dtypes.StringDType())
    ann = np.array(["ann"], np.dtypes.StringDType())
    ids, times = np.array([3, 1], np.int32), np.array([5, 6])
    sj.SequenceDataset(np.array([0, 2]), ids, ann, names, times=times).save(
        folder / "histories.parquet"
    )
    of = {
        "items": Settings(
            shapes=(Shape(4, 256),),
            similar=True,
            histories=str(folder / "items.parquet"),
            exclude_file=str(folder / "sold-out.txt"),
        ),
        "histories": Settings(
            shapes=(Shape(1, 256),), histories=str(folder / "histories.parquet")
        ),
        "clicks": Settings(shapes=(Shape(1, 4),)),
    }
    with contextlib.ExitStack() as stack:
        found = {}
        for kind, settings in of.items():
            service = stack.enter_context(
                contextlib.closing(Service("films", settings))
            )
            path = file if kind == "items" else kinds / kind
            service.load(path)
            client = Client(stack.enter_context(listening(service)))
            channel = stack.enter_context(over_grpc(service))
            stub = stubs.GRPCInferenceServiceStub(channel)
            found[kind] = client, stub, sj.load_predictor(path)
        yield found


def flat(data: list) -> list:
    return [*itertools.chain(*data)] if data and isinstance(data[0], list) else data


def message(inputs, model: str, parameters: dict, *, raw: bool):
    """The request as a gRPC message: its data as raw bytes, or in typed fields."""
    kinds = {bool: "bool_param", int: "int64_param"}
    request = messages.ModelInferRequest(
        model_name=model,
        parameters={
            name: messages.InferParameter(**{kinds[type(each)]: each})
            for name, each in parameters.items()
        },
    )
    for given in inputs:
        kind, data = given["datatype"], flat(given["data"])
        facts = {"name": given["name"], "datatype": kind, "shape": given["shape"]}
        if kind == "BYTES":
            data = [name.encode() for name in data]
        if raw:
            as_bytes = kind == "BYTES" and prefixed(*data)
            as_bytes = as_bytes or np.array(data, NUMBERS.get(kind)).tobytes()
            request.raw_input_contents.append(as_bytes)
        else:
            facts["contents"] = {FIELDS[kind]: data}
        request.inputs.append(messages.ModelInferRequest.InferInputTensor(**facts))
    return request


def outputs(answer) -> dict[str, dict]:
    """The outputs of a gRPC message in the form of those in JSON."""
    raw: list[bytes] = [*answer.raw_output_contents]
    found = {}
    for number, output in enumerate(answer.outputs):
        kind = output.datatype
        data: list[Any]
        if kind == "BYTES":
            names = [*output.contents.bytes_contents]
            rest = raw[number] if raw else b""
            while rest:
                end = 4 + int.from_bytes(rest[:4], "little")
                names.append(rest[4:end])
                rest = rest[end:]
            data = [name.decode() for name in names]
        elif raw:
            data = np.frombuffer(raw[number], NUMBERS[kind]).tolist()
        else:
            data = [*getattr(output.contents, FIELDS[kind])]
        found[output.name] = {
            "name": output.name,
            "datatype": kind,
            "shape": [*output.shape],
            "data": data,
        }
    return found


def compared(asked: Asked, inputs, parameters=None, *, model: str = "films") -> dict:
    """Sends a request over HTTP and, twice, over gRPC; returns the answer, which must be equal."""
    (client, stub, _), parameters = asked, parameters or {}
    status, expected = client.infer(*inputs, model=model, parameters=parameters)
    assert status == 200, expected
    for each in expected.values():
        if each["datatype"] == "FP32":
            each["data"] = np.array(each["data"], np.float32).tolist()
    for raw in (False, True):
        answer = stub.ModelInfer(message(inputs, model, parameters, raw=raw))
        assert outputs(answer) == expected
    return expected


def csr(rows: list[list[str]], values: list[float] | None = None) -> sj.CSR:
    """Four rows, the size of the served program."""
    pairs = [
        sorted((NAMES.index(name), n) for n, name in enumerate(row)) for row in rows
    ]
    ids = [i for row in pairs for i, _ in row]
    indptr = np.cumsum([0, *map(len, rows), *[0] * (4 - len(rows))])
    data = None
    if values is not None:
        data = np.array([values[n] for _, n in pairs[0]], np.float32)
    return sj.CSR(data, np.array(ids, np.int32), indptr, num_cols=9)


def text(name: str, data: list, shape: list[int] | None = None) -> dict:
    return tensor(name, "BYTES", data, shape)


def lengths(*counts: int, of: str = "lengths") -> dict:
    return tensor(of, "INT32", [*counts])


ONE = text("items", ["item 3", "unheard", "jalapeño"])
TWO = text("items", ["item 3", "jalapeño", "item 1"]), lengths(2, 1)
ROWS = [["item 3", "jalapeño"], ["item 1"]]
PADDED = text("items", [["item 3", "jalapeño"], ["item 1", ""]], [2, 2])
USERS = text("users", ["bob", "ann", "nobody"])
# Inputs, parameters, the rows that they are, and what each is not recommended.
ITEMS = {
    "one row": ([ONE], {}, ROWS[:1], ROWS[:1]),
    "lengths": (TWO, {}, ROWS, ROWS),
    "padded": ([PADDED], {}, ROWS, ROWS),
    "k": (TWO, {"k": 2}, ROWS, ROWS),
    "what was seen": (TWO, {"exclude_seen": False}, ROWS, [[], []]),
    "values": ([ONE, tensor("values", "FP32", [2.5, 1, 0.5])], {}, ROWS[:1], ROWS[:1]),
    "exclude": (
        [
            *TWO,
            text("exclude", ["item 5", "what"]),
            lengths(0, 2, of="exclude_lengths"),
        ],
        {},
        ROWS,
        [ROWS[0], ["item 1", "item 5"]],
    ),
    "users": (
        [USERS],
        {},
        [SEEN["bob"], SEEN["ann"], []],
        [SEEN["bob"], SEEN["ann"], []],
    ),
    "users and items": (
        [USERS, text("items", ["item 1", "item 3"]), lengths(1, 0, 1)],
        {},
        [["item 4", "item 1"], SEEN["ann"], ["item 3"]],
        [["item 4", "item 1"], SEEN["ann"], ["item 3"]],
    ),
}


def check_best(found: dict, names: list[list[str]], scores: np.ndarray) -> None:
    """Checks that each row has these items, and bitwise these scores."""
    padded = len(found["items"]["shape"]) == 2
    counts = found["lengths"]["data"]
    assert counts == [*map(len, names)]
    got, points = found["items"]["data"], found["scores"]["data"]
    start = 0
    for number, (row, count) in enumerate(zip(names, counts, strict=True)):
        if padded:
            start = number * found["items"]["shape"][1]
        assert got[start : start + count] == row
        np.testing.assert_array_equal(
            np.float32(points[start : start + count]), scores[number, :count]
        )
        start += count
    assert padded or start == len(got) == len(points)


@pytest.mark.parametrize("case", ITEMS)
def test_items(asked, case):
    inputs, parameters, rows, without = ITEMS[case]
    found = compared(asked["items"], inputs, parameters)
    predictor, k = asked["items"][2], parameters.get("k")
    values = [2.5, 0.5] if case == "values" else None
    best = predictor.recommend(
        csr(rows, values), k=k, exclude=csr(without), exclude_items=[SOLD_OUT]
    )
    names = predictor.names(best)[: len(rows)]
    assert SOLD_OUT not in [*itertools.chain(*names)]
    check_best(found, names, best.scores)


def test_candidates(asked):
    """Their scores may have other last bits than those of all items."""
    some = ["item 0", "item 2", "item 5"], ["item 1", "item 6"]
    candidates = text("candidates", [*some[0], *some[1]])
    inputs = [*TWO, candidates, lengths(3, 2, of="candidates_lengths")]
    found = compared(asked["items"], inputs)
    predictor, names, scores = asked["items"][2], [], []
    for row, only in zip(ROWS, some, strict=True):
        best = predictor.recommend(
            csr([row]), exclude=csr([row]), exclude_items=[SOLD_OUT], only_items=only
        )
        names += (listed := predictor.names(best)[0])
        scores += best.scores[0, : len(listed)].tolist()
    assert found["items"]["data"] == names and found["lengths"]["data"] == [2, 1]
    np.testing.assert_allclose(found["scores"]["data"], scores, rtol=1e-5)


def test_similar(asked):
    rows = ["item 3", "jalapeño"]
    items = text("items", [rows[0], "unheard", rows[1]])
    found = compared(asked["items"], [items], {"k": 4}, model="similar")
    assert found["lengths"]["data"] == [4, 0, 4]
    assert found["unknown"]["data"] == [0, 1, 0]
    config = sj.NetworkConfig.autoencoder((4,))  # the model of the file
    model = sj.FeedForward(config, inputs=9, outputs=9, rngs=nnx.Rngs(0))
    best = sj.similar_items(model, rows, 8, names=NAMES)
    names, scores = [], []
    for row, cosines in zip(best.names(NAMES), best.scores, strict=True):
        left = [n for n, name in enumerate(row) if name != SOLD_OUT][:4]
        names += [row[n] for n in left]
        scores += cosines[left].tolist()
    assert found["items"]["data"] == names
    np.testing.assert_allclose(found["scores"]["data"], scores, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["times", "two rows", "padded", "users", "candidates"])
def test_histories_with_times(asked, case):
    history, times = ["item 3", "item 1", "item 5"], [1.0, 2.0, 4.5]
    inputs, rows, moments = [text("items", history)], [history], [times]
    clock = tensor("times", "FP64", times)
    only = None
    if case == "two rows":
        rows, moments = [history[:2], history[2:]], [times[:2], times[2:]]
        inputs.append(lengths(2, 1))
    elif case == "padded":
        rows, moments = [history[:2], history[2:]], [times[:2], times[2:]]
        inputs = [text("items", [history[:2], ["item 5", ""]], [2, 2])]
        clock = tensor("times", "FP64", [times[:2], [4.5, 0.0]], [2, 2])
    elif case == "users":
        before, when = PLAYED["ann"]
        inputs = [text("users", ["ann"]), text("items", ["item 5"])]
        clock = tensor("times", "FP64", [9.5])
        rows, moments = [[*before, "item 5"]], [[*when, 9.5]]
    elif case == "candidates":
        only = ["item 0", "item 1", "item 8"]
        inputs.append(text("candidates", only))
    found = compared(asked["histories"], [*inputs, clock])
    predictor = asked["histories"][2]
    names, scores = [], []
    for row, moment in zip(rows, moments, strict=True):
        ids = np.array([int(name[-1]) for name in row], np.int32)
        users = np.array(["x"], np.dtypes.StringDType())
        data = sj.SequenceDataset(
            np.array([0, len(ids)]),
            ids,
            users,
            np.array([f"item {n}" for n in range(9)], np.dtypes.StringDType()),
            times=np.array(moment),
        )
        seen = sj.CSR(None, np.unique(ids), np.array([0, len({*row})]), num_cols=9)
        best = predictor.recommend(data, exclude=seen, only_items=only)
        names += predictor.names(best)
        scores.append(best.scores[0])
    if only is None:
        check_best(found, names, np.array(scores))
    else:
        assert found["items"]["data"] == names[0]
        count = len(names[0])
        np.testing.assert_allclose(
            found["scores"]["data"], scores[0][:count], rtol=1e-5
        )


@pytest.mark.parametrize("missing", [False, True])
def test_clicks(asked, missing):
    ages, cities, users = [1.0, 2.5], ["c3", "c1"], ["u2", "u1"]
    if missing:
        cities[1] = users[0] = ""
    inputs = [tensor("age", "FP32", ages), text("city", cities), text("user", users)]
    found = compared(asked["clicks"], inputs)["probabilities"]
    records = {"age": ages, "city": cities, "user": users}
    expected = asked["clicks"][2].predict_records(
        {name: [each or None for each in column] for name, column in records.items()}
    )
    np.testing.assert_array_equal(np.float32(found["data"]), np.float32(expected))


def test_candidates_of_a_model_of_clicks(asked):
    """What is known of the user is said once; the best candidates come first."""
    cities = ["c1", "nowhere", "c3", "c2", "c1"]
    inputs = [tensor("age", "FP32", [2.5]), text("city", cities), text("user", ["u2"])]
    records = {"age": [2.5] * 5, "city": cities, "user": ["u2"] * 5}
    expected = np.asarray(asked["clicks"][2].predict_records(records), np.float32)
    best = np.argsort(-expected, kind="stable")
    assert best.tolist() != [*range(5)] and expected[0] == expected[4]  # a tie
    for k in (1, 3, 5, 9):
        found = compared(asked["clicks"], inputs, {"k": k})
        assert found["rows"]["data"] == best[:k].tolist()
        given = np.float32(found["probabilities"]["data"])
        np.testing.assert_array_equal(given, expected[best[:k]])
    found = compared(asked["clicks"], inputs)
    assert found["rows"]["data"] == [*range(5)]
    np.testing.assert_array_equal(np.float32(found["probabilities"]["data"]), expected)
    inputs[1] = text("city", [["c3", "c1"]], [1, 2])  # a list of all rows
    ages = inputs[0] = tensor("age", "FP32", [1.0, 2.5])
    found = compared(asked["clicks"], inputs)["probabilities"]
    records = {"age": ages["data"], "city": [["c3", "c1"]] * 2, "user": ["u2"] * 2}
    expected = asked["clicks"][2].predict_records(records)
    np.testing.assert_array_equal(np.float32(found["data"]), np.float32(expected))
    inputs[1] = text("city", [])  # no rows
    inputs[0] = tensor("age", "FP32", [1.0])
    found = compared(asked["clicks"], inputs, {"k": 2})
    assert found["rows"]["data"] == found["probabilities"]["data"] == []


def test_errors_of_candidates_of_clicks(asked):
    client = asked["clicks"][0]
    inputs = [tensor("age", "FP32", [2.5]), text("city", ["c1", "c2"])]
    inputs.append(text("user", ["u2"]))
    for k in (0, -1, 1.0, True, "1"):
        status, error = client.infer(*inputs, parameters={"k": k})
        assert status == 422 and "k must be a whole number from 1" in error
    wanted = [{"name": "probabilities"}]
    status, error = client.infer(*inputs, parameters={"k": 1}, outputs=wanted)
    assert status == 422 and "ask for the output 'rows', too" in error
    status, found = client.infer(*inputs, outputs=wanted)
    assert status == 200 and found.keys() == {"probabilities"}
    inputs[2] = text("user", ["u2"] * 3)
    status, error = client.infer(*inputs)
    assert status == 422 and "[1] if all rows have the same" in error


def test_clicks_with_lists(asked):
    cities = text("city", [["c3", "c1"], ["c2", ""]], [2, 2])
    inputs = [tensor("age", "FP32", [1.0, 2.5]), cities, text("user", ["u2", "u1"])]
    found = compared(asked["clicks"], inputs)["probabilities"]
    records = {"age": [1.0, 2.5], "city": [["c3", "c1"], ["c2"]], "user": ["u2", "u1"]}
    expected = asked["clicks"][2].predict_records(records)
    np.testing.assert_array_equal(np.float32(found["data"]), np.float32(expected))
