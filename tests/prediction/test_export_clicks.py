"""Predictors of clicks: files that score as their model did."""

import json
import pathlib
import subprocess
import sys
import typing
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.predictors import files as predictor_files
from sparsejax.predictors import names as predictor_names
from sparsejax.predictors.signature import Signature

pytestmark = pytest.mark.usefixtures("symbolic_sizes")

ROWS, BATCH = 1200, 8
SCHEMA = sj.ClickSchema(
    "click",
    dense={
        "age": sj.data.DenseColumn(missing=0.0),
        "price": sj.data.DenseColumn(log1p=True),
    },
    ids={
        "user": sj.data.HashedColumn(500),
        "item": sj.data.VocabularyColumn(min_count=2),
        "seen": sj.data.VocabularyColumn(),
        "tags": sj.data.VocabularyColumn(),
    },
)

# What answers in another process, where a good deal is forbidden.
ANSWER = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("flax", "optax", "orbax") or name in (
            "sparsejax.nn.layers", "sparsejax.embeddings.collection"
        ):
            raise ImportError(f"{name} is forbidden")

sys.meta_path.insert(0, Forbidden())
import numpy
import pyarrow.parquet
import sparsejax as sj

predictor = sj.load_predictor(sys.argv[1])
found = predictor.predict_records(pyarrow.parquet.read_table(sys.argv[2]))
numpy.save(sys.argv[3], found)
"""


def columns(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)

    def lists(count, most):
        return [
            [f"{kind}" for kind in rng.integers(0, count, rng.integers(0, most + 1))]
            for _ in range(rows)
        ]

    ages = rng.random(rows).tolist()
    ages[1] = None
    return {
        "age": ages,
        "price": rng.exponential(3, rows),
        "user": [f"user {u}" for u in rng.integers(0, 400, rows)],
        "item": [f"é{i}" for i in rng.zipf(1.5, rows) % 60],
        "seen": lists(40, 3),
        "tags": lists(15, 5),
    }


class Clicks(nnx.Module):
    """A click model with two collections, all placements, and lists that are summed or kept in
    order.
    """

    def __init__(self, num_ids, rngs):
        tables = {
            "user": sj.embeddings.TableConfig(num_ids["user"], 8, placement="rows"),
            "item": sj.embeddings.TableConfig(num_ids["item"], 8, placement="columns"),
            "seen": sj.embeddings.TableConfig(num_ids["seen"], 4, placement="columns"),
            "tags": sj.embeddings.TableConfig(num_ids["tags"], 4, placement="table"),
        }
        features = {
            "tags": sj.embeddings.FeatureConfig("tags", combiner="mean"),
            "user": "user",
            "seen": sj.embeddings.FeatureConfig("seen", combiner=None, length=3),
            "item": sj.embeddings.FeatureConfig("item", outside="drop"),
        }
        self.embeddings = sj.embeddings.EmbeddingCollection(tables, features, rngs=rngs)
        one = {name: sj.embeddings.TableConfig(n, 1) for name, n in num_ids.items()}
        self.linear = sj.embeddings.EmbeddingCollection(
            one, {n: n for n in num_ids}, rngs=rngs
        )
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.Linear(self.embeddings.num_outputs + 2, 1, rngs=rngs)

    def __call__(self, dense, ids):
        rows = self.embeddings.concat(ids)
        x = self.dropout(jnp.concatenate([dense, rows], axis=1))
        return self.layers(x)[:, 0] + self.linear.concat(ids).sum(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("clicks")
    labels = {"click": np.arange(ROWS) % 3 == 0}
    pq.write_table(pa.table(labels | columns()), folder / "train.parquet")
    return folder


@pytest.fixture(scope="module")
def train(folder) -> sj.ClickDataset:
    return sj.read_clicks(folder / "train.parquet", SCHEMA)


@pytest.fixture(scope="module")
def model(train) -> Clicks:
    """A model whose parameters are about 1, so that all of them matter."""
    model = Clicks(train.num_ids, nnx.Rngs(0))
    rng = np.random.default_rng(1)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        variable.set_value(
            jnp.asarray(rng.standard_normal(variable.shape), jnp.float32)
        )
    return model


@pytest.fixture(scope="module")
def expected(model, train) -> np.ndarray:
    """Probabilities by the model itself, computed for batches as large as the predictor's."""
    return sj.predict(model, train, batch_size=BATCH)


@pytest.fixture(scope="module")
def path(model, train, folder, symbolic_sizes) -> pathlib.Path:
    path = folder / "clicks.predictor"
    sj.export_predictor(model, path, names=train, batch_size=BATCH)
    return path


@pytest.fixture(scope="module")
def predictor(path) -> sj.Predictor:
    return sj.load_predictor(path)


def test_same_bits_in_another_process_without_flax(path, folder, train, expected):
    records = str(folder / "records.parquet")
    pq.write_table(pa.table(columns()), records)
    out = str(folder / "found.npy")
    answer = subprocess.run(
        [sys.executable, "-c", ANSWER, str(path), records, out],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    np.testing.assert_array_equal(np.load(out), expected)


@pytest.mark.parametrize("rows", [0, 1, 3, 70])
def test_any_number_of_examples(train, predictor, expected, rows):
    found = predictor.predict(train.rows(slice(0, rows)))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected[:rows], rtol=1e-5)


def test_records_as_in_training(model, train, predictor, folder):
    """Unknown, rare and missing values have the ids that read_clicks gives them."""
    new: dict[str, typing.Any] = columns(50, seed=3)
    new["user"][0], new["item"][1], new["item"][2] = None, "never seen", None
    new["tags"][3], new["age"][4] = None, None
    labels = {"click": np.zeros(50, int)}
    pq.write_table(pa.table(labels | new), folder / "new.parquet")
    known = sj.read_clicks(folder / "new.parquet", SCHEMA, features=train)
    assert np.asarray(known.ids["item"])[1:3].tolist() == [1, 0]
    found = predictor.predict_records(new)
    np.testing.assert_array_equal(found, predictor.predict(known))
    chunks = pa.concat_tables([pa.table(new).slice(0, 20), pa.table(new).slice(20)])
    np.testing.assert_array_equal(predictor.predict_records(chunks), found)


@pytest.mark.parametrize(("kind", "limit"), [("int8", 0.001), ("float8", 0.01)])
def test_tables_in_fewer_bits(model, train, expected, folder, kind, limit):
    path = folder / kind
    sj.export_predictor(model, path, names=train, table_dtype=kind, batch_size=BATCH)
    predictor = sj.load_predictor(path)
    found = predictor.predict(train)
    assert 0 < np.abs(found - expected).max() < 0.1
    clicks = (np.random.default_rng(2).random(ROWS) < expected).astype(np.float32)
    ours, theirs = (sj.metrics.auc(p, clicks) for p in (found, expected))
    assert theirs > 0.85
    assert abs(ours - theirs) < limit
    # Tables of one column would not become smaller.
    tables = [w for w in predictor.weights if w.ndim == 2 and len(w) >= 256]
    dtypes = {w.shape[1]: str(w.dtype) for w in tables}
    code = {"int8": "int8", "float8": "float8_e4m3fn"}[kind]
    assert dtypes == {1: "float32", 4: code, 8: code}


def test_a_model_on_a_mesh_gives_the_same_file(train, folder):
    def weights(devices):
        with jax.set_mesh(sj.make_mesh(model=devices)):
            model = Clicks(train.num_ids, nnx.Rngs(0))
            path = folder / f"mesh {devices}"
            sj.export_predictor(model, path, names=train, batch_size=1)
        return sj.load_predictor(path).weights

    for one, eight in zip(weights(1), weights(8), strict=True):
        np.testing.assert_array_equal(one, eight)


def test_requests_that_do_not_fit(train, predictor):
    dense, ids = train.dense[:4], dict(train.rows(slice(0, 4)).ids)
    zeros = np.zeros(4, np.int32)
    longer = np.zeros((4, 4), np.int32)
    weighted = sj.CSR.tree_unflatten(
        train.num_ids["tags"],
        (np.ones(4, np.float32), zeros, np.arange(5, dtype=np.int32), None),
    )
    for changed, message in (
        (
            {"user": np.array([0, 0, 500, 0], np.int32)},
            "'user', example 2: .* no id 500",
        ),
        ({"user": np.array([0, 0, 0, -2], np.int32)}, "example 3: there is no id -2"),
        ({"seen": longer}, "'seen', example 0: a list of more than 3 ids"),
        ({"tags": weighted}, "'tags' have weights"),
        ({"user": zeros[:3]}, "'user' has 3 examples, but dense has 4"),
        ({"user": zeros[:, None, None]}, "must be .n. or .n, m."),
        ({"other": zeros}, r"the ids have \['other'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            predictor.predict(dense, ids | changed)
    # Lists in any order, one behind the other.
    lists = sj.embeddings.WideIds.ragged([2, 0, 1, 1], [0, 3, 3, 4, 4])
    padded = np.array([[2, 0, 1], [-1] * 3, [1, -1, -1], [-1] * 3], np.int32)
    found = [predictor.predict(dense, ids | {"seen": seen}) for seen in (lists, padded)]
    np.testing.assert_array_equal(*found)
    # Dropped, as if it were not there.
    without = predictor.predict(dense, ids | {"item": np.full(4, -1, np.int32)})
    outside = np.full(4, 10**6, np.int32)
    with pytest.raises(ValueError, match="'item', example 0"):  # of `linear`
        predictor.predict(dense, ids | {"item": outside})
    assert without.shape == (4,)
    with pytest.raises(ValueError, match=r"dense must be \[n, 2\], got the shape"):
        predictor.predict(dense[:, :1], ids)
    with pytest.raises(TypeError, match="'user' must be arrays of int32"):
        predictor.predict(dense, ids | {"user": np.zeros(4, np.int64)})
    with pytest.raises(FloatingPointError, match="NaN for example 2"):
        predictor.predict(np.where(np.arange(4)[:, None] == 2, np.nan, dense), ids)
    with pytest.raises(TypeError, match="'item': expected a list of cells.*'tea'"):
        predictor.predict_records(columns(3) | {"item": "tea"})
    with pytest.raises(ValueError, match="the records lack the columns .'item'."):
        predictor.predict_records({n: c for n, c in columns(4).items() if n != "item"})
    with pytest.raises(ValueError, match="row 1: .*'price' is empty, null or NaN"):
        predictor.predict_records(columns(2) | {"price": [1.0, float("nan")]})
    wrong: typing.Any = [{"user": "a"}, 3]
    with pytest.raises(TypeError, match="records are dicts, .* got int among them"):
        predictor.predict_records(wrong)


def test_exports_that_do_not_fit(model, train, tmp_path):
    other = sj.clicks.WideDeep(
        sj.WideDeepConfig(), num_dense=1, features={"user": 9}, rngs=nnx.Rngs(0)
    )
    config = sj.NetworkConfig.autoencoder((4,))
    items = sj.FeedForward(config, inputs=9, outputs=9, rngs=nnx.Rngs(0))
    config = sj.SASRecConfig(max_length=2, width=2, blocks=1, heads=1)
    histories = sj.sequence.build_sequence_model(config, items=3, rngs=nnx.Rngs(0))
    out = tmp_path / "p"
    cases: list[tuple[typing.Any, dict[str, typing.Any], str]] = [
        (
            other,
            {"names": train},
            "the model has num_dense=1, but the data have 2",
        ),
        (model, {}, "has no attribute num_dense"),
        (model, {"names": train, "table_dtype": "int4"}, "table_dtype is one of"),
        (items, {"table_dtype": "int8"}, "table_dtype is of no use for a model of it"),
        (
            histories,
            {"table_dtype": "int8"},
            "table_dtype is of no use for a model of his",
        ),
    ]
    for given, options, message in cases:
        with pytest.raises(ValueError, match=message):
            sj.export_predictor(given, out, **options)
    with pytest.raises(TypeError, match="names of a click model are the clicks"):
        sj.export_predictor(model, out, names=["a"])
    assert not list(tmp_path.iterdir())


def test_settings_that_are_not_ours(path):
    with zipfile.ZipFile(path) as parts:
        good = json.loads(parts.read("predictor.json"))
        counts = predictor_names.counts(parts, 2**20)
        names = predictor_names.read(parts, counts, 2**20)

    def read(document):
        return predictor_files.model_of(Signature.from_json(document), names)

    stack, *others = good["stacks"]
    feature, *rest = stack["features"]
    read(good)
    dense, *tables = good["inputs"]
    for changed in (
        *({"version": 2}, {"stacks": []}, {"schema": {}}, {"kind": "items"}),
        *({"inputs": []}, {"inputs": tables}, {"inputs": [dense]}, {"outputs": []}),
        {"inputs": [dense | {"shape": [3]}, *tables]},
        {"inputs": [dense | {"shape": [1, 1]}, *tables]},
        {"inputs": [dense | {"sparse": True}, *tables]},
        {"stacks": [{"bags": 1, "features": []}]},
        {"stacks": [stack | {"bags": stack["bags"] + 1}, *others]},
        *(
            {"stacks": [stack | {"features": [feature | f, *rest]}, *others]}
            for f in (
                {"bag": 100},
                {"bag": -1},
                {"length": 100},
                {"drop": 0},
                {"num_ids": 0},
                {"num_ids": 2**31},
                {"name": 1},
                {"name": "other"},
            )
        ),
    ):
        with pytest.raises(ValueError):
            read(good | changed)
