"""Reads folders of `sok.dump`, written here by an independent implementation of the format."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.embeddings import DynamicTableConfig, TableConfig
from sparsejax.embeddings.dynamic import files

ROWS, DIM = 40, 4
HOST = {"host": True, "device_rows": 16}
NUMBERS = {"int32": 0, "int64": 1, "uint32": 2, "uint64": 3, "float16": 4, "float32": 5}


def write(path, kind, values, slot="", table=""):
    """Writes a file in the format of `sok.dump`."""
    head = table.rjust(256).encode() + kind.to_bytes(4, "big")
    head += slot.rjust(32).encode() + NUMBERS[values.dtype.name].to_bytes(4, "big")
    path.write_bytes(head + values.tobytes())


def dump(folder, keys, rows, name="user_0", optimizer="", **slots):
    folder.mkdir(exist_ok=True)
    write(folder / f"{name}-key", 0, keys)
    write(folder / f"{name}-weight", 1, rows)
    for slot, values in slots.items():
        write(folder / f"{name}-{optimizer}-{slot}", 2, values, slot)


def meta(folder, rows, dim=DIM, name="user:0"):
    numbers = [n.to_bytes(4, "big") for n in (1, 1, 5, dim)] + [rows.to_bytes(8, "big")]
    (folder / "meta_info").write_bytes(
        b"".join(numbers) + name.rjust(256).encode() + b"SGD".rjust(32)
    )


def of(config, rule=None, step=0):
    x = sj.embeddings.EmbeddingCollection(
        {"user": config}, {"user": "user"}, rngs=nnx.Rngs(0)
    )
    optimizer = sj.Optimizer(x, rule or sj.optimizers.sgd(0.1))
    optimizer.step.set_value(jnp.int32(step))
    return x, optimizer


def columns_of(x, optimizer, path):
    x.save_table("user", path, optimizer=optimizer)
    table = pq.read_table(path)
    return {name: np.array(table[name].to_pylist()) for name in table.column_names}


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).random(shape, np.float32)


MODULO = np.concatenate([np.arange(first, ROWS, 3) for first in range(3)])
WIDE = np.random.default_rng(1).integers(0, 2**63 - 1, ROWS)


@pytest.mark.parametrize(
    ("config", "keys", "mesh"),
    [
        (TableConfig(ROWS, DIM, placement="rows"), MODULO, (2, 4)),
        (TableConfig(ROWS, DIM, placement="columns"), MODULO.astype(np.uint64), (1, 2)),
        (TableConfig(ROWS, DIM, **HOST), MODULO.astype(np.int32), None),
        (DynamicTableConfig(6000, DIM), WIDE, (1, 2)),
        (DynamicTableConfig(6000, DIM, host_rows=8000), WIDE, None),
    ],
    ids=["rows", "columns", "host", "dynamic", "dynamic_host"],
)
def test_rows_and_state(config, keys, mesh, tmp_path, monkeypatch):
    """Rows of three processes, in their order, on another mesh, some rows at a time."""
    monkeypatch.setattr(files, "BLOCK", 16)
    rows, m, v = (numbers(ROWS, DIM, seed=seed) for seed in range(3))
    dump(tmp_path / "d", keys, rows, optimizer="Adam", m=m, v=v)
    meta(tmp_path / "d", ROWS)
    sizes = {} if mesh is None else {"data": mesh[0], "model": mesh[1]}
    with jax.set_mesh(sj.make_mesh(**sizes)) if mesh else contextlib.nullcontext():
        x, optimizer = of(config, sj.optimizers.adam(0.1), step=7)
        x.load_table("user", tmp_path / "d", optimizer)
        found = columns_of(x, optimizer, tmp_path / "a.parquet")
    order = np.argsort(keys)
    want = {"id": keys, "row": rows, "state.mu": m, "state.nu": v}
    for name, values in want.items():
        np.testing.assert_array_equal(found[name], values[order], err_msg=name)
    assert (found["state.last_step"] == 7).all()


@pytest.mark.parametrize(
    ("rule", "name", "slots"),
    [
        ("sgd", "SGD", {}),
        ("adagrad", "Adagrad", {"accumulator": "sum_of_squares"}),
        ("ftrl", "Ftrl", {"accumulator": "n", "linear": "z"}),
        ("adadelta", "Adadelta", {"accum_grad": "e_g", "accum_var": "e_x"}),
        ("lazy_adam", "Adam", {"m": "mu", "v": "nu"}),
        ("adamax", "Adam", {"m": "mu", "v": "nu"}),
    ],
)
def test_the_state_of_each_rule(rule, name, slots, tmp_path):
    given = {slot: numbers(3, DIM, seed=n) for n, slot in enumerate(slots)}
    rows = numbers(3, DIM, seed=9).astype(np.float16)
    dump(tmp_path, np.arange(3), rows, name="t", optimizer=name, **given)
    x, optimizer = of(TableConfig(3, DIM), getattr(sj.optimizers, rule)(0.1), 2)
    x.load_table("user", tmp_path / "t", optimizer)  # the name of the table in it
    found = columns_of(x, optimizer, tmp_path / "a.parquet")
    np.testing.assert_array_equal(found["row"], rows)
    for slot, array in slots.items():
        np.testing.assert_array_equal(found[f"state.{array}"], given[slot])


def test_momentum_moves_rows_as_in_tensorflow(tmp_path):
    """There `a = momentum a - rate g` and `w += a`."""
    rows, a = numbers(3, DIM), numbers(3, DIM, seed=1)
    dump(tmp_path, np.arange(3), rows, optimizer="SGD", momentum=a)
    x, optimizer = of(TableConfig(3, DIM), sj.optimizers.momentum(0.5), 2)
    x.load_table("user", tmp_path, optimizer)

    trace = columns_of(x, optimizer, tmp_path / "a.parquet")["state.trace"]
    after = rows - 0.5 * (1 + 0.9 * trace)
    np.testing.assert_allclose(after, rows + 0.9 * a - 0.5, rtol=1e-6)


def test_single_keys_are_set(tmp_path):
    """A table without rows, and one of some rows, whose state begins."""
    x, optimizer = of(TableConfig(ROWS, DIM), sj.optimizers.adagrad(0.1), 2)
    before = np.asarray(x.table("user"))
    for keys in np.arange(0), np.array([30, 2]):
        rows = numbers(len(keys), DIM)
        dump(tmp_path, keys, rows)
        x.load_table("user", tmp_path, optimizer, replace=False)
        want = before.copy()
        want[keys] = rows
        np.testing.assert_array_equal(x.table("user"), want)


def test_damaged_folders(tmp_path):
    x, optimizer = of(TableConfig(ROWS, DIM), sj.optimizers.adam(0.1), 2)
    before = np.asarray(x.table("user"))
    keys, rows, state = np.arange(ROWS), numbers(ROWS, DIM), numbers(ROWS, DIM)
    key, weight, slot = (
        tmp_path / f"user_0-{end}" for end in ("key", "weight", "Adam-m")
    )

    def refused(message, file, error=ValueError, of=optimizer):
        with pytest.raises(error, match=message) as raised:
            x.load_table("user", tmp_path, of)
        assert str(file) in str(raised.value)
        np.testing.assert_array_equal(x.table("user"), before)
        dump(tmp_path, keys, rows, optimizer="Adam", m=state, v=state)

    refused("a folder without tables: expected files", tmp_path)
    for file in key, weight, slot:
        file.write_bytes(file.read_bytes()[:200])
        refused("is cut off: it has 200 bytes", file)
        file.write_bytes(file.read_bytes()[:-3])
        refused("is cut off, or its table has another width", file)
        file.write_bytes(file.read_bytes()[:-32])
        refused("is cut off$|but .* has 36 keys|has 40 keys", file)
        file.write_bytes(b"\0" * 400)
        refused("is damaged, or no file of sok.dump", file)
    write(weight, 1, rows, table="item")
    refused("its head has the table 'item'", weight)
    weight.unlink()
    refused("No such file", weight, FileNotFoundError)
    write(weight, 1, keys)
    refused("numbers of int64, expected float32", weight)
    write(key, 0, rows[:, 0])
    refused("numbers of float32, expected integers", key)
    write(key, 0, keys - 1)
    refused("id -1 is negative", key)
    write(key, 0, keys // 2)
    refused("the id 0 twice", key)
    write(key, 0, keys + 1)
    refused("has the id 40, but the table", tmp_path)
    write(slot, 2, state * np.nan, "m")
    refused("not finite", slot)
    meta(tmp_path, ROWS + 1)
    refused("is not of these files: .* 41 rows x 4", tmp_path / "meta_info")
    meta(tmp_path, ROWS, name="item")
    refused("it has nothing", tmp_path / "meta_info")
    (tmp_path / "meta_info").write_bytes(b"\xff" * 100)
    refused("is damaged: 100 bytes", tmp_path / "meta_info")
    (tmp_path / "meta_info").unlink()
    slot.unlink()
    refused(r"the state \['Adam-v'\] of user_0", tmp_path)
    refused("set optimizer.step", tmp_path, of=sj.Optimizer(x, optimizer.rule))
    for rule in sj.optimizers.adagrad(0.1), sj.optimizers.rmsprop(0.1):
        refused("not that of the rule", tmp_path, of=sj.Optimizer(x, rule))
    for file in key, weight, slot, slot.with_name("user_0-Adam-v"):
        file.unlink()
    dump(tmp_path, keys, rows, name="other")
    refused(r"has the tables \['other'\], and none of the name 'user'", tmp_path)
    dump(tmp_path, keys, rows, optimizer="SGD", momentum=state)
    for file in tmp_path.glob("*-Adam-*"):
        file.unlink()
    rule = sj.optimizers.momentum(lambda count: 0.1)
    refused("contains the learning rate", tmp_path, of=sj.Optimizer(x, rule))
    x.load_table("user", tmp_path, None)
    np.testing.assert_array_equal(x.table("user"), rows)
