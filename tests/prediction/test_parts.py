"""Prediction in parts: from a log in an object store to metrics, by several processes, some of
which are killed.
"""

import dataclasses
import os
import re
import select
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from contents import contents
from flax import nnx

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.data.prepared import folder_files
from sparsejax.predictors import parts as module
from sparsejax.predictors import workers
from sparsejax.predictors.parts import Parts

pytest.importorskip("duckdb")

PARTS, K = 10, 5


@pytest.fixture(scope="module")
def shop(tmp_path_factory, symbolic_sizes):
    """A log, a prepared folder of many row groups, and a predictor with its model."""
    folder = tmp_path_factory.mktemp("shop")
    rng = np.random.default_rng(0)
    log = pa.table(
        {
            "user": rng.integers(0, 120, 1500),
            "item": rng.integers(0, 30, 1500) ** 2 // 30,
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_files, "GROUP_ENTRIES", 120)
        sj.prepare(log, folder / "data", split_fraction=0.8)
    names = sj.read(folder / "data").feature_names
    config = sj.NetworkConfig.autoencoder(hidden=(4,))
    sizes = {"inputs": len(names), "outputs": len(names)}
    model = sj.FeedForward(config, **sizes, rngs=nnx.Rngs(0))
    sj.export_predictor(
        model, folder / "model.predictor", k=K, names=names, batch_size=8
    )
    return folder, log, model


def parts_of(shop, data, out, count=PARTS, **options):
    predictor = shop[0] / "model.predictor"
    return Parts.of(
        predictor, data, out, count=count, k=K, exclude_seen=True, **options
    )


def test_from_a_store_to_metrics(bucket, shop, capsys):
    folder, log, model = shop
    address, query = bucket
    store, _ = pa.fs.FileSystem.from_uri(address + query)
    pa.fs.copy_files(str(folder), "shop", destination_filesystem=store)
    data, out = f"{address}/data", f"{address}/recs{query}"
    predictor = f"{address}/model.predictor{query}"
    argv = ["predict", predictor, data + query, "--out", out, "--parts", str(PARTS)]
    argv += ["--k", str(K), "--exclude-seen"]
    assert main([*argv, "--finish"]) == 1
    assert "10 of 10 parts are missing: 0, 1, 2" in capsys.readouterr().err
    for part in (3, 4, 3):
        assert main([*argv, "--part", str(part)]) == 0
    assert "wrote 0 parts, 1 were there" in capsys.readouterr().err
    # A damaged part counts as missing, and is written again.
    [name] = [
        info.path
        for info in store.get_file_info(pa.fs.FileSelector("shop/recs"))
        if info.base_name.endswith("-00004.parquet")
    ]
    with store.open_output_stream(name) as stream:
        stream.write(b"PAR1 and no more")
    assert main([*argv, "--workers", "2"]) == 0
    assert "wrote 9 parts, 1 were there" in capsys.readouterr().err
    with store.open_input_stream("shop/recs/_manifest.json") as stream:
        assert stream.read().count(b".parquet") == PARTS

    train, test = sj.read(data + query), sj.read(f"{data}/test{query}")
    table = pq.read_table("shop/recs", filesystem=store).sort_by("row")
    order = np.argsort(train.row_names)
    assert table["row"].to_pylist() == train.row_names[order].tolist()
    expected = sj.recommend(model, train, K, exclude=train)
    found = dict(zip(table["row"].to_pylist(), table["items"].to_pylist(), strict=True))
    scores = np.array(table["scores"].to_pylist())
    # Scores of up to 8 are sums whose terms cancel, so the small ones have their rounding.
    np.testing.assert_allclose(scores, expected.scores[order], rtol=1e-5, atol=1e-6)
    # Recall by these files is that of the path in one process, from the log itself.
    split = sj.data.from_arrow(log).split(0.8, seed=0)
    names = train.feature_names
    whole = split.train.align_features(names), split.heldout.align_features(names)
    measured = sj.evaluate(model, *whole, k=K)
    hits = [
        len(held.keys() & set(found[name])) / len(held)
        for name, held in contents(test).items()
    ]
    np.testing.assert_allclose(np.mean(hits), measured[f"recall@{K}"], rtol=1e-6)

    # The folder takes no parts of another prediction: its readers would mix them.
    assert main([*argv, "--part", "0", "--k", "3"]) == 1
    assert "has parts of another prediction" in capsys.readouterr().err


def test_values_count_unless_they_are_ignored(shop, tmp_path):
    folder, log, model = shop
    names = sj.read(folder / "data").feature_names
    weights = {"weight": np.arange(len(log)) % 5 + 1.0}
    events = pa.table({name: log[name] for name in log.column_names} | weights)
    sj.prepare(events, tmp_path / "valued", value="weight", features=names)
    scores = []
    for indicator in (False, True):
        out = tmp_path / f"out{indicator}"
        parts = parts_of(shop, tmp_path / "valued", out, count=1, indicator=indicator)
        assert parts.write(0, parts.load_predictor)
        scores.append(pq.read_table(out).sort_by("row")["scores"].to_pylist())
    known = sj.read(tmp_path / "valued").without_values()
    known = known.align_rows(np.sort(known.row_names))
    expected = sj.recommend(model, known, K, exclude=known).scores
    np.testing.assert_allclose(scores[1], expected, rtol=1e-5, atol=1e-5)
    assert np.abs(np.subtract(*scores)).max() > 0.01


class Steps:
    """Follows which row groups are read ("r") and written ("w").

    Attributes:
      done: the steps so far, in their order.
      last: if these are done, the step fails.
    """

    def __init__(self):
        self.done, self.last = "", None

    def before(self, step, call):
        def stepped(*arguments):
            self.done += step
            if self.done == self.last:
                raise OSError("the disk is gone")
            return call(*arguments)

        return stepped


@pytest.fixture
def steps(monkeypatch):
    steps, writer = Steps(), pq.ParquetWriter
    monkeypatch.setattr(module, "read_rows", steps.before("r", module.read_rows))
    monkeypatch.setattr(writer, "write_table", steps.before("w", writer.write_table))
    return steps


def test_a_part_of_many_row_groups(shop, tmp_path, steps):
    data = shop[0] / "data"
    groups = len(parts_of(shop, data, tmp_path, count=1).groups(0))
    files = {}
    for out, count in (("one", 1), ("again", 1), ("each", groups)):
        parts = parts_of(shop, data, tmp_path / out, count=count)
        steps.done = ""
        for part in range(count):
            assert parts.write(part, parts.load_predictor)
        if count == 1:  # two groups are read ahead of those that are written
            assert groups > 5 and steps.done == "rr" + "wr" * (groups - 2) + "ww"
        files[out] = sorted((tmp_path / out).iterdir())
    [one], [again] = files["one"], files["again"]
    assert one.read_bytes() == again.read_bytes()
    table, each = pq.read_table(one), map(pq.read_table, files["each"])
    assert table.equals(pa.concat_tables(each))
    assert table["row"].to_pylist() == sj.read(data).row_names.tolist()
    texts, numbers = pa.large_string(), pa.float32()
    assert table.schema.types == [texts, pa.list_(texts), pa.list_(numbers)]


@pytest.mark.parametrize("last", ["r", "rrwr", "rrw", "rrwrw"])
def test_there_is_no_part_after_an_error(last, shop, tmp_path, steps):
    parts = parts_of(shop, shop[0] / "data", tmp_path / "out", count=1)
    steps.last = last
    with pytest.raises(OSError, match="the disk is gone"):
        parts.write(0, parts.load_predictor)
    assert list((tmp_path / "out").iterdir()) == [] and parts.missing() == [0]
    steps.last = None
    assert parts.write(0, parts.load_predictor) and parts.missing() == []


def test_what_is_refused(shop, tmp_path, capsys):
    folder, log, _ = shop
    predictor = str(folder / "model.predictor")
    sj.prepare(log.slice(0, 900), tmp_path / "other")
    out = ["--out", str(tmp_path / "out"), "--parts", str(PARTS), "--k", str(K)]
    for data, more, message in [
        ("other", ["--part", "0"], "has other items than the predictor"),
        ("other", ["--part", "10"], "have the numbers 0 to 9"),
        ("none", ["--part", "0"], "is no prepared folder"),
        ("other", ["--part", "0", "--format", "pairs"], "leave out --format"),
        ("other", ["--part", "0", "--workers", "2"], "leave out --part and --finish"),
        ("other", ["--workers", "0"], "workers must be 1 or more, got 0"),
        ("other", ["--mesh", "model=2"], "leave out --mesh, and give --workers"),
        # What a process raises reaches the user as it is.
        ("other", ["--workers", "1"], "error: /.*has other items than the predictor"),
    ]:
        argv = ["predict", predictor, str(tmp_path / data), *out, *more]
        assert main(argv) == 1
        assert re.search(message, capsys.readouterr().err)
    parts = parts_of(shop, shop[0] / "data", tmp_path / "out")
    other = dataclasses.replace(parts, predictor="of another content")
    with pytest.raises(ValueError, match="model.predictor: was replaced while"):
        parts.write(0, other.load_predictor)


class Killed(workers.Scorer):
    """A process that is killed when it gets some parts for the first time."""

    parts: dict[int, int]
    started: int

    def __init__(self, **options):
        type(self).started += 1
        super().__init__(**options)

    def ask(self, parts, part):
        super().ask(parts, part)
        if self.parts.get(part, 0) > 0:
            self.parts[part] -= 1
            os.kill(self.pid, signal.SIGKILL)


@pytest.mark.parametrize("count", [2, 3])
def test_processes_that_die(count, shop, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "Scorer", Killed)
    monkeypatch.setattr(Killed, "started", 0, raising=False)
    monkeypatch.setattr(Killed, "parts", {0: count, 7: 1}, raising=False)
    parts = parts_of(shop, shop[0] / "data", tmp_path / "out")
    if count == 3:
        with pytest.raises(
            ChildProcessError, match="part 0 was begun 3 times.*SIGKILL"
        ):
            workers.write_parts(parts, workers=1)
        return
    assert workers.write_parts(parts, workers=1) == PARTS
    assert Killed.started == 1 + count + 1
    parts.finish()
    table = pq.read_table(tmp_path / "out")
    rows = sj.read(shop[0] / "data").row_names
    assert sorted(table["row"].to_pylist()) == sorted(rows.tolist())
    assert workers.write_parts(parts) == 0 and Killed.started == 1 + count + 1


def test_no_process_outlives_the_one_that_asks():
    start = (
        "import os, signal; from sparsejax.predictors.workers import Scorer; "
        "print(Scorer(cores=[min(os.sched_getaffinity(0))]).pid, flush=True); signal.pause()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", start], stdout=subprocess.PIPE
    ) as asking:
        assert asking.stdout is not None
        scorer = os.pidfd_open(int(asking.stdout.readline()))
        asking.kill()
    ended, _, _ = select.select([scorer], [], [], 60)
    os.close(scorer)
    assert ended


def test_the_gpus_that_there_are(monkeypatch):
    for visible, found in (("", []), ("2,5", ["2", "5"]), ("GPU-a, -1, 3", ["GPU-a"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert workers.gpu_addresses() == found
