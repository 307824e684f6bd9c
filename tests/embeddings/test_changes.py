"""Exports of changes, and models to which changes are applied."""

import dataclasses
import errno
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax import change_folders
from sparsejax.embeddings import DynamicTableConfig, TableConfig, exports

TABLES = {
    "user": DynamicTableConfig(512, 4, evict="lru"),
    "item": DynamicTableConfig(512, 4, evict="lfu"),
    "shop": TableConfig(40, 4, placement="replicated"),
    "city": TableConfig(30, 4, placement="columns"),
}
FEATURES = {"user": "user", "item": "item", "shop": "shop", "city": "city"}
# Most tests share one program: it has these tables, and this rule.
SOME = {name: TABLES[name] for name in ("user", "shop")}
RULE = sj.optimizers.adagrad(0.1)


class Clicks(nnx.Module):
    """A small click model."""

    def __init__(self, tables=None, seed=0):
        tables = SOME if tables is None else tables
        rngs = nnx.Rngs(seed)
        features = {name: FEATURES[name] for name in tables}
        self.embeddings = sj.embeddings.EmbeddingCollection(tables, features, rngs=rngs)
        self.last = nnx.Linear(self.embeddings.num_outputs, 1, rngs=rngs)

    def __call__(self, ids):
        return self.last(self.embeddings.concat(ids))[:, 0]


@sj.jit
def step(model, optimizer, ids, target):
    rows = model.embeddings.assign_rows(ids, optimizer)

    def loss_fn(model):
        return jnp.mean((model(rows) - target) ** 2)

    loss, grads = optimizer.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


class Training:
    """A training in which ids get rows and lose them."""

    def __init__(self, rule=None, tables=None):
        self.model = Clicks(tables)
        self.optimizer = sj.Optimizer(self.model, rule or RULE)
        self.rng, self.now = np.random.default_rng(0), 0

    def go_on(self, steps=4, batch=64):
        for _ in range(steps):
            self.now += 1
            wide = self.rng.integers(0, 300, batch) + 60 * self.now
            ids = {
                "user": wide.astype(np.uint64) * np.uint64(2**40 + 1),
                "item": wide,
                "shop": self.rng.integers(0, 40, batch).astype(np.int32),
                "city": self.rng.integers(0, 5, batch).astype(np.int32),
            }
            ids = {name: ids[name] for name in self.model.embeddings.names}
            target = self.rng.random(batch).astype(np.float32)
            packed = self.model.embeddings.pack(ids)
            step(self.model, self.optimizer, packed, target)

    def export(self, folder, **options):
        return sj.export_changes(self.model, folder, self.optimizer, **options).result()


def saved(model, optimizer, folder, *, state=False):
    """The bytes that `save_table` writes for each table, and the bytes of the other layers."""
    folder.mkdir()
    model, optimizer = nnx.clone((model, optimizer))
    if optimizer is not None:
        optimizer.flush(model)
    found = {}
    for name in model.embeddings.names:
        path, config = folder / f"{name}.parquet", TABLES[name]
        with_state = state and isinstance(config, DynamicTableConfig)
        options = {"optimizer": optimizer} if with_state else {}
        model.embeddings.save_table(name, path, **options)
        found[name] = path.read_bytes()
    found["last"] = np.asarray(model.last.kernel[...]).tobytes()
    return found


class History(typing.NamedTuple):
    """A training with six exports.

    Attributes:
      folder: of the changes.
      told: of each export.
      training: at its end.
      expected: what `saved` gives then.
    """

    folder: pathlib.Path
    told: list
    training: Training
    expected: dict


def exported(folder, tables=None):
    training, told = Training(tables=tables), []
    for _ in range(6):
        training.go_on()
        told.append(training.export(folder / "changes"))
    expected = saved(training.model, training.optimizer, folder / "expected")
    return History(folder / "changes", told, training, expected)


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("exported"))


def test_an_export_does_not_change_the_training(history):
    without = Training()
    without.go_on(24)
    arrays = [
        [np.asarray(a) for a in jax.tree.leaves(nnx.state((t.model, t.optimizer)))]
        for t in (history.training, without)
    ]
    for a, b in zip(*arrays, strict=True):
        np.testing.assert_array_equal(a, b)


def up_to(history, number, folder):
    """A folder with only the changes up to a number."""
    folder.mkdir()
    for each in range(number + 1):
        name = f"{each:08d}"
        os.symlink(history.folder / name, folder / name)
    return folder


def check_in_order(history, folder, tables=None):
    at_once = Clicks(tables, seed=1)
    assert sj.apply_changes(at_once, history.folder) == history.told[-1]
    assert saved(at_once, None, folder / "at once") == history.expected
    one_by_one, taken = Clicks(tables, seed=1), None
    for number in range(6):
        some = up_to(history, number, folder / str(number))
        taken = sj.apply_changes(one_by_one, some, after=taken)
        assert taken == history.told[number]
    assert sj.apply_changes(one_by_one, some, after=taken) == taken
    assert saved(one_by_one, None, folder / "one by one") == history.expected


def test_base_and_increments_in_order_are_the_tables(history, tmp_path):
    told = history.told
    assert [each.is_base for each in told] == [True] + [False] * 5
    assert [each.number for each in told] == list(range(6))
    stats = history.training.model.embeddings.stats()
    assert stats["user"].evicted
    assert any(each.removed for each in told[1:])
    check_in_order(history, tmp_path)


def test_onto_a_mesh(tmp_path):
    training = exported(tmp_path, TABLES)
    with jax.set_mesh(sj.make_mesh(data=2, model=4)):
        check_in_order(training, tmp_path, TABLES)


def test_on_a_mesh(tmp_path):
    tables = {name: TABLES[name] for name in ("item", "city")}
    with jax.set_mesh(sj.make_mesh(data=1, model=8)):
        training = exported(tmp_path, tables)
    assert training.training.model.embeddings.stats()["item"].evicted
    check_in_order(training, tmp_path, tables)


def test_only_what_was_touched_is_written(tmp_path):
    training = Training(tables={"user": TABLES["user"]})
    training.go_on()
    base = training.export(tmp_path / "changes")
    ids = training.model.embeddings.ids("user")
    assert base.rows == len(ids)
    assert training.export(tmp_path / "changes").rows == 0
    training.go_on(1)
    told = training.export(tmp_path / "changes")
    assert 0 < told.rows <= 64
    gone = np.setdiff1d(ids, training.model.embeddings.ids("user"))
    content = change_folders.read(tmp_path / "changes", told.number).content(0)
    assert content.removed.tolist() == gone.tolist()
    # Another folder knows nothing of that.
    assert training.export(tmp_path / "others").is_base
    collection = training.model.embeddings
    told = collection.export_changes(tmp_path / "alone", training.optimizer).result()
    other = Clicks({"user": TABLES["user"]}, seed=1)
    assert sj.apply_changes(other.embeddings, tmp_path / "alone") == told
    assert other.embeddings.ids("user").tolist() == collection.ids("user").tolist()
    # As after a restart: the rows of the folder are read, and none differs.
    assert other.embeddings.export_changes(tmp_path / "alone", None).result().rows == 0
    with pytest.raises(ValueError, match="of other tables"):
        sj.apply_changes(other, tmp_path / "alone")


@pytest.mark.parametrize("rule", ["adam", "rmsprop", "adagrad"])
def test_state_is_exported_and_goes_on(rule, tmp_path):
    rule = sj.optimizers.get(rule, learning_rate=0.1)
    training = Training(rule)
    for _ in range(3):
        training.go_on()
        told = training.export(tmp_path / "changes", state=True)
    expected = saved(training.model, training.optimizer, tmp_path / "a", state=True)
    other = Clicks(seed=1)
    optimizer = sj.Optimizer(other, rule)
    assert sj.apply_changes(other, tmp_path / "changes", optimizer) == told
    assert int(optimizer.step[...]) == told.steps == 12
    assert saved(other, optimizer, tmp_path / "b", state=True) == expected
    wrong = sj.Optimizer(other, sj.optimizers.ftrl(0.1))
    with pytest.raises(ValueError, match="the state .* of another rule"):
        sj.apply_changes(other, tmp_path / "changes", wrong)
    # Without state in the files rows begin anew.
    training.export(tmp_path / "without")
    sj.apply_changes(other, tmp_path / "without", optimizer)
    with pytest.raises(ValueError, match="needs the optimizer"):
        sj.export_changes(other, tmp_path / "changes", None, state=True)


def test_static_tables_go_on_under_weight_decay(tmp_path):
    """Their rows are as they were at the step of the export, and decay from there on."""
    rule = sj.optimizers.momentum(0.1, weight_decay=0.1)
    training, other = Training(rule), Clicks(seed=1)
    training.go_on(3)
    training.export(tmp_path / "changes", state=True)
    optimizer = sj.Optimizer(other, rule)
    sj.apply_changes(other, tmp_path / "changes", optimizer)
    expected = saved(training.model, training.optimizer, tmp_path / "a", state=True)
    assert saved(other, optimizer, tmp_path / "b", state=True) == expected


def test_a_training_goes_on_from_an_older_checkpoint(tmp_path):
    training = Training()
    training.go_on()
    training.export(tmp_path / "changes")
    checkpoint = jax.tree.map(
        np.asarray, nnx.state((training.model, training.optimizer))
    )
    training.go_on(8)
    training.export(tmp_path / "changes")
    again = Training()
    nnx.update((again.model, again.optimizer), jax.tree.map(jnp.asarray, checkpoint))
    again.now = 40  # other ids than before
    again.go_on(3)
    told = again.export(tmp_path / "changes")
    assert (told.number, told.is_base) == (2, False) and told.removed
    again.go_on(2)
    again.export(tmp_path / "changes")
    expected = saved(again.model, again.optimizer, tmp_path / "expected")
    other = Clicks(seed=1)
    sj.apply_changes(other, tmp_path / "changes")
    assert saved(other, None, tmp_path / "other") == expected


def test_many_changes_make_a_new_base(tmp_path, monkeypatch):
    monkeypatch.setattr(exports, "_MOST_CHANGES", 0.2)
    monkeypatch.setattr(exports, "_HELD", 0)
    training, follower = Training(), Clicks(seed=1)
    taken, told = None, []
    for number in range(8):
        training.go_on(2)
        told.append(training.export(tmp_path / "changes"))
        if number != 2:  # it may be late
            taken = sj.apply_changes(follower, tmp_path / "changes", after=taken)
    bases = [each.number for each in told if each.is_base]
    assert len(bases) > 2
    # The base before the last one is kept, for those that read it.
    assert change_folders.numbers(tmp_path / "changes")[0] == bases[-2]
    user = training.model.embeddings.ids("user")
    assert follower.embeddings.ids("user").tolist() == user.tolist()
    # Other tables, another base.
    narrow = Training(tables={"user": DynamicTableConfig(256, 2)})
    assert narrow.export(tmp_path / "changes").is_base


def test_changes_that_cannot_be_removed_stay(tmp_path):
    last = None
    for number in range(3):
        is_base = number == 0
        last = change_folders.write(
            tmp_path, last, is_base=is_base, steps=None, tables={}, values={}
        )
    cut("00000001/manifest.json")(tmp_path)
    assert last is not None
    change_folders.remove_before_base(tmp_path, last)
    assert change_folders.numbers(tmp_path) == [0, 1, 2]


def test_wrong_places_are_refused_at_once(tmp_path):
    model = Clicks({"shop": TABLES["shop"]})
    (tmp_path / "file").touch()
    for place in ("file", "none/changes"):
        with pytest.raises(OSError, match=place):
            sj.export_changes(model, tmp_path / place, None)
    sj.export_changes(model, tmp_path / "changes", None).result()
    half = Clicks({"shop": TABLES["shop"]})
    half.last.kernel.set_value(half.last.kernel[...].astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"'last.kernel' has the dtype .*bfloat16"):
        sj.apply_changes(half, tmp_path / "changes")


def remove(name):
    return lambda folder: shutil.rmtree(folder / name)


def move(*pairs):
    def moved(folder):
        for source, _ in pairs:
            (folder / source).rename(folder / f"{source} moved")
        for source, target in pairs:
            (folder / f"{source} moved").rename(folder / target)

    return moved


def cut(name):
    def cut(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return cut


def alter(name, at=30):
    def altered(folder):
        content = bytearray((folder / name).read_bytes())
        content[at] ^= 1
        (folder / name).write_bytes(content)

    return altered


def foreign(folder):
    """A change that belongs to another training."""
    link = change_folders.read(folder, 1)
    shutil.rmtree(folder / "00000002")
    other = dataclasses.replace(link, checksum="another")
    change_folders.write(folder, other, is_base=False, steps=None, tables={}, values={})


@pytest.mark.parametrize(
    ("harm", "message", "after"),
    [
        (remove("00000002"), "00000002 is missing: there is 00000003", 0),
        (remove("00000000"), "00000000 is missing", None),
        (
            lambda folder: shutil.copytree(folder / "00000003", folder / "00000004"),
            "00000004 has the changes of number 3, expected 4",
            3,
        ),
        (
            move(("00000001", "00000002"), ("00000002", "00000001")),
            "00000002 has the changes of number 1, expected 2",
            0,
        ),
        (foreign, "00000002 does not follow 00000001", 0),
        (cut("00000002/0.parquet"), "0.parquet has .* bytes, expected .*cut off", 0),
        (alter("00000002/0.parquet"), "0.parquet was altered", 0),
        (alter("00000003/values"), "values was altered", 0),
        (lambda f: (f / "00000003/values").unlink(), "values is missing", 0),
        (cut("00000003/manifest.json"), "manifest.json: .*copy it again", 0),
        (alter("00000003/manifest.json", 40), "manifest.json: ", 0),
        (remove("00000003"), "up to 00000002, but number 3 was taken", 3),
        (foreign, "00000002 is of another base, or was altered", 2),
        (foreign, "00000002 does not follow 00000001", None),
    ],
)
def test_wrong_sequences_are_refused(harm, message, after, history, tmp_path):
    folder = tmp_path / "changes"
    shutil.copytree(up_to(history, 3, tmp_path / "four"), folder)
    taken = None
    if after is not None:
        taken = change_folders.read(folder, after).changes
    harm(folder)
    model = history.training.model
    before = [np.asarray(a) for a in jax.tree.leaves(nnx.state(model))]
    with pytest.raises(ValueError, match=message) as error:
        sj.apply_changes(model, folder, after=taken)
    assert str(folder) in str(error.value)
    for a, b in zip(before, jax.tree.leaves(nnx.state(model)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_wrong_calls(history, tmp_path):
    with pytest.raises(ValueError, match="has no changes"):
        sj.apply_changes(Clicks(), tmp_path / "nothing")
    with pytest.raises(ValueError, match="no EmbeddingCollection"):
        sj.export_changes(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), tmp_path, None)
    small = {**SOME, "user": DynamicTableConfig(256, 4)}
    with pytest.raises(ValueError, match="one of 256 parts, of which each has 1 rows"):
        sj.apply_changes(Clicks(small), history.folder)
    wide = {**SOME, "shop": TableConfig(41, 4, placement="replicated")}
    with pytest.raises(ValueError, match="of other tables than the model"):
        sj.apply_changes(Clicks(wide), history.folder)


def test_numbers_that_are_not_finite_are_not_exported(tmp_path):
    training = Training()
    training.go_on()
    told = training.export(tmp_path / "changes")
    kernel = training.model.embeddings.kernels
    before = {name: each[...] for name, each in kernel.items()}
    for each in kernel.values():
        each.set_value(each[...] * jnp.nan)
    with pytest.raises(FloatingPointError, match="nothing was exported"):
        training.export(tmp_path / "changes")
    assert change_folders.numbers(tmp_path / "changes") == [0]
    for name, each in kernel.items():
        each.set_value(before[name])
    training.go_on()
    assert training.export(tmp_path / "changes").number == told.number + 1


def test_layers_that_are_not_finite(tmp_path, monkeypatch):
    tables, folder = {"shop": TABLES["shop"]}, tmp_path / "changes"
    model, other = Clicks(tables), Clicks(tables, seed=1)
    model.last.kernel.set_value(model.last.kernel[...] * jnp.nan)
    with pytest.raises(FloatingPointError, match=r"layer 'last.kernel' .* not finite"):
        sj.export_changes(model, folder, None).result()
    assert change_folders.numbers(folder) == []
    with monkeypatch.context() as patch:  # another writer
        patch.setattr(change_folders, "is_finite", lambda array: True)
        sj.export_changes(model, folder, None).result()
    before = [np.asarray(a) for a in jax.tree.leaves(nnx.state(other))]
    with pytest.raises(ValueError, match=r"'last.kernel' has numbers that are not"):
        sj.apply_changes(other, folder)
    for a, b in zip(before, jax.tree.leaves(nnx.state(other)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_full_disk_leaves_the_changes_before(tmp_path, monkeypatch):
    training = Training()
    training.go_on()
    training.export(tmp_path / "changes")
    training.go_on()
    names = sorted(os.listdir(tmp_path / "changes"))

    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(change_folders.row_files, "write", full)
        running = sj.export_changes(
            training.model, tmp_path / "changes", training.optimizer
        )
        with pytest.raises(OSError, match="No space left .*changes"):
            running.result()
        assert sorted(os.listdir(tmp_path / "changes")) == names
        sj.export_changes(training.model, tmp_path / "changes", training.optimizer)
        with pytest.raises(OSError, match="No space left"):  # nobody has asked
            training.export(tmp_path / "changes")
    training.export(tmp_path / "changes")
    other = Clicks(seed=1)
    sj.apply_changes(other, tmp_path / "changes")
    ids = training.model.embeddings.ids("user")
    assert other.embeddings.ids("user").tolist() == ids.tolist()


_WRITER = """
import sys, numpy as np, pyarrow as pa
from sparsejax import change_folders as folders
folder, rng = sys.argv[1], np.random.default_rng(int(sys.argv[2]))
table = folders.Table("user", 0, (folders.Column("row", "float32", 8),))
last = None
folders.pathlib.Path(folder).mkdir(exist_ok=True)
if found := folders.numbers(folder):
    last = folders.chain(folder)[-1]
while True:
    ids = np.unique(rng.integers(0, 10**6, 20_000, np.uint64))
    pieces = [(ids, [rng.random((len(ids), 8), np.float32)])]
    gone = np.setdiff1d(np.arange(0, 10**6, 50, dtype=np.uint64), ids)
    is_base = last is None or rng.random() < 0.1
    given = {table: (pieces, gone[:0] if is_base else gone)}
    last = folders.write(
        folder, last, is_base=is_base, steps=1, tables=given, values={"a": ids[:3]}
    )
    print(last.manifest.number, flush=True)
"""


def test_exports_that_are_killed_leave_the_changes_before(tmp_path):
    rng, folder = np.random.default_rng(0), tmp_path / "changes"
    written = -1
    for attempt in range(5):
        arguments = [sys.executable, "-c", _WRITER, str(folder), str(attempt)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            written = int(writer.stdout.readline())
            time.sleep(rng.random() * 0.3)
            writer.send_signal(signal.SIGKILL)
            lines = writer.stdout.read().split()
        written = max([written, *map(int, lines)])
        links = change_folders.chain(folder)
        # The last one may have appeared just before its number was told.
        assert links[-1].manifest.number - written in (0, 1)
        change_folders.merged(link.content(0) for link in links)
        assert links[-1].values()["a"].shape == (3,)
