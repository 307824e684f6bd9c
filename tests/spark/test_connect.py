"""Preparation, training and prediction through Spark Connect."""

import os
import pathlib
import subprocess
import sys

import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from event_tables import entries, many_events
from flax import nnx

import sparsejax as sj
from sparsejax.data.files.stores import Place


@pytest.fixture(scope="module")
def model(symbolic_sizes, tmp_path_factory):
    """A model of the events, and the file of its predictor."""
    events = sj.data.from_arrow(many_events(), time="when")
    names = events.split_last(1)[0].feature_names
    config = sj.NetworkConfig.autoencoder(hidden=(4,))
    sizes = {"inputs": len(names), "outputs": len(names)}
    model = sj.FeedForward(config, **sizes, rngs=nnx.Rngs(0))
    file = tmp_path_factory.mktemp("predictor") / "model"
    sj.export_predictor(model, file, k=3, names=names)
    return model, file


@pytest.mark.filterwarnings("ignore:.*also have earlier events")
def test_from_events_to_recommendations(java, model, bucket, tmp_path):
    model, predictor = model
    address, query = bucket
    events = many_events()
    pq.write_table(events, tmp_path / "events.parquet")
    secret = address.replace("://", "://nobody:nothing@")
    root = str(pathlib.Path(__file__).parents[2])
    path = f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    ran = subprocess.run(
        [
            *(sys.executable, pathlib.Path(__file__).with_name("over_connect.py")),
            *(tmp_path / "events.parquet", predictor),
            *(f"{secret}/connected{query}", f"{secret}/recommended{query}"),
            *(tmp_path / "frame", tmp_path / "kept"),
        ],
        env=os.environ | {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "nothing" not in ran.stdout + ran.stderr
    for name in ("connected/manifest.json", "recommended/_manifest.json"):
        manifest = Place.of(f"{address}/{name}{query}").read()
        assert manifest is not None and b"nothing" not in manifest
    assert any((tmp_path / "kept").rglob("part-*"))
    train, heldout = sj.data.from_arrow(events, time="when").split_last(1)
    for part, data in (("train", train), ("test", heldout)):
        found = sj.read(f"{address}/connected/{part}{query}")
        assert entries(found) == entries(data)

    store, _ = pyarrow.fs.FileSystem.from_uri(address + query)
    seen = sj.data.from_arrow(events, indicator=True).align_features(train)
    for written, column, data in (
        (pq.read_table("shop/recommended", filesystem=store), "row", train),
        (pq.read_table(tmp_path / "frame"), "user", seen),
    ):
        shown = sj.CSR(
            None, data.matrix.indices, data.matrix.indptr, num_cols=data.num_features
        )
        expected = sj.recommend(model, shown, 3, exclude=shown).names(train)
        rows = map(str, written[column].to_pylist())
        items = written["items"].to_pylist()
        assert dict(zip(rows, items, strict=True)) == dict(
            zip(data.row_names.tolist(), expected, strict=True)
        )
