"""The named workloads. Their shapes are stated only here."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sparse rows for a gather-matmul with a `[features, hidden]` matrix.

    Attributes:
      name: name in tables and results.
      batch: number of rows.
      features: number of rows of the dense matrix.
      hidden: number of its columns.
      entries: entries of a batch, whose rows have lognormal lengths.
      skew: exponent of the features' zipf popularity; 0 for uniform.
      transposed: the rows are the columns of such a batch, as the gradient needs them:
        only columns that occur, then empty rows up to the capacity.
    """

    name: str
    batch: int
    features: int
    hidden: int
    entries: int
    skew: float = 0.0
    transposed: bool = False

    @property
    def num_cols(self) -> int:
        """Number of rows of the dense matrix, which the product reads."""
        return self.batch if self.transposed else self.features

    @property
    def num_rows(self) -> int:
        """Number of rows of the result."""
        if self.transposed:
            return min(self.entries, self.features)
        return self.batch

    def bytes_moved(self, itemsize: int) -> int:
        """Bytes of the gathered rows and of the result, each counted once for each use."""
        return (self.entries + self.num_rows) * self.hidden * itemsize


# Sparse inputs of an autoencoder with the shape of MovieLens-20M, with a large batch and with the
# batch 256.
ML20M = Workload("ml20m", 1024, 26_744, 1024, 135_000, skew=0.8)
ML20M_256 = Workload("ml20m_256", 256, 26_744, 1024, 37_000, skew=0.8)
# A table far larger than any cache, with uniformly drawn features.
BIG = Workload("big", 8192, 4_000_000, 256, 518_000)
WORKLOADS = (
    ML20M,
    BIG,
    Workload("h128", 8192, 1_000_000, 128, 518_000),
    # The gradient of this workload.
    dataclasses.replace(BIG, name="big_t", transposed=True),
)
# Output layers, whose rows are labels, or items to exclude. First MovieLens-20M's items with
# DSSTNE's batch, then with a larger batch, then a million items.
OUTPUTS = (
    Workload("out256", 256, 27_278, 1024, 36_864, skew=0.8),
    Workload("out1024", 1024, 27_278, 1024, 147_456, skew=0.8),
    Workload("out1m", 1024, 1_000_000, 256, 147_456),
)


# Number of rows of each table in MLPerf's DLRM-DCNv2: Criteo's days with at most 40 M rows a
# table, https://github.com/mlcommons/training/tree/master/recommendation_v2/torchrec_dlrm
CRITEO_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000),
    *(3_067_956, 405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000),
    *(40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
# Number of ids that an example of its multi-hot data has for each table: 214 in total.
CRITEO_IDS = (
    *(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12),
    *(100, 27, 10, 3, 1, 1),
)


def make_rows(workload: Workload, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A fresh random batch.

    Returns:
      indices: `[entries]` int32, ascending and unique within a row.
      indptr: `[num_rows + 1]` int32.
    """
    rng = np.random.default_rng(seed)
    lengths = _lengths(workload, rng)
    rows = np.repeat(np.arange(workload.batch), lengths)
    columns = _columns(workload, lengths, rng)
    if not workload.transposed:
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        return columns.astype(np.int32), indptr.astype(np.int32)
    order = np.argsort(columns, kind="stable")
    counts = np.unique(columns, return_counts=True)[1]
    indptr = np.full(workload.num_rows + 1, workload.entries)
    indptr[: counts.size + 1] = np.concatenate([[0], np.cumsum(counts)])
    return rows[order].astype(np.int32), indptr.astype(np.int32)


# A DLRM for one to four GPUs: number of ids of each feature.
DLRM_IDS = (5_000_000,) * 4 + (1_000_000,) * 7 + (20_000,) * 15
DLRM_LAYERS = {"bottom": (512, 256), "top": (1024, 1024, 512, 256)}


def keys_of(ids: np.ndarray) -> np.ndarray:
    """Maps ids to 64-bit keys whose order is unrelated to the order of the ids."""
    return ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def zipf_ids(
    rng: np.random.Generator, shape: int | tuple[int, ...], features: int, skew: float
) -> np.ndarray:
    """Draws int32 ids by zipf's law. Popular ids are spread over the whole range; more features
    are supported than `make_rows` can rank.
    """
    # Where u is uniform, (1 + u (N^(1 - s) - 1))^(1 / (1 - s)) has about the zipf law with
    # exponent s.
    places = 1 + rng.random(shape) * (features ** (1 - skew) - 1)
    places = np.minimum(places ** (1 / (1 - skew)), features).astype(np.int64) - 1
    return (places * 3_000_017 % features).astype(np.int32)


def clicks_to_fit(
    rng: np.random.Generator,
    tables: tuple[int, ...] = DLRM_IDS,
    *,
    dim: int = 128,
    examples: int = 2**20,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    dynamic=None,
):
    """The configuration, the data and the optimizer rule of a DLRM whose layers have a given
    dtype.
    """
    import sparsejax as sj

    dense = rng.standard_normal((examples, 13), np.float32)
    label = (rng.random(examples) < 0.2).astype(np.float32)
    ids, columns = {}, {}
    for i, rows in enumerate(tables):
        drawn = ((rng.zipf(1.2, examples) - 1) * 7919 % rows).astype(np.int32)
        ids[f"t{i}"] = drawn if dynamic is None else keys_of(drawn)
        kind = sj.data.HashedColumn(rows) if dynamic is None else sj.data.KeyColumn()
        columns[f"t{i}"] = kind
    numbers = {f"d{i}": sj.data.DenseColumn() for i in range(13)}
    data = sj.ClickDataset(label, dense, ids, sj.ClickSchema("y", numbers, columns), {})
    config = sj.DLRMConfig(dim=dim, **DLRM_LAYERS, dtype=dtype, dynamic=dynamic)
    return config, data, sj.optimizers.rowwise_adagrad(0.02)


def rows_of_items(rng: np.random.Generator, rows: int, length: int, items: int):
    """Draws rows of popular and rare items. A row has each item at most once, so some rows are
    shorter.
    """
    import sparsejax as sj

    ids = np.sort(zipf_ids(rng, (rows, length), items, 0.8), axis=1)
    kept = np.concatenate([np.ones((rows, 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    indptr = np.concatenate([[0], np.cumsum(kept.sum(axis=1))]).astype(np.int32)
    return sj.CSR(None, ids[kept], indptr, num_cols=items)


def histories(length: int, batch: int, items: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws items and times of histories with lognormal lengths. A single history is full."""
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(np.log(length / 4), 1, batch).astype(int)
    counts = np.clip(drawn, 2 if batch > 1 else length + 1, length + 1)
    inside = np.arange(length + 1) < counts[:, None]
    drawn = rng.integers(0, items, inside.shape)
    times = np.cumsum(rng.exponential(3e4, inside.shape), axis=1)
    return (
        np.where(inside, drawn, -1).astype(np.int32),
        np.where(inside, times, 0).astype(np.float32),
    )


def histories_to_fit(rng: np.random.Generator, items: int, users: int, law: str):
    """Draws histories with lognormal lengths. The law of the items is "uniform" or "zipf"."""
    import pyarrow as pa

    import sparsejax as sj

    lengths = np.clip(rng.lognormal(np.log(50), 1, users).astype(int), 2, 201)
    total = int(lengths.sum())
    if law == "zipf":
        popular = rng.zipf(1.05, total) * 7919 % items
    else:
        popular = rng.integers(0, items, total)
    events = {
        "user": np.repeat(np.arange(users), lengths),
        "item": popular,
        "time": np.arange(total) * 60,
    }
    return sj.read_sequences(pa.table(events))


def autoencoder(hidden: tuple[int, ...], dropout: float = 0.0):
    """The configuration of an autoencoder: sigmoid units, sigmoid cross-entropy, bfloat16 products
    at the output.
    """
    import sparsejax as sj

    layers = (
        sj.nn.HiddenConfig(
            name=f"hidden{i}", size=size, activation="sigmoid", dropout=dropout
        )
        for i, size in enumerate(hidden, 1)
    )
    return sj.NetworkConfig(
        layers=(sj.nn.InputConfig(), *layers, sj.nn.OutputConfig(dtype="bfloat16")),
        loss="sigmoid_binary_cross_entropy",
    )


def _lengths(workload: Workload, rng: np.random.Generator) -> np.ndarray:
    """Draws lengths of rows whose sum is `entries`."""
    wish = rng.lognormal(0, 1, workload.batch)
    # Cumulative rounding keeps the sum exact.
    ends = np.rint(np.cumsum(wish) / wish.sum() * workload.entries).astype(np.int64)
    return np.diff(ends, prepend=0)


def _columns(workload, lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if workload.skew == 0:
        # Uniform: each is drawn from a range of its own, so they ascend without duplicates.
        place = np.arange(lengths.sum()) - np.repeat(
            np.cumsum(lengths) - lengths, lengths
        )
        width = workload.features // np.repeat(lengths, lengths)
        return place * width + rng.integers(0, width)
    # The largest of log weight + Gumbel noise are a sample without replacement.
    popularity = -workload.skew * np.log(np.arange(1, workload.features + 1))
    popularity = rng.permutation(popularity)
    chosen = []
    for length in lengths:
        key = popularity + rng.gumbel(size=workload.features)
        top = np.argpartition(-key, length)[:length] if length else np.zeros(0, int)
        chosen.append(np.sort(top))
    return np.concatenate(chosen)


def click_step():
    """A training step of a click model, compiled as one program; it returns the loss."""
    import optax

    import sparsejax as sj

    @sj.jit
    def step(model, optimizer, dense, ids, click):
        def loss_fn(model):
            logits = model(dense, ids)
            return optax.sigmoid_binary_cross_entropy(logits, click).mean()

        loss, grads = optimizer.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    return step
