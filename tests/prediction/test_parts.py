"""Prediction in parts, from a log in a store to metrics."""

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from contents import contents

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.data import folder_files

pytest.importorskip("duckdb")

PARTS, K = 10, 5


def test_from_a_log_in_a_store_to_metrics(
    bucket, tmp_path, monkeypatch, capsys, symbolic_sizes
):
    address, query = bucket
    store, _ = pa.fs.FileSystem.from_uri(address + query)
    rng = np.random.default_rng(0)
    log = pa.table(
        {
            "user": rng.integers(0, 120, 1500),
            "item": rng.integers(0, 30, 1500) ** 2 // 30,
        }
    )
    pq.write_table(log, "shop/log.parquet", filesystem=store)
    shop, out = f"{address}/parted", f"{address}/recs{query}"
    monkeypatch.setattr(folder_files, "GROUP_ENTRIES", 120)
    argv = ["prepare", f"{address}/log.parquet{query}", shop + query]
    assert main([*argv, "--split-fraction", ".8"]) == 0
    train, test = sj.read(shop + query), sj.read(f"{shop}/test{query}")
    split = sj.from_arrow(log).split(0.8, seed=0)
    assert train.num_entries == split.train.num_entries

    run, file = str(tmp_path / "run"), tmp_path / "model.predictor"
    network = ["--hidden", "4", "--epochs", "1", "--batch-size", "64"]
    assert main(["train", shop + query, "--run", run, *network]) == 0
    model, names = sj.load_model(run)
    sj.export_predictor(model, file, k=K, names=names, batch_size=8)
    predictor = f"{address}/model.predictor{query}"
    with store.open_output_stream("shop/model.predictor") as stream:
        stream.write(file.read_bytes())

    argv = ["predict", predictor, shop + query, "--out", out, "--parts", str(PARTS)]
    argv += ["--k", str(K), "--exclude-seen"]
    assert main([*argv, "--finish"]) == 1
    assert "10 of 10 parts are missing: 0, 1, 2" in capsys.readouterr().err
    for part in [*range(PARTS), 3]:
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
    assert main([*argv, "--finish"]) == 1
    assert "1 of 10 parts are missing: 4" in capsys.readouterr().err
    assert main(argv) == 0
    assert "wrote 1 parts, 9 were there" in capsys.readouterr().err
    with store.open_input_stream("shop/recs/_manifest.json") as stream:
        assert stream.read().count(b".parquet") == PARTS

    table = pq.read_table("shop/recs", filesystem=store).sort_by("row")
    order = np.argsort(train.row_names)
    assert table["row"].to_pylist() == train.row_names[order].tolist()
    expected = sj.recommend(model, train, K, exclude=train)
    found = dict(zip(table["row"].to_pylist(), table["items"].to_pylist(), strict=True))
    scores = np.array(table["scores"].to_pylist())
    np.testing.assert_allclose(scores, expected.scores[order], rtol=1e-5)
    # Recall by these files is that of the path in one process, from the log itself.
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
    assert main([*argv, "--part", "0", "--format", "pairs"]) == 1
    assert "leave out --format" in capsys.readouterr().err

    # Values count, unless they are ignored.
    valued = tmp_path / "valued"
    weights = {"weight": np.arange(len(log)) % 5 + 1.0}
    events = pa.table({name: log[name] for name in log.column_names} | weights)
    sj.prepare(events, valued, value="weight", features=names)
    scores = []
    for more in ([], ["--no-value"]):
        out = str(tmp_path / f"out{len(more)}")
        argv[1:5] = [predictor, str(valued), "--out", out]
        assert main([*argv, *more]) == 0
        scores.append(pq.read_table(out).sort_by("row")["scores"].to_pylist())
    known = sj.read(valued).without_values()
    known = known.align_rows(np.sort(known.row_names))
    expected = sj.recommend(model, known, K, exclude=known).scores
    np.testing.assert_allclose(scores[1], expected, rtol=1e-5, atol=1e-5)
    assert np.abs(np.subtract(*scores)).max() > 0.01

    # Another vocabulary, a part that there is not, and data that is no folder.
    other = tmp_path / "other"
    sj.prepare(log.slice(0, 900), other)
    argv[2] = str(other)
    assert main([*argv, "--part", "0"]) == 1
    assert "has other items than the predictor" in capsys.readouterr().err
    assert main([*argv, "--part", "10"]) == 1
    assert "have the numbers 0 to 9" in capsys.readouterr().err
    assert main(["predict", predictor, str(file), *argv[3:]]) == 1
    assert "is no prepared folder" in capsys.readouterr().err
