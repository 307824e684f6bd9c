"""Predictors that are printed, pickled, forked, and replaced by others."""

import copy
import gc
import multiprocessing
import os
import pickle
import sys
import types
import warnings
import weakref

import numpy as np
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax.predictors import archive, parts, workers
from sparsejax.predictors import files as predictor_files
from sparsejax.predictors.files import Kept, predictor_identity
from sparsejax.spark import scoring

pytestmark = pytest.mark.usefixtures("symbolic_sizes")

ITEMS = 500
CATEGORIES = [f"{n:05}" for n in range(3000)]
ROWS = scipy.sparse.csr_array(np.eye(3, ITEMS, dtype=np.float32))


def export(path, seed=0):
    config = sj.NetworkConfig.autoencoder((4,))
    sizes = {"inputs": ITEMS, "outputs": ITEMS}
    model = sj.FeedForward(config, **sizes, rngs=nnx.Rngs(seed))
    names = [f"item {n}" for n in range(ITEMS)]
    sj.export_predictor(model, path, k=3, names=names, batch_size=1)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("predictors")


@pytest.fixture(scope="module")
def of_items(folder):
    path = export(folder / "items.predictor")
    return path, lambda p: p.recommend(ROWS).scores


@pytest.fixture(scope="module")
def of_clicks(folder):
    file, path = folder / "c.csv", folder / "clicks.predictor"
    file.write_text(
        "click,city\n" + "".join(f"{n[-1] < '5':d},{n}\n" for n in CATEGORIES)
    )
    schema = sj.ClickSchema("click", ids={"city": sj.data.VocabularyColumn()})
    clicks = sj.read_clicks(file, schema)
    config = sj.WideDeepConfig(dim=2, hidden=(2,))
    model = sj.clicks.WideDeep(
        config, num_dense=0, features=clicks.num_ids, rngs=nnx.Rngs(0)
    )
    sj.export_predictor(model, path, names=clicks, batch_size=1)
    records = {"city": CATEGORIES[:2]}
    return path, lambda p: p.predict_records(records)


@pytest.fixture(params=["items", "clicks"])
def loading(request):
    return request.getfixturevalue(f"of_{request.param}")


def test_it_is_printed_in_a_line(loading):
    path, _ = loading
    text = repr(sj.load_predictor(path))
    assert len(text) < 150 and "\n" not in text
    assert "rows=[1]" in text
    assert "with names" in text or "with schema" in text


@pytest.mark.parametrize("copied", [lambda p: pickle.loads(pickle.dumps(p)), copy.copy])
def test_it_is_pickled_as_its_path(loading, copied, monkeypatch):
    path, answer = loading
    monkeypatch.chdir(path.parent)
    predictor = sj.load_predictor(path.name)
    assert len(pickle.dumps(predictor)) < 1000
    monkeypatch.chdir("/")  # the other process may be anywhere
    again = copied(predictor)
    assert type(again) is type(predictor)
    np.testing.assert_array_equal(answer(again), answer(predictor))
    assert pickle.dumps(again) == pickle.dumps(predictor)


def test_what_was_pickled_is_the_file_of_then(tmp_path):
    path = export(tmp_path / "p")
    pickled = pickle.dumps(sj.load_predictor(path))
    export(path, seed=1)
    with pytest.raises(ValueError, match="p: was replaced while it was used"):
        pickle.loads(pickled)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        pickle.loads(pickled)


def test_without_a_file_it_is_not_pickled():
    with pytest.raises(TypeError, match="not loaded from a file"):
        archive.pickled(None)


def test_a_forked_process_says_so(loading):
    path, answer = loading
    predictor = sj.load_predictor(path)
    answer(predictor)

    def fails(call):
        with pytest.raises(RuntimeError, match="forked from one that has loaded"):
            call()

    def child():
        sys.stderr = None
        fails(lambda: answer(predictor))
        fails(lambda: predictor.warm_up())
        fails(lambda: sj.load_predictor(path))
        os._exit(7)

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of Python and JAX, which do not know what it does
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
    process.join(300)
    code = process.exitcode
    process.kill()
    assert code == 7  # None: it hangs
    answer(predictor)  # here it works


def replaced(load, monkeypatch, module, tmp_path):
    """Counts which predictors were still in memory whenever a new one was loaded."""
    first, second = (export(tmp_path / str(n), seed=n) for n in (0, 1))
    read, alive, known = module._ready, [], []

    def ready(path, file):
        gc.collect()
        alive.append(sum(r() is not None for r in known))
        found = read(path, file)
        known.append(weakref.ref(found))
        known.extend(map(weakref.ref, found.weights))
        return found

    monkeypatch.setattr(module, "_ready", ready)
    for path in (first, first, second):
        assert load(path, predictor_identity(path)).k == 3
    return alive


def test_a_process_has_one_predictor_at_a_time(monkeypatch, tmp_path):
    alive = replaced(Kept().load, monkeypatch, predictor_files, tmp_path)
    assert alive == [0, 0]


def test_a_task_of_spark_has_one_predictor_at_a_time(monkeypatch, tmp_path):
    context = types.SimpleNamespace(cpus=lambda: 1, resources=dict)
    spark = types.ModuleType("pyspark")
    spark.TaskContext = types.SimpleNamespace(get=lambda: context)  # pyrefly: ignore
    monkeypatch.setitem(sys.modules, "pyspark", spark)
    monkeypatch.setattr(scoring, "_bound", lambda cpus: None)
    monkeypatch.setattr(scoring, "_loaded", {})
    alive = replaced(scoring.predictor_here, monkeypatch, predictor_files, tmp_path)
    assert alive == [0, 0]


def test_a_worker_has_one_predictor_at_a_time():
    assert isinstance(workers._kept, Kept)


def test_names_that_parts_keep_do_not_keep_the_predictor(of_items):
    predictor = sj.load_predictor(of_items[0])
    names, _ = parts._names_of(predictor)
    assert parts._names_of(predictor)[0] is names and len(names) == ITEMS
    kept = [weakref.ref(x) for x in (predictor, *predictor.weights)]
    del predictor
    gc.collect()
    assert not [r for r in kept if r() is not None]
