"""Writes a predictor of each kind, in this process, or in another one that runs this file."""

import pathlib
import sys

import numpy as np
from flax import nnx

import sparsejax as sj


def export(folder: pathlib.Path) -> tuple[sj.SequenceDataset, sj.ClickDataset]:
    """Writes predictors of items, histories and clicks; returns data for the latter two."""
    names = [f"item {n}" for n in range(9)]
    config = sj.NetworkConfig.autoencoder((4,))
    model = sj.FeedForward(config, inputs=9, outputs=9, rngs=nnx.Rngs(0))
    sj.export_predictor(model, folder / "items", k=3, names=names, batch_size=1)
    indptr, items = np.array([0, 3, 3]), np.array([3, 1, 3], np.int32)
    times = np.arange(3)
    both = (np.array(text, np.dtypes.StringDType()) for text in (["ann", "bob"], names))
    data = sj.SequenceDataset(indptr, items, *both, times=times)
    config = sj.HSTUConfig(max_length=4, width=4, blocks=1, heads=1)
    model = sj.sequence.build_sequence_model(config, items=9, rngs=nnx.Rngs(0))
    sj.export_predictor(model, folder / "histories", k=3, names=data, batch_size=1)
    lines = "".join(f"{n % 2},{n / 2},c{n % 5},u{n % 7}\n" for n in range(40))
    (folder / "clicks.csv").write_text("click,age,city,user\n" + lines)
    ids = {"city": sj.data.VocabularyColumn(), "user": sj.data.HashedColumn(30)}
    schema = sj.ClickSchema("click", dense={"age": sj.data.DenseColumn()}, ids=ids)
    clicks = sj.read_clicks(folder / "clicks.csv", schema)
    config = sj.WideDeepConfig(dim=16, hidden=(4,))
    options = {"num_dense": 1, "features": clicks.num_ids}
    model = sj.clicks.WideDeep(config, **options, rngs=nnx.Rngs(0))
    path = folder / "clicks"
    sj.export_predictor(model, path, names=clicks, table_dtype="int8", batch_size=1)
    return data, clicks


if __name__ == "__main__":
    export(pathlib.Path(sys.argv[1]))
