"""Training on data that stays on disk."""

import contextlib
import gc
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax.engine.train.dispatch import Epochs, epoch_order
from sparsejax.engine.train.resident import Resident
from sparsejax.engine.train.streaming import Stream
from sparsejax.kinds.items.job import scanned_items

ROWS, ITEMS = 300, 40


@pytest.fixture
def path(tmp_path):
    """A saved data set in row groups of 32 rows."""
    rng = np.random.default_rng(0)
    matrix = rng.random((ROWS, ITEMS)) < 0.15
    matrix[:, 0] |= np.arange(ROWS) % 2 == 0
    data = sj.SparseDataset.from_scipy(scipy.sparse.csr_array(matrix))
    path = tmp_path / "data.parquet"
    data.save(path)
    pq.write_table(pq.read_table(path), path, row_group_size=32)
    return path


def on(shape):
    if shape is None:
        return contextlib.nullcontext()
    return jax.set_mesh(sj.make_mesh(data=shape[0], model=shape[1]))


def trained(path, shape=None, *, chunk_rows=None, features=None, **options):
    with on(shape):
        config = sj.NetworkConfig.autoencoder((4,), temperature=None)
        model = sj.FeedForward(config, inputs=ITEMS, outputs=ITEMS, rngs=nnx.Rngs(0))
        optimizer = sj.Optimizer(model, sj.optimizers.adagrad(0.1))
        scanned = sj.data.scan_parquet(path, chunk_rows=chunk_rows, features=features)
        settings: dict[str, Any] = {"batch_size": 64, "num_epochs": 2} | options
        history = sj.fit(model, optimizer, scanned, **settings)
    kernel = np.asarray(model.first.kernel[...])
    return [entry["loss"] for entry in history], kernel, history


@pytest.mark.parametrize(
    ("shape", "chunk_rows"), [(None, 90), ((2, 4), None), ((2, 4), 90)]
)
def test_every_row_is_drawn_once_an_epoch(path, shape, chunk_rows):
    expected = sj.SparseDataset.load(path).matrix.to_scipy().toarray()
    seen = []
    dense = jax.jit(jax.vmap(lambda x: x.todense()))
    parts = 1 if shape is None else shape[0]
    with on(shape):
        weights = np.arange(1.0, ROWS + 1)
        scanned = sj.data.scan_parquet(path, chunk_rows=chunk_rows)
        stream = Stream(scanned_items(scanned), weights)
        order = stream.order(seed=0, epoch=1)
        assert sorted(order) == list(range(len(stream.chunks)))
        assert len(order) == (1 if chunk_rows is None else 4)
        for chunk, following in zip(order, [*order[1:], None], strict=True):
            data = stream.on_device(chunk, following)
            rows = epoch_order(
                jax.random.key(0), 1, data.num_rows, 64, parts, contiguous=True
            )
            (x,), means = (
                jax.jit(Resident.take, static_argnums=2)(data, rows, (600,)),
                jax.jit(Resident.means)(data, rows),
            )
            exists = np.asarray(rows).reshape(len(rows), -1) >= 0
            which = means * exists.sum(axis=1, keepdims=True)
            seen += zip(
                np.asarray(which)[exists].round().astype(int),
                np.asarray(dense(x))[exists],
                strict=True,
            )
        stream.close()
    seen.sort(key=lambda pair: pair[0])
    assert [number for number, _ in seen] == list(range(1, ROWS + 1))
    np.testing.assert_array_equal([row for _, row in seen], expected)


def test_the_same_on_a_mesh(path):
    losses, kernel, _ = trained(path, chunk_rows=90)
    got_losses, got_kernel, _ = trained(path, (2, 4), chunk_rows=90)
    np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
    np.testing.assert_allclose(got_kernel, kernel, rtol=1e-3, atol=1e-5)


def test_it_learns_what_resident_data_teaches(path):
    losses, _, history = trained(path, chunk_rows=90, num_epochs=4)
    assert losses[-1] < losses[0]
    assert history[-1]["step"] == 4 * (2 + 2 + 2 + 1)
    assert history[-1]["examples_per_second"] > 0
    resident, _, _ = trained(path, num_epochs=4)
    np.testing.assert_allclose(losses, resident, rtol=0.1)


def test_without_shuffling_chunks_follow_the_data(path):
    losses, kernel, _ = trained(path, chunk_rows=64, batch_size=64, shuffle=False)
    other, same, _ = trained(path, batch_size=64, shuffle=False)
    np.testing.assert_allclose(losses, other, rtol=1e-5)
    np.testing.assert_allclose(kernel, same, rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match="needs a mesh with data=1, got data=2"):
        trained(path, (2, 4), shuffle=False)


def test_a_table_trains_as_a_saved_data_set(path):
    losses, kernel, _ = trained(path, chunk_rows=90)
    data = sj.SparseDataset.load(path)
    lists = np.split(data.feature_names[data.matrix.indices], data.matrix.indptr[1:-1])
    table = pa.table({"items": [names.tolist() for names in lists]})
    pq.write_table(table, path.parent / "table.parquet", row_group_size=32)
    got = trained(path.parent / "table.parquet", chunk_rows=90, features=data)
    assert got[0] == losses
    np.testing.assert_array_equal(got[1], kernel)


def test_a_resumed_run_has_the_same_bits(path, tmp_path, monkeypatch):
    losses, kernel, _ = trained(path, chunk_rows=90)
    stopped = []

    def interrupted(*_):
        stopped.append(None)
        return len(stopped) == 6  # in the second epoch, behind its first chunk

    monkeypatch.setattr(
        "sparsejax.mesh.interrupts.is_told_to_end", lambda: interrupted()
    )
    checkpoints = {"checkpoint_dir": tmp_path / "run", "checkpoint_seconds": 1e9}
    with pytest.raises(KeyboardInterrupt):
        trained(path, chunk_rows=90, **checkpoints)
    monkeypatch.undo()
    got, resumed, _ = trained(path, chunk_rows=90, resume=True, **checkpoints)
    assert got == losses
    np.testing.assert_array_equal(resumed, kernel)


def test_other_chunks_are_no_other_data(path, tmp_path):
    options = {"checkpoint_dir": tmp_path / "run", "num_epochs": 1}
    trained(path, chunk_rows=90, **options)
    options |= {"num_epochs": 2, "resume": True}
    with pytest.raises(
        ValueError, match="chunk_rows 300: the training .* has chunk_rows 90"
    ):
        trained(path, **options)
    assert len(trained(path, (2, 4), chunk_rows=90, **options)[0]) == 2


def test_the_next_chunk_is_read_ahead(path, monkeypatch):
    scanned = sj.data.scan_parquet(path, chunk_rows=90)
    stream = Stream(scanned_items(scanned), None)
    read, starts, both = type(scanned).read, [], threading.Event()

    def recorded(self, start, stop):
        starts.append(start)
        if len(starts) == 2:
            both.set()
        return read(self, start, stop)

    monkeypatch.setattr(type(scanned), "read", recorded)
    stream.on_device(2, 0)
    assert both.wait(timeout=60)
    monkeypatch.setattr(type(scanned), "read", None)
    assert stream.on_device(0, None).num_rows == stream.chunks[0]
    stream.close()


def test_a_chunk_is_freed_before_the_next_one_is_placed(path):
    stream = Stream(scanned_items(sj.data.scan_parquet(path, chunk_rows=90)), None)
    placed, alive = [], []
    gc.disable()  # a device whose memory is full does not start the collector
    try:
        for dispatch in Epochs(stream, batch_size=64, num_epochs=1).dispatches(0):
            placed.append(weakref.ref(dispatch.data))
            del dispatch
            alive.append(sum(data() is not None for data in placed))
    finally:
        gc.enable()
        stream.close()
    assert alive == [1] * len(stream.chunks)


def test_all_but_the_first_chunk_are_read_ahead(path, monkeypatch):
    threads, read = [], sj.data.ScannedDataset.read

    def recorded(self, start, stop):
        threads.append(threading.current_thread().name)
        return read(self, start, stop)

    monkeypatch.setattr(sj.data.ScannedDataset, "read", recorded)
    trained(path, chunk_rows=90, num_epochs=3)
    first, *others = threads
    assert first == threading.main_thread().name
    assert len(others) >= 3 * 4 - 1 - 2  # an epoch may begin where the last one ended
    assert all(name.startswith("sparsejax-reader") for name in others)


def test_chunks_that_are_read_ahead_go_to_the_default_device(path):
    device = jax.devices()[1]
    with jax.default_device(device):
        stream = Stream(scanned_items(sj.data.scan_parquet(path, chunk_rows=90)), None)
        for chunk, following in (0, 1), (1, None):
            leaves = jax.tree.leaves(stream.on_device(chunk, following))
            assert {leaf.device for leaf in leaves} == {device}
    stream.close()


def test_what_fails_while_reading_ahead_is_raised(path, monkeypatch):
    read = sj.data.ScannedDataset.read

    def damaged(self, start, stop):
        if threading.current_thread() is not threading.main_thread():
            raise sj.DataError.at(path, "is damaged")
        return read(self, start, stop)

    monkeypatch.setattr(sj.data.ScannedDataset, "read", damaged)
    with pytest.raises(sj.DataError, match="is damaged"):
        trained(path, chunk_rows=90)
    assert not any(t.name.startswith("sparsejax-reader") for t in threading.enumerate())


def test_a_process_reads_the_rows_of_its_devices(path, monkeypatch):
    ranges, read = [], sj.data.ScannedDataset.read

    def recorded(self, start, stop):
        ranges.append((start, stop))
        return read(self, start, stop)

    with on((2, 4)):
        stream = Stream(scanned_items(sj.data.scan_parquet(path, chunk_rows=90)), None)
    monkeypatch.setattr(sj.data.ScannedDataset, "read", recorded)
    monkeypatch.setattr(
        "sparsejax.engine.train.streaming.parts_of_process", lambda mesh: [1]
    )
    stream.read(1)
    assert ranges == [(96 + 64, 96 + 96)]  # of 64 shards 32 have a row more
    stream.close()


def test_what_cannot_be_scanned(path):
    data = sj.SparseDataset.load(path)
    scanned = sj.data.scan_parquet(path)
    config = sj.NetworkConfig.autoencoder((4,))
    model = sj.FeedForward(config, inputs=ITEMS, outputs=ITEMS, rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(model, sj.optimizers.adam(1e-2))
    with pytest.raises(ValueError, match="call evaluate with some rows"):
        sj.fit(model, optimizer, scanned, validation=data)
    with pytest.raises(TypeError, match="inputs must be scanned too"):
        sj.fit(model, optimizer, data, scanned)
    with pytest.raises(ValueError, match=r"weights has shape \(3,\)"):
        sj.fit(model, optimizer, scanned, weights=jnp.ones(3))
    (path.parent / "other").mkdir()
    data.split_rows(0.5, seed=0)[0].save(path.parent / "other" / "data")
    fewer = sj.data.scan_parquet(path.parent / "other" / "data")
    with pytest.raises(ValueError, match="scanned rows are matched by position"):
        sj.fit(model, optimizer, scanned, fewer)
