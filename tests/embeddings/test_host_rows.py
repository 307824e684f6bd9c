"""Tables in host memory equal tables on the devices bit by bit."""

import contextlib
import dataclasses
import errno
import itertools
import mmap
import os
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.embeddings import (
    Admit,
    DynamicTableConfig,
    FeatureConfig,
    TableConfig,
    WideIds,
    exports,
    host_rows,
    host_slots,
    lookup,
)
from sparsejax.embeddings.host_slots import NoRoomError, Slots
from sparsejax.mesh.layout import padded_rows
from sparsejax.mesh.per_device import on_each

BATCH, ROWS = 16, 3000
FEATURES = {
    "user": "user",
    "item": FeatureConfig("item", combiner="mean"),
    "seen": FeatureConfig("item", combiner=None, length=3),
    "bought": FeatureConfig("item", combiner="sqrtn"),
    "hour": "hour",
}


def tables(**options):
    return {
        "user": TableConfig(ROWS, 8, placement="rows", **options),
        "item": TableConfig(ROWS + 7, 8, placement="rows", **options),
        "hour": TableConfig(24, 4),
    }


class Model(nnx.Module):
    """A model whose result has the numbers of an example, each at its position."""

    def __init__(self, tables=None, seed=0):
        tables = tables or globals()["tables"]()
        self.embeddings = sj.embeddings.EmbeddingCollection(
            tables, FEATURES, rngs=nnx.Rngs(seed)
        )
        self.last = nnx.Linear(self.embeddings.num_outputs, 3, rngs=nnx.Rngs(1))

    def __call__(self, ids):
        return jnp.tanh(self.last(self.embeddings.concat(ids)))


def hosted(**options):
    return Model(tables(host=True, **{"device_rows": 128, **options}))


@sj.jit
def train(model, optimizer, ids, target):
    def loss_fn(model):
        return jnp.mean((model(ids) - target) ** 2)

    loss, grads = optimizer.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@sj.jit
def answer(model, optimizer, ids):
    with optimizer.reading(model):
        return model(ids)


def batches(steps, seed=0):
    """Draws batches: a few ids are frequent, some are missing, and lists have weights."""
    rng = np.random.default_rng(seed)

    def some(*shape):
        ids = np.minimum(rng.zipf(1.3, shape) - 1, ROWS - 1)
        return np.where(rng.random(shape) < 0.1, -1, ids).astype(np.int32)

    for _ in range(steps):
        lengths = rng.integers(0, 4, BATCH)
        indptr = np.cumsum([0, *lengths]).astype(np.int32)
        room = 3 * BATCH
        bought = np.where(np.arange(room) < indptr[-1], abs(some(room)), 0)
        weights = (rng.random(room) + 0.5).astype(np.float32)
        ids = {
            "user": rng.integers(0, ROWS, BATCH).astype(np.int32),
            "item": some(BATCH, 3),
            "seen": some(BATCH, 2),
            "bought": sj.CSR.tree_unflatten(
                ROWS + 7, (weights, bought.astype(np.int32), indptr, None)
            ),
            "hour": rng.integers(0, 24, BATCH).astype(np.int32),
        }
        yield ids, rng.normal(size=(BATCH, 3)).astype(np.float32)


def rows_of(model, name):
    return np.concatenate(list(model.embeddings.table_rows(name)))


RULES = {
    "sgd": sj.optimizers.sgd(0.5),
    "momentum": sj.optimizers.momentum(0.1, weight_decay=0.01),
    "rowwise_adagrad": sj.optimizers.rowwise_adagrad(0.1),
    "adagrad": sj.optimizers.adagrad(0.1),
    "adam": sj.optimizers.adam(0.02),
    "adamw": sj.optimizers.adamw(0.02, weight_decay=0.1),
}


@pytest.mark.parametrize("name", RULES)
def test_bits_are_those_of_tables_on_the_device(name):
    check_bits(RULES[name])


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_bits_are_those_of_divided_tables(name):
    with jax.set_mesh(sj.make_mesh(data=2, model=4)):
        check_bits(RULES[name], steps=15)


def test_entries_are_sorted_as_if_rows_lay_in_their_order():
    rng = np.random.default_rng(0)
    indptr = np.cumsum([0, *rng.integers(0, 5, 40)]).astype(np.int32)
    room = int(indptr[-1]) + 9
    rows = np.minimum(rng.zipf(1.3, room), 500).astype(np.int32) - 1
    rows[rng.random(room) < 0.1] = -1
    slots = rng.permutation(500).astype(np.int32)  # the slot of each row
    here = sj.CSR.tree_unflatten(500, (None, jnp.asarray(rows), indptr, None))
    columns = jnp.asarray(np.where(rows < 0, -1, slots[rows]))
    there = sj.CSR.tree_unflatten(600, (None, columns, indptr, None))
    expected = here.by_column()
    found = lookup._sorted_by(there, jnp.asarray(rows), 500).transposed
    assert found is not None
    for name in "rows", "order", "indptr":
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    used = np.asarray(expected.columns) < 500
    np.testing.assert_array_equal(
        found.columns,
        np.where(used, slots[np.where(used, expected.columns, 0)], 600),
    )


def test_bits_are_those_of_files(tmp_path):
    in_memory, in_files = hosted(), hosted(host_path=tmp_path)
    rule = RULES["rowwise_adagrad"]
    optimizers = [sj.Optimizer(model, rule) for model in (in_memory, in_files)]
    assert trained(in_files, optimizers[1], 20) == trained(in_memory, optimizers[0], 20)
    for table in "user", "item":
        np.testing.assert_array_equal(
            rows_of(in_files, table), rows_of(in_memory, table)
        )
    (stack,) = (s for s in in_files.embeddings.stacks if s.device_rows is not None)
    kernel = in_files.embeddings.kernels[stack.name]
    arrays = kernel.get_metadata()["host"]._arrays
    for array in arrays.values():
        while isinstance(array, np.ndarray):
            array = array.base
        assert isinstance(array, mmap.mmap | memoryview)
    assert not list(tmp_path.iterdir())  # files without names


def test_a_folder_that_is_missing_or_full(tmp_path, monkeypatch):
    ids, _ = next(batches(1))
    with pytest.raises(
        OSError, match="bytes in the folder host_path='.*none': No such"
    ):
        next(hosted(host_path=tmp_path / "none").embeddings.staged([ids]))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        OSError, match="No space left on device; give a folder of a loc"
    ):
        next(hosted(host_path=tmp_path).embeddings.staged([ids]))


def check_bits(rule, steps=40, device_rows=128):
    slots = padded_rows(2 * device_rows)
    here, there = Model(), hosted(device_rows=device_rows)
    optimizers = [sj.Optimizer(model, rule) for model in (here, there)]
    losses = [train(here, optimizers[0], *batch) for batch in batches(steps)]
    staged = there.embeddings.staged(batches(steps), optimizers[1])
    others = [train(there, optimizers[1], *batch) for batch in staged]
    np.testing.assert_array_equal(others, losses)
    assert there.embeddings.kernels["8_float32_host"].shape == (slots, 8)
    # Answers, whose rows are only read, change nothing.
    unseen = [(batch[0],) for batch in batches(5, seed=1)]
    for (ids,), (rows,) in zip(unseen, there.embeddings.staged(unseen), strict=True):
        np.testing.assert_array_equal(
            answer(there, optimizers[1], rows), answer(here, optimizers[0], ids)
        )
    for model, optimizer in zip((here, there), optimizers, strict=True):
        optimizer.flush(model)
    for table in "user", "item", "hour":
        np.testing.assert_array_equal(rows_of(there, table), rows_of(here, table))
    # Flushed, and then trained on.
    losses = [train(here, optimizers[0], *batch) for batch in batches(5, seed=2)]
    staged = there.embeddings.staged(batches(5, seed=2), optimizers[1])
    others = [train(there, optimizers[1], *batch) for batch in staged]
    np.testing.assert_array_equal(others, losses)


def trained(model, optimizer, steps, seed=0):
    staged = model.embeddings.staged(batches(steps, seed), optimizer)
    return [float(train(model, optimizer, *batch)) for batch in staged]


def test_rows_read_before_a_step_do_not_lose_its_update():
    here, there = Model(), hosted()
    optimizers = [sj.Optimizer(m, RULES["rowwise_adagrad"]) for m in (here, there)]
    losses = [float(train(here, optimizers[0], *b)) for b in batches(30)]
    found = []
    for batch in there.embeddings.staged(batches(30), optimizers[1]):
        for name in "user", "item":  # they share a stack, which is copied twice
            rows_of(there, name)
        found.append(float(train(there, optimizers[1], *batch)))
    assert found == losses
    for name in "user", "item":
        np.testing.assert_array_equal(rows_of(there, name), rows_of(here, name))


def test_a_new_optimizer_begins_with_a_new_state():
    here, there = Model(), hosted()
    for seed in range(2):
        optimizers = [sj.Optimizer(m, RULES["rowwise_adagrad"]) for m in (here, there)]
        losses = [float(train(here, optimizers[0], *b)) for b in batches(10, seed)]
        assert trained(there, optimizers[1], 10, seed) == losses


def test_tables_as_files_and_arrays(tmp_path):
    here, there = Model(), hosted()
    np.testing.assert_array_equal(rows_of(there, "item"), rows_of(here, "item"))
    rows = np.random.default_rng(0).normal(size=(ROWS, 8)).astype(np.float32)
    optimizers = [sj.Optimizer(m, RULES["sgd"]) for m in (here, there)]
    first = trained(there, optimizers[1], 3)
    assert first == [float(train(here, optimizers[0], *b)) for b in batches(3)]
    for model in here, there:
        model.embeddings.set_table("user", rows)
    losses = [float(train(here, optimizers[0], *b)) for b in batches(10, 1)]
    assert trained(there, optimizers[1], 10, 1) == losses
    for name, model in {"here": here, "there": there}.items():
        model.embeddings.save_table("user", tmp_path / f"{name}.npy")
    files = [np.load(tmp_path / f"{name}.npy") for name in ("here", "there")]
    np.testing.assert_array_equal(*files)
    with pytest.raises(ValueError, match="'user' is in host memory: read it by"):
        there.embeddings.table("user")


def test_no_recompilation():
    model = hosted()
    optimizer = sj.Optimizer(model, RULES["sgd"])
    trained(model, optimizer, 30)
    swap: Any = host_rows._swap
    before = swap._cache_size()
    trained(model, optimizer, 30, seed=1)
    assert swap._cache_size() == before


def test_a_batch_whose_rows_have_left_reads_nan():
    model = hosted()
    optimizer = sj.Optimizer(model, RULES["sgd"])
    (ids, _), *_ = model.embeddings.staged(batches(1), optimizer)
    assert np.isfinite(answer(model, optimizer, ids)).all()
    trained(model, optimizer, 10)
    assert np.isnan(answer(model, optimizer, ids)).all()


def test_a_batch_reads_nan_if_rows_are_replaced():
    model = hosted()
    optimizer = sj.Optimizer(model, RULES["sgd"])
    (ids, _), *_ = model.embeddings.staged(batches(1), optimizer)
    model.embeddings.set_table("user", np.ones((ROWS, 8), np.float32))
    assert np.isnan(answer(model, optimizer, ids)).all()


def test_a_batch_reads_nan_if_the_next_does_not_fit():
    tables = {
        "a": TableConfig(ROWS, 8, host=True, device_rows=128),
        "b": TableConfig(ROWS, 4, host=True, device_rows=128),
    }
    embeddings = sj.embeddings.EmbeddingCollection(
        tables, {"a": "a", "b": "b"}, rngs=nnx.Rngs(0)
    )
    few, many = np.arange(200, dtype=np.int32), np.arange(1000, 1200, dtype=np.int32)
    (before,) = embeddings.staged([{"a": few, "b": few}])
    order = [stack.name[0] for stack in embeddings.stacks]
    first, second = ("a", "b") if order == ["8", "4"] else ("b", "a")
    room = embeddings.stacks[1].kernel_rows
    large = {
        first: np.resize(many, room + 1),
        second: np.arange(room + 1, dtype=np.int32),
    }
    with pytest.raises(
        ValueError, match=f"of {room + 1:,} rows of the tables {second},"
    ):
        next(embeddings.staged([large]))
    concat = sj.jit(lambda embeddings, ids: embeddings.concat(ids))
    assert np.isnan(concat(embeddings, before)).any()


def test_nothing_is_made_for_padding(monkeypatch):
    model, seen, swap = hosted(), [], host_rows._swap

    def noted(*arguments, **options):
        *_, missing, _, known, _ = arguments
        padding = np.asarray(missing)[0, 2 : 2 + options["room"]] == -1
        seen.append((np.asarray(known)[padding], padding.any()))
        return swap(*arguments, **options)

    monkeypatch.setattr(host_rows, "_swap", noted)
    ids, _ = next(batches(1))
    ids["user"] = np.arange(1, 1 + BATCH, dtype=np.int32)
    next(model.embeddings.staged([ids]))
    ((known, some),) = seen
    assert some and known.all()


def test_errors():
    model = hosted(device_rows=4)  # 256 slots, the least there are
    optimizer = sj.Optimizer(model, RULES["sgd"])
    ids, target = next(batches(1))
    with pytest.raises(
        ValueError, match="user, item are in host memory, and a batch nee"
    ):
        model(ids)
    many = np.arange(300, dtype=np.int32)
    large = {**dict.fromkeys(FEATURES, np.full(300, -1, np.int32)), "user": many}
    with pytest.raises(
        ValueError, match="ids of 300 rows of the tables user, item, but"
    ):
        next(model.embeddings.staged([large], optimizer))
    # It can be cut.
    halves = [
        {n: v[part] for n, v in large.items()} for part in (slice(150), slice(150, 300))
    ]
    staged = model.embeddings.staged(halves)
    assert len([answer(model, optimizer, rows) for rows in staged]) == 2
    with pytest.raises(ValueError, match="'user'] 0 times, expected once"):
        next(model.embeddings.staged([target], optimizer))
    with pytest.raises(ValueError, match="'user'] 2 times, expected once"):
        next(model.embeddings.staged([(ids, ids)], optimizer))
    (rows,) = model.embeddings.staged([ids])
    with pytest.raises(ValueError, match="on the devices already"):
        next(model.embeddings.staged([rows]))
    with pytest.raises(
        ValueError, match="is a copy of one whose tables are in host mem"
    ):
        next(nnx.clone(model).embeddings.staged([ids]))
    with pytest.raises(ValueError, match="of which this collection has none"):
        next(Model().embeddings.staged([ids]))
    drifting = sj.Optimizer(model, RULES["adam"])
    with pytest.raises(ValueError, match="call flush outside of it"):
        sj.jit(lambda model, optimizer: optimizer.flush(model))(model, drifting)


def test_configurations():
    assert TableConfig(1000, 8, host=True).device_rows == 200
    assert TableConfig(1000, 8, host=True).placement == "rows"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"device_rows": 5}, "give host=True, too"),
        ({"host_path": "folder"}, "host_path='folder' is for tables in host memory"),
        ({"host": True, "device_rows": 1001}, "more than the 1,000 rows"),
        ({"host": True, "device_rows": 0}, "must be at least 1"),
        ({"host": True, "placement": "table"}, "always divided"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            TableConfig(1000, 8, **options)
    with pytest.raises(NotImplementedError, match="cannot be bfloat16"):
        TableConfig(1000, 8, host=True, dtype=jnp.bfloat16)


@pytest.mark.parametrize("devices", [1, 4])
def test_slots(devices):
    """Against lists of what was used when."""
    mesh = sj.make_mesh(data=1, model=devices) if devices > 1 else None
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        check_slots(devices)


def check_slots(devices):
    rng = np.random.default_rng(0)
    rows, slots = 8000, 1200
    owned, size = rows // devices, slots // devices
    table, used = Slots(rows, slots, devices), {}
    for step in range(40):
        wanted = np.minimum(rng.zipf(1.2, 300) - 1, rows - 1)
        wanted = np.append(wanted * 7919 % rows, -1).astype(np.int32)
        before = set(used)
        looked = table.look(wanted, training=step % 3 > 0)
        asked = table.wanted(looked)
        lacking = {*wanted.tolist()} - before - {-1}
        used |= dict.fromkeys(set(wanted.tolist()) - {-1}, step)
        if asked is None:
            assert not lacking
        else:
            given = [
                row + device * owned
                for device, mine in enumerate(asked.rows)
                for row in mine[mine >= 0].tolist()
            ]
            assert sorted(given) == given and set(given) == lacking
            take(table, asked, looked)
            table.give(asked)
        row = np.asarray(table.index.row).reshape(devices, size)
        here = row + owned * np.arange(devices)[:, None]
        there = np.where(row >= 0, here, -1).reshape(-1)
        for device in range(devices):  # those that were used last are there
            mine = [r for r in used if r // owned == device]
            mine.sort(key=lambda row: -used[row])
            kept = set(there[device * size : (device + 1) * size].tolist()) - {-1}
            assert len(kept) == min(size, len(mine))
            if len(mine) > size:
                last = used[mine[size - 1]]
                assert {r for r in mine if used[r] > last} <= kept
                for gone in set(mine) - kept:
                    del used[gone]
        found = np.asarray(table.find(looked.columns))
        np.testing.assert_array_equal(there[found[:-1]], wanted[:-1])
        assert found[-1] == -1
    for device, (_, mine) in enumerate(table.changed()):
        assert len(mine) and (mine // owned == device).all()
    many = np.arange(size + 1, dtype=np.int32)
    with pytest.raises(NoRoomError) as caught:
        table.wanted(table.look(many, training=True))
    assert caught.value.args == (size + 1, size)


def test_a_hand_passes_the_slots_of_a_large_table():
    """Rows leave the slots that it is at, and there those that were used longest ago."""
    half = 2**16  # as many as are looked at for a few rows
    table = Slots(4 * half, 2 * half, 1)

    def row_of_slots(rows):
        looked = table.look(rows.astype(np.int32), training=False)
        asked = table.wanted(looked)
        assert asked is not None
        take(table, asked, looked)
        table.give(asked)
        return np.asarray(table.index.row)

    for first in 0, half:
        before = row_of_slots(np.arange(first, first + half))
    assert sorted(before.tolist()) == list(range(2 * half))
    for at in 0, 1, 0:  # the hand comes around
        assert table.look(before[half * at : half * at + 9], training=False)
        new = np.arange(100) + before.max() + 1
        after = row_of_slots(new)
        (moved,) = np.nonzero(after != before)
        assert len(moved) == 100 and np.all(moved // half == at)
        assert np.all(moved - half * at >= 9)  # others were used just now
        before = after


def take(table, asked, looked):
    """Calls the index as `HostRows` does."""

    def part(index, missing):
        index, *_ = host_slots.taken(
            index,
            missing[0],
            room=asked.rows.shape[1],
            window=asked.window,
            training=looked.training,
        )
        return index

    lies = jax.P("model")
    program = jax.jit(
        lambda *arguments: on_each(part, (*arguments,), (lies, lies), lies)
    )
    table.index = program(table.index, looked.missing)


# --- dynamic tables ---

KEYS = np.random.default_rng(7).integers(0, 2**64, 4000, np.uint64)
KEYS[:2] = 0, 2**64 - 1


def dynamic_tables(*, hosted, **options):
    def table(rows, **more):
        if hosted:
            return DynamicTableConfig(rows // 8, 3, host_rows=rows, **options, **more)
        return DynamicTableConfig(rows, 3, **more)

    return {
        "user": table(1024, evict="lru"),
        "item": table(768, evict="lfu", time_to_live=9, admit=Admit(count=2)),
        "hour": TableConfig(24, 3),
        "place": DynamicTableConfig(1024, 2),  # always on the devices
    }


class Keyed(nnx.Module):
    def __init__(self, *, hosted, names=("user", "item", "hour", "place"), **options):
        tables = dynamic_tables(hosted=hosted, **options)
        features = {name: FeatureConfig(name, combiner="mean") for name in names}
        self.embeddings = sj.embeddings.EmbeddingCollection(
            {name: tables[name] for name in names}, features, rngs=nnx.Rngs(0)
        )

    def __call__(self, ids):
        return jnp.tanh(self.embeddings.concat(ids))


@sj.jit
def train_keyed(model, optimizer, ids, target):
    return train(model, optimizer, model.embeddings.assign_rows(ids, optimizer), target)


def keyed(steps, seed=0):
    """Draws batches in which users come and go, and items return."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        number = {
            "user": 90 * step + rng.integers(0, 110, (BATCH, 2)),
            "item": 30 * step + rng.integers(0, 40, (BATCH, 3)),
            "place": rng.integers(-1, 50, BATCH),
        }
        ids: dict[str, Any] = {
            name: WideIds.of(KEYS[some], mask=rng.random(some.shape) < 0.9)
            for name, some in number.items()
        }
        ids["hour"] = rng.integers(0, 24, BATCH).astype(np.int32)
        yield ids, rng.normal(size=(BATCH, 1)).astype(np.float32)


def trained_keyed(model, optimizer, steps, seed=0, first=0):
    names = model.embeddings.names
    some = itertools.islice(keyed(steps, seed), first, None)
    batches = (({n: ids[n] for n in names}, y) for ids, y in some)
    if any(stack.device_rows for stack in model.embeddings.stacks):
        batches = model.embeddings.staged(batches, optimizer)
    else:
        batches = ((model.embeddings.pack(ids), target) for ids, target in batches)
    return [float(train_keyed(model, optimizer, *batch)) for batch in batches]


def keyed_pair(rule, names=("user", "item", "hour", "place"), **options):
    models = (
        Keyed(hosted=False, names=names),
        Keyed(hosted=True, names=names, **options),
    )
    return [(model, sj.Optimizer(model, RULES[rule])) for model in models]


def made_by_a_program(rule, **options):
    """Makes a model in a compiled program, as runs do."""

    def make():
        model = Keyed(**options)
        return model, sj.Optimizer(model, RULES[rule])

    return nnx.jit(make)()


def test_static_tables_of_a_program():
    """A model that was made under `nnx.jit` has the rows of one that was not."""

    def make():
        table = TableConfig(200, 2, placement="rows", host=True, device_rows=16)
        features = {"user": FeatureConfig("user")}
        return sj.embeddings.EmbeddingCollection(
            {"user": table}, features, rngs=nnx.Rngs(0)
        )

    made = nnx.jit(make)()
    rows = np.concatenate(list(make().table_rows("user")))
    np.testing.assert_array_equal(np.concatenate(list(made.table_rows("user"))), rows)
    made = nnx.jit(make)()  # the same, but it is read before
    for ids in made.staged([{"user": np.arange(5, 10, dtype=np.int32)}]):
        np.testing.assert_array_equal(made.concat(ids), rows[5:10])
    assert np.any(rows)


def check_files(pair, folder, names=("user", "item", "place")):
    """Checks that both models write files with equal ids, rows and state."""
    for name in names:
        files = []
        for i, (model, optimizer) in enumerate(pair):
            optimizer.flush(model)
            path = folder / f"{name}{i}.parquet"
            model.embeddings.save_table(name, path, optimizer=optimizer)
            files.append(pq.read_table(path))
        assert files[0].num_rows > 40
        assert files[1].equals(files[0])


def test_bits_are_those_of_dynamic_tables_on_the_device(tmp_path):
    """An eighth of the rows is there; ids are new, evicted, let in late and come back."""
    pair = keyed_pair("adam", host_path=tmp_path)
    losses = [trained_keyed(*each, 25) for each in pair]
    assert losses[1] == losses[0]
    stats = [model.embeddings.stats() for model, _ in pair]
    assert stats[1] == stats[0]
    assert min(stats[0][name].evicted for name in ("user", "item")) > 5
    check_files(pair, tmp_path)


def test_bits_are_those_of_a_dynamic_table_on_the_device(tmp_path):
    pair = [
        made_by_a_program("rowwise_adagrad", hosted=hosted, names=["user"])
        for hosted in (False, True)
    ]
    losses = [trained_keyed(*each, steps=16) for each in pair]
    assert losses[1] == losses[0]
    assert pair[1][0].embeddings.stats()["user"].evicted > 0
    check_files(pair, tmp_path, ["user"])


@pytest.mark.parametrize("rule", ["rowwise_adagrad", "adam"])
def test_changes_of_dynamic_tables(rule, tmp_path, monkeypatch):
    """An eighth of the rows is on the device. A base with its changes are the tables.

    A copy of the model takes them, with rows in host memory and on the device.
    """
    names = ["user"]
    model, optimizer = made_by_a_program(rule, hosted=True, names=names)
    folder, told = tmp_path / "changes", []
    for number in range(4):
        if number == 2:  # from here on as after a restart
            monkeypatch.setattr(exports, "_memories", weakref.WeakKeyDictionary())
        if number == 3:  # rows are not copied, but written before the call returns
            monkeypatch.setattr(exports, "_HELD", 1000)
        trained_keyed(model, optimizer, 5 * number + 5, first=5 * number)
        running = sj.export_changes(model, folder, optimizer)
        if number == 3:
            assert running.done()
        told.append(running.result())
    assert [each.is_base for each in told] == [True, False, False, False]
    assert model.embeddings.stats()["user"].evicted > 5
    assert told[3].removed > 0
    if rule == "rowwise_adagrad":  # no other rows than those of these steps
        assert told[3].rows <= 5 * 2 * BATCH < model.embeddings.stats()["user"].rows
    again = sj.export_changes(model, folder, optimizer).result()
    assert again.rows == 0
    takers = [Keyed(hosted=hosted, names=names) for hosted in (True, False)]
    for taker in takers:
        sj.apply_changes(taker, folder)
    optimizer.flush(model)
    files = []
    for number, each in enumerate([model, *takers]):
        path = tmp_path / f"{number}.parquet"
        each.embeddings.save_table("user", path)
        files.append(path.read_bytes())
    assert files[1] == files[0] and files[2] == files[0]


def test_dynamic_rows_go_on_with_another_optimizer(tmp_path):
    """Rows that no batch has had since then decay, too. The first one's state is gone."""
    models = [Keyed(hosted=hosted, names=["user"]) for hosted in (False, True)]
    pairs = [[(m, sj.Optimizer(m, RULES[r])) for m in models] for r in ("sgd", "adamw")]
    losses = [trained_keyed(*each, steps=8) for each in pairs[0]]
    assert losses[1] == losses[0]
    with pytest.raises(ValueError, match="have the state of another optimizer"):
        check_files(pairs[1], tmp_path, ["user"])
    losses = [trained_keyed(*each, steps=3) for each in pairs[1]]
    assert losses[1] == losses[0]
    check_files(pairs[1], tmp_path, ["user"])


def test_dynamic_tables_are_read_and_loaded(tmp_path):
    names = ["user", "item"]
    pair = keyed_pair("rowwise_adagrad", names)
    losses = [trained_keyed(*each, 15) for each in pair]
    (here, its_own), (there, other) = pair
    unseen = [({n: ids[n] for n in names},) for ids, _ in keyed(3, seed=1)]
    for (ids,), (rows,) in zip(unseen, there.embeddings.staged(unseen), strict=True):
        np.testing.assert_array_equal(
            answer(there, other, rows), answer(here, its_own, here.embeddings.pack(ids))
        )
    check_files(pair, tmp_path, names)
    for i, (model, optimizer) in enumerate(pair):
        model.embeddings.load_table("user", tmp_path / "user0.parquet", optimizer)
        losses[i] += trained_keyed(model, optimizer, 5, seed=2)
    assert losses[1] == losses[0]


def test_bits_are_those_of_divided_dynamic_tables():
    with jax.set_mesh(sj.make_mesh(data=2, model=4)):
        pair = keyed_pair("rowwise_adagrad", ["user", "item"])
        losses = [trained_keyed(*each, 12) for each in pair]
    assert losses[1] == losses[0]


def test_new_rows_begin_although_a_batch_does_not_come(monkeypatch):
    """Its ids have rows from then on, and these are theirs."""
    ids, _ = next(keyed(1))
    many: dict[str, Any] = {n: np.full((300, 2), -1, np.int32) for n in ids} | {
        "hour": np.full(300, -1, np.int32)
    }
    many["user"] = WideIds.of(KEYS[:600].reshape(300, 2))

    def few(keys) -> dict[str, Any]:
        user = WideIds.of(keys.reshape(8, 2))
        return {n: user if n == "user" else x[:8] for n, x in many.items()}

    here, there = Keyed(hosted=False), Keyed(hosted=True)
    optimizer = sj.Optimizer(there, RULES["adam"])
    with pytest.raises(
        ValueError,
        match="of the tables user, item, but a device has r.*make num_rows larger",
    ):
        next(there.embeddings.staged([many], optimizer))
    assert (before := there.embeddings.stats()["user"].rows) > 500

    def full(*_):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(host_rows.HostRows, "bring", full)
        with pytest.raises(MemoryError):
            next(there.embeddings.staged([few(KEYS[600:616])], optimizer))
    assert there.embeddings.stats()["user"].rows > before + 8
    some = [few(KEYS[:16]), few(KEYS[600:616])]
    for ids, rows in zip(some, there.embeddings.staged(some), strict=True):
        np.testing.assert_array_equal(there(rows), here(ids))


def test_errors_of_dynamic_tables():
    model = Keyed(hosted=True)
    optimizer = sj.Optimizer(model, RULES["sgd"])
    batch = next(keyed(1))
    packed = model.embeddings.pack(batch[0])
    with pytest.raises(
        ValueError, match="user, item are in host memory, and a batch nee"
    ):
        train_keyed(model, optimizer, packed, batch[1])
    with pytest.raises(
        ValueError, match="user, item are in host memory, and a batch nee"
    ):
        model(packed)
    (rows,) = model.embeddings.staged([packed], optimizer)
    with pytest.raises(ValueError, match="number of steps, leave clock out"):
        model.embeddings.assign_rows(rows, optimizer, clock=3)


def test_configurations_of_dynamic_tables():
    config = DynamicTableConfig(1000, 8, host_rows=5000, host_path="folder")
    assert (config.num_rows, config.device_rows, config.host) == (5120, 1000, True)
    assert dataclasses.replace(config, dim=4).host_rows == 5120
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"host_rows": 999}, "host_rows=999 is below the 1,000 rows that the devices"),
        ({"host_rows": 0}, "host_rows must be at least 1"),
        ({"host": True}, r"DynamicTableConfig\(1000, 8, host_rows=...\)"),
        ({"host_path": "folder"}, r"DynamicTableConfig\(1000, 8, host_rows=...\)"),
        ({"host_rows": 5000, "device_rows": 9}, "beside host_rows leave them out"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            DynamicTableConfig(1000, 8, **options)
