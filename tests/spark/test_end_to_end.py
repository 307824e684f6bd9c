"""From a raw log in an object store to metrics on Spark, also when parts of the cluster are
killed.
"""

import os
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import scipy.sparse
from run_folders import parameters
from spark_processes import killing, processes_below

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.spark import preparation

pytest.importorskip("pyspark")
# Spark starts Java by a fork.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

K, PARTS, ENTRIES = 5, 6, 4000
# Long enough for a checkpoint to be copied before the end: copies are made each two
# seconds, and a checkpoint that is replaced meanwhile is not finished.
OPTIONS = ["--hidden", "4", "--linear", "None", "--batch-size", "64", "--epochs", "300"]
OPTIONS += ["--optimizer", "sgd", "--checkpoint-seconds", "1"]  # compiles fastest


@pytest.fixture(scope="module")
def store(bucket) -> pa.fs.FileSystem:
    return pa.fs.FileSystem.from_uri("".join(bucket))[0]


@pytest.fixture(scope="module")
def shop(session, bucket, store) -> str:
    """The address of a folder that Spark prepared from a log in the store."""
    rng = np.random.default_rng(0)
    log = pa.table(
        {
            "user": rng.integers(0, 300, 6000),
            "item": rng.integers(0, 40, 6000) ** 2 // 40,
        }
    )
    pq.write_table(log, "shop/log.parquet", filesystem=store)
    # Spark itself would read from the store with jars that pyspark lacks.
    frame = session.createDataFrame(pq.read_table("shop/log.parquet", filesystem=store))
    address = "/prepared".join(bucket)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "TASK_ENTRIES", ENTRIES // PARTS)
        sj.spark.prepare(frame, address, split_fraction=0.8)
    return address


@pytest.fixture(scope="module")
def trained(session, shop, tmp_path_factory) -> pathlib.Path:
    """The run that two tasks trained together, in one folder."""
    run = tmp_path_factory.mktemp("trained") / "run"
    sj.spark.train(session, shop, run, processes=2, options=OPTIONS)
    return run


@pytest.fixture(scope="module")
def predictor(trained, bucket, store, symbolic_sizes, tmp_path_factory) -> str:
    """The address of the predictor of `trained`."""
    file = tmp_path_factory.mktemp("predictor") / "model"
    assert main(["export", str(trained), str(file), "--k", str(K)]) == 0
    with store.open_output_stream("shop/model.predictor") as stream:
        stream.write(file.read_bytes())
    return "/model.predictor".join(bucket)


def names_in(store: pa.fs.FileSystem, folder: str) -> list[str]:
    selector = pa.fs.FileSelector(folder, allow_not_found=True)
    return sorted(info.base_name for info in store.get_file_info(selector))


def test_predicts_as_one_process_does_though_an_executor_dies(
    session, shop, trained, predictor, bucket, store, tmp_path
):
    out = "/recommendations".join(bucket)

    def predict(**more) -> int:
        return sj.spark.predict(session, predictor, shop, out, k=K, parts=PARTS, **more)

    def some_parts() -> bool:
        return bool(names_in(store, "shop/recommendations"))

    with killing("executor", some_parts):
        predict()
    assert predict() == 0  # all were there
    names = names_in(store, "shop/recommendations")
    assert len(names) == PARTS + 1 and names[0] == "_manifest.json"
    with pytest.raises(ValueError, match="has parts of another prediction"):
        predict(exclude_seen=False)

    # In one process the model and the metrics are the same.
    run = tmp_path / "run"
    assert main(["train", shop, "--run", str(run), *OPTIONS]) == 0
    train, test = sj.read(shop), sj.read(shop.replace("prepared", "prepared/test"))
    model, _ = sj.load_model(run)
    expected = sj.evaluate(model, train, test, k=K)
    two, _ = sj.load_model(trained)
    assert sj.evaluate(two, train, test, k=K) == pytest.approx(expected, rel=1e-4)
    table = pq.read_table("shop/recommendations", filesystem=store)
    assert sorted(table["row"].to_pylist()) == sorted(train.row_names.tolist())
    found = dict(zip(table["row"].to_pylist(), table["items"].to_pylist(), strict=True))
    held = {
        name: test.feature_names[test.matrix.indices[start:end]]
        for name, start, end in zip(
            test.row_names, test.matrix.indptr, test.matrix.indptr[1:], strict=False
        )
    }
    recalls = [len({*found[n]} & {*held[n]}) / len(held[n]) for n in held]
    assert np.mean(recalls) == pytest.approx(expected[f"recall@{K}"], rel=1e-4)


def test_training_goes_on_after_a_process_was_killed(
    session, shop, trained, bucket, store, tmp_path
):
    run = "/run".join(bucket)

    def one_checkpoint() -> bool:
        return any(n.endswith(".json") for n in names_in(store, "shop/run/checkpoints"))

    with (
        pytest.warns(UserWarning, match=r"submitted again \(1 of 3\): process . was"),
        killing("child", one_checkpoint),
    ):
        sj.spark.train(session, shop, run, processes=2, options=OPTIONS)
    assert not processes_below(os.getpid(), "child")
    sj.spark.fetch_run(run, tmp_path / "run")
    assert parameters(tmp_path / "run") == parameters(trained)


def test_what_train_refuses_is_not_repeated(session, shop, tmp_path):
    def train(*options: str) -> None:
        sj.spark.train(session, shop, tmp_path / "run", processes=1, options=[*options])

    with pytest.raises(ValueError, match=r"--optimizer|unknown optimizer|no rule"):
        train("--optimizer", "none")
    with pytest.raises(ValueError, match="leave out --run"):
        train("--run=elsewhere")
    with pytest.raises(sj.spark.JobError, match="requires more slots than"):
        sj.spark.train(session, shop, tmp_path / "run", processes=3)
    assert not (tmp_path / "run").exists()


def test_recommends_to_the_rows_of_a_frame(session, predictor, trained):
    model, names = sj.load_model(trained)
    known = [*names[:2].tolist(), "unknown"]
    rows = [("ann", known, 1.5), ("bob", None, 2.5), ("eve", [], 3.5)]
    frame = session.createDataFrame(rows, "user string, seen array<string>, age double")
    found = sj.spark.recommend(frame, predictor, k=3, items="seen")
    assert found.columns == ["user", "age", "items", "scores"]
    collected = found.orderBy("user").collect()
    matrix = np.zeros((3, len(names)), np.float32)
    matrix[0, :2] = 1
    seen = sj.CSR.from_scipy(scipy.sparse.csr_array(matrix))
    expected = sj.recommend(model, seen, 3, exclude=seen)
    assert [row["items"] for row in collected] == expected.names(names)
    assert [row["age"] for row in collected] == [1.5, 2.5, 3.5]
    np.testing.assert_allclose(
        [row["scores"] for row in collected], expected.scores, rtol=1e-5
    )
    dated = frame.selectExpr("timestamp'2026-01-02' AS since", "seen AS items")
    assert sj.spark.recommend(dated, predictor).dtypes[0] == ("since", "timestamp")
    wrong = [
        ("user, seen[0] AS items", "items has the type string"),
        ("user, age", "no column items"),
        ("user, seen AS items, age AS scores", "two columns scores"),
        ("make_ym_interval(1) AS since, seen AS items", "since has the type interval"),
    ]
    for expressions, message in wrong:
        with pytest.raises(ValueError, match=message):
            sj.spark.recommend(frame.selectExpr(*expressions.split(", ")), predictor)


def test_recommends_new_items_by_their_content(session, symbolic_sizes, tmp_path):
    """Those that the run knew of, and those that a predictor was given later."""
    shop = {f"u{u}": [f"i{i}" for i in range(u % 2, 12, 2)] for u in range(12)}
    pairs = [{"user": u, "item": i} for u, items in shop.items() for i in items]
    events = pa.Table.from_pylist(pairs)
    content = [{"item": f"i{i}", "kind": f"k{i % 2}"} for i in range(14)]
    features = sj.read_item_features(content)
    data = sj.read(events, indicator=True)
    data = data.align_features(features.names_after(data))
    known = features.align(data)
    config = sj.NetworkConfig.autoencoder((4,))
    rule = sj.optimizers.adam(0.05)
    model, optimizer = sj.build(config, data, rule, item_features=known)
    sj.fit(model, optimizer, data, num_epochs=20, batch_size=12)
    file, longer = tmp_path / "predictor", tmp_path / "longer"
    sj.export_predictor(model, file, names=data, k=14, item_features=known)
    later = sj.read_item_features([{"item": "i14", "kind": "k0"}])
    sj.load_predictor(file).add_items(later).save(longer)
    seen = [["i0", "i2"], ["i1"], ["i12", "i4"]]
    rows = [(f"u{i}", items) for i, items in enumerate(seen)]
    frame = session.createDataFrame(rows, "user string, items array<string>")
    for path, new in ((file, {"i12", "i13"}), (longer, {"i12", "i13", "i14"})):
        collected = sj.spark.recommend(frame, path).orderBy("user").collect()
        here = sj.load_predictor(path)
        found = [row["items"] for row in collected]
        assert found == [here.recommend_names(items) for items in seen]
        assert new <= {*found[1]}
