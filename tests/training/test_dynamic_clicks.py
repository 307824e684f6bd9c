"""Click models with dynamic tables: data with 64-bit ids, `fit`, runs and the command."""

import dataclasses
import json
from typing import Any

import jax
import jaxprs
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.clicks import DLRMConfig, DynamicTables, WideDeep, WideDeepConfig
from sparsejax.data import ClickSchema, DenseColumn, HashedColumn, KeyColumn
from sparsejax.data.files.stored import id_lists
from sparsejax.embeddings.row_numbers import LastSeen
from sparsejax.engine.train import dispatch
from sparsejax.mesh import exchange
from sparsejax.wide_ids import NUM_IDS

SCHEMA = ClickSchema(
    "click",
    dense={"age": DenseColumn()},
    ids={"user": KeyColumn(), "item": KeyColumn(), "hour": HashedColumn(25)},
)
ROWS, BATCH = 200, 64
DYNAMIC = DynamicTables(num_rows=1024)
WIDE_DEEP = WideDeepConfig(dim=4, hidden=(8,), dynamic=DYNAMIC)
# One collection, where that one has two: its programs compile in half the time.
DLRM = DLRMConfig(dim=4, bottom=(4,), top=(4,), dynamic=DYNAMIC)


def columns(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    users = rng.integers(0, 50, rows)
    return {
        "click": (users + rng.integers(0, 20, rows)) % 2,
        "age": rng.random(rows),
        "user": users.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15),
        "item": [f"item {i}" for i in rng.integers(0, 30, rows)],
        "hour": rng.integers(0, 24, rows),
    }


@pytest.fixture(scope="module")
def clicks() -> sj.ClickDataset:
    return sj.read_clicks(pa.table(columns()), SCHEMA)


def new(clicks, config=DLRM, rule=None) -> tuple[Any, sj.Optimizer]:
    sizes = {"num_dense": 1, "features": clicks.num_ids}
    model = sj.clicks.build_click_model(config, **sizes, rngs=nnx.Rngs(0))
    # So do those of this rule, against Adam's.
    return model, sj.Optimizer(model, rule or sj.optimizers.adagrad(0.01))


def arrays_of(*modules):
    return jax.tree.map(np.asarray, nnx.state(modules))


def ids_of(clicks) -> list[int]:
    return np.asarray(clicks.ids["user"]).tolist()


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_ids_of_a_file(tmp_path):
    users = [7, 2**64 - 1, None, "ann", "18446744073709551616", "007", "-5", "7.0"]
    schema = ClickSchema("click", ids={"user": KeyColumn()})
    text = "click,user\n" + "".join(f"1,{'' if u is None else u}\n" for u in users)
    (tmp_path / "a.csv").write_text(text)
    found = sj.read_clicks(tmp_path / "a.csv", schema)
    ids = ids_of(found)
    # Of the empty text and of "ann", as other implementations of XXH64 have them.
    assert ids[:4] == [7, 2**64 - 1, 0xEF46DB3751D8E999, 811139115053772478]
    assert len({*ids}) == 7 and ids[7] == 7
    assert found.num_ids == {"user": NUM_IDS}
    numbers = pa.table({"click": [1, 1, 1], "user": pa.array(users[:3], pa.uint64())})
    pq.write_table(numbers, tmp_path / "a.parquet")
    of_numbers = sj.read_clicks(tmp_path / "a.parquet", schema)
    assert ids_of(of_numbers) == ids[:3]
    found.save(tmp_path / "saved.parquet")
    again = sj.ClickDataset.load(tmp_path / "saved.parquet")
    assert again.schema == schema and ids_of(again) == ids
    scanned = sj.data.scan_clicks(tmp_path / "saved.parquet", chunk_rows=3)
    assert [x for part in scanned.chunks() for x in ids_of(part)] == ids
    with pytest.raises(ValueError, match="a KeyColumn has one id an example"):
        sj.read_clicks([{"click": 1, "user": [7, 8]}], schema)


def test_fit_trains_as_a_loop_of_ones_own(clicks):
    model, optimizer = new(clicks, WIDE_DEEP)
    history = sj.fit(
        model, optimizer, clicks, batch_size=BATCH, num_epochs=2, shuffle=False
    )
    rates = [{n: e[n] for n in ("found", "refused", "evicted")} for e in history]
    assert rates[1] == {"found": 1.0, "refused": 0.0, "evicted": 0.0}
    # An example that fills up the last batch is none, and its ids do not count.
    counts = model.embeddings.indexes["4_float32_dynamic"]["count"][...]
    assert int(counts.sum()) == 2 * 2 * ROWS
    assert model.embeddings.ids("user").tolist() == sorted({*clicks.ids["user"]})

    other, its_own = new(clicks, WIDE_DEEP)

    @sj.jit
    def step(model, optimizer, dense, ids, labels):
        linear = model.linear.embeddings
        rows = model.embeddings.assign_rows(ids, optimizer, within=["embeddings"])
        more = linear.assign_rows(ids, optimizer, within=["linear", "embeddings"])
        both = sj.embeddings.FeatureBatch(
            rows.stacks | more.stacks, rows.keys | more.keys, assigned=True
        )

        def loss_fn(model):
            logits = model(dense, both)
            return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

        loss, grads = optimizer.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    for _ in range(2):
        for start in range(0, ROWS, BATCH):
            part = clicks.rows(slice(start, start + BATCH))
            ids = {
                name: sj.embeddings.WideIds.of(each)
                if each.dtype == np.uint64
                else each
                for name, each in part.ids.items()
            }
            step(other, its_own, part.dense, ids, part.labels)
    its_own.flush(other)
    np.testing.assert_allclose(
        sj.predict(model, clicks), sj.predict(other, clicks), rtol=1e-5
    )


def test_a_killed_fit_goes_on_to_the_bit(clicks, tmp_path):
    def fit(folder, num_epochs=3, **options):
        model, optimizer = new(clicks)
        sj.fit(
            model,
            optimizer,
            clicks,
            batch_size=BATCH,
            num_epochs=num_epochs,
            checkpoint_dir=tmp_path / folder,
            **options,
        )
        return arrays_of(model, optimizer)

    class KilledError(Exception):
        pass

    def kill(epoch):
        if epoch == 2:
            raise KilledError

    expected = fit("whole")
    with pytest.raises(KilledError):
        fit("killed", after_epoch=kill, checkpoint_seconds=0.0)
    assert_same(fit("killed", resume=True), expected)


@pytest.fixture(scope="module")
def many() -> sj.ClickDataset:
    """Draws clicks of more users than the devices have rows."""
    made = columns(640)
    users = np.arange(640) * 3 + np.random.default_rng(1).integers(0, 90, 640)
    made["user"] = users.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return sj.read_clicks(pa.table(made), SCHEMA)


def test_rows_in_host_memory_have_the_bits_of_the_device(many, tmp_path):
    """Also after a kill, in answers, and in a predictor."""
    here, there = (
        dataclasses.replace(
            DLRM,
            dynamic=DynamicTables(num_rows=rows, evict="lru", host_rows=host_rows),
        )
        for rows, host_rows in ((1024, None), (128, 1024))
    )
    batches: dict[str, Any] = {"batch_size": 64, "num_epochs": 2}

    def fit(config, folder=None, **options):
        model, optimizer = new(many, config)
        folder = None if folder is None else tmp_path / folder
        if folder is not None:
            options |= {"checkpoint_dir": folder, "checkpoint_seconds": 0.0}
        history = sj.fit(model, optimizer, many, **batches, **options)
        return model, optimizer, [epoch["loss"] for epoch in history]

    def kill(epoch):
        raise KeyError(epoch)

    on_device, _, losses = fit(here)
    with pytest.raises(KeyError):
        fit(there, "killed", after_epoch=kill)
    hosted, _, found = fit(there, "killed", resume=True)
    assert found == losses
    stats = [model.embeddings.stats() for model in (hosted, on_device)]
    assert stats[0] == stats[1]
    assert stats[0]["user"].evicted > 0
    models = hosted, on_device
    answers = [sj.predict(model, many, batch_size=64) for model in models]
    np.testing.assert_array_equal(answers[0], answers[1])
    sj.export_predictor(hosted, tmp_path / "clicks.predictor", names=many)
    predictor = sj.load_predictor(tmp_path / "clicks.predictor")
    np.testing.assert_allclose(predictor.predict(many), answers[0], rtol=1e-5)


def test_a_fit_goes_on_on_another_mesh(clicks, tmp_path):
    def fit(folder, num_epochs):
        model, optimizer = new(clicks, WIDE_DEEP, sj.optimizers.adam(0.01))
        how = {"batch_size": BATCH, "num_epochs": num_epochs, "resume": True}
        sj.fit(model, optimizer, clicks, checkpoint_dir=tmp_path / folder, **how)
        ids = {name: model.embeddings.ids(name) for name in ("user", "item")}
        return ids, sj.predict(model, clicks), model.embeddings.stats()

    with jax.set_mesh(sj.make_mesh(data=4, model=2)):
        fit("moved", 1)
    with jax.set_mesh(sj.make_mesh(data=2, model=4)):
        ids, found, stats = fit("moved", 2)
    expected = fit("one", 2)
    assert_same(ids, expected[0])
    np.testing.assert_allclose(found, expected[1], rtol=1e-4)
    assert stats == expected[2]


def test_keys_are_sent_before_the_steps(clicks, monkeypatch):
    """Distinct ones, and none of the examples that the last batch lacks."""
    sent, keys_sent = [], exchange.keys_sent

    def noted(*arguments, **options):
        sent.append(keys_sent(*arguments, **options))
        return sent[-1]

    monkeypatch.setattr(exchange, "keys_sent", noted)

    def fitted():
        model, optimizer = new(clicks)
        [epoch] = sj.fit(model, optimizer, clicks, batch_size=BATCH, num_epochs=1)
        ids = {name: model.embeddings.ids(name) for name in ("user", "item")}
        return epoch["loss"], ids, model.embeddings.stats()

    expected = fitted()
    with jax.set_mesh(sj.make_mesh(data=1, model=2, devices=jax.devices()[:2])):
        loss, *found = fitted()
    assert sent and None not in sent
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    assert_same(found, list(expected[1:]))


def sums_outside(jaxpr) -> list[str]:
    """Finds cumulative sums that a compiler may divide over a mesh."""
    found, whole = [], set()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "sharding_constraint":
            spec = equation.params["sharding"].spec
            # Axes behind those of the spec are whole, too.
            axes = equation.outvars[0].aval.ndim
            if axes and (len(spec) < axes or spec[-1] is None):
                whole.update(map(id, equation.outvars))
        elif name.startswith("cum"):
            if id(equation.invars[0]) not in whole:
                found.append(str(equation))
        elif name != "shard_map":
            for inner in jaxprs.inner(equation):
                found += sums_outside(inner)
    return found


def test_a_mesh_divides_no_sum_over_entries():
    """A GPU would take a step of a loop for each number of it."""
    ids = {"user": KeyColumn(), "tags": HashedColumn(20)}
    tags = id_lists(np.arange(20, dtype=np.int32), np.arange(21), 20)
    values = {"user": np.arange(20, dtype=np.uint64), "tags": tags}
    zeros = np.zeros(20, np.float32)
    schema = ClickSchema("click", {"age": DenseColumn()}, ids)
    data = sj.ClickDataset(zeros, zeros[:, None], values, schema, {})
    with jax.set_mesh(sj.make_mesh(data=1, model=2, devices=jax.devices()[:2])):
        program = sj.training.Program(*new(data))
        epochs = sj.training.Epochs(sj.training.place(data), batch_size=64)
        part = next(epochs.dispatches(0))
        arrays = [variable.get_raw_value() for variable in program.variables]
        how, *arguments, sizes = program._arguments(part, arrays)

        def steps(*arguments):
            return dispatch.run_steps[False](how, *arguments, sizes)

        assert not sums_outside(jax.make_jaxpr(steps)(*arguments).jaxpr)


def test_refused_ids_are_warned_of(clicks):
    small = DynamicTables(num_rows=1, evict=None)  # 256 rows, one in each part
    config = dataclasses.replace(WIDE_DEEP, dynamic=small)
    model, optimizer = new(clicks, config, sj.optimizers.adam(0.01))
    with pytest.warns(UserWarning, match="no room for .* ids, which are not learned"):
        (entry,) = sj.fit(model, optimizer, clicks, batch_size=BATCH, num_epochs=1)
    assert entry["refused"] > 0.001


def test_a_run_by_the_command(tmp_path, monkeypatch):
    from sparsejax.cli.main import main

    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table(columns()), "train.parquet")
    pq.write_table(pa.table(columns(seed=1)), "later.parquet")
    command = (
        "train train.parquet --run run --model wide_deep --label click --dense age"
    )
    flags = "--categories user item hour --dynamic 1024 --epochs 2 --batch-size 64"
    assert main([*command.split(), *flags.split()]) == 0
    run = sj.Run.load("run")
    network = run.settings.network
    assert isinstance(network, WideDeepConfig)
    assert network.dynamic == DynamicTables(num_rows=1024)
    assert {"found", "inserted", "refused", "evicted"} <= run.history[0].keys()
    before = run.model.embeddings.ids("user")
    assert len(before) == len(np.unique(columns()["user"]))
    assert run.evaluate("later.parquet")["log_loss"] > 0
    found = run.predict("later.parquet")
    words = ["export", "run", "a", "--unknown-ids", "zeros", "--batch-size", "1"]
    assert main(words) == 0
    run.export("b", unknown_ids="zeros", batch_size=1)
    run.export("c", batch_size=1)
    new = {"age": [0.5], "user": ["new"], "item": ["new"], "hour": ["new"]}
    zeros, same, begun = (sj.load_predictor(p).predict_records(new) for p in "abc")
    assert zeros == same != begun
    schema = ClickSchema(
        "click",
        dense={"age": DenseColumn()},
        ids=dict.fromkeys(("user", "item", "hour"), KeyColumn()),
    )
    again = sj.Run.train(
        "train.parquet",
        model="wide_deep",
        schema=schema,
        dynamic=1024,
        num_epochs=2,
        batch_size=64,
    )
    np.testing.assert_array_equal(again.predict("later.parquet"), found)
    run.train_more("later.parquet", num_epochs=1, decay="none")
    assert {*before} <= {*run.model.embeddings.ids("user")}


def test_the_command_plans_the_index(tmp_path, capsys):
    from sparsejax.cli.main import main

    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA.to_json()))
    command = f"plan --model dlrm --schema {path} --memory 141GB --dynamic"
    printed = []
    for rows in (1_000_000, 2_000_000):
        assert main([*command.split(), str(rows)]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] != printed[1]


def test_what_does_not_fit(clicks):
    options = {"num_dense": 1, "rngs": nnx.Rngs(0)}
    with pytest.raises(
        ValueError, match="'user' has ids of 64 bits: say how many rows"
    ):
        WideDeep(WideDeepConfig(), features=clicks.num_ids, **options)
    with pytest.raises(ValueError, match="but no feature has ids of 64 bits"):
        WideDeep(WIDE_DEEP, features={"hour": 25}, **options)
    with pytest.raises(ValueError, match="must be positive|at least 1"):
        DynamicTables(num_rows=0)
    with pytest.raises(TypeError, match="evict of DynamicTables .* which JSON can"):
        wrong: Any = LastSeen()
        DynamicTables(num_rows=9, evict=wrong)
    document = WIDE_DEEP.to_json()
    assert WideDeepConfig.from_json(document) == WIDE_DEEP
    with pytest.raises(ValueError, match="dynamic is of no use"):
        sj.Run.train(pa.table({"user": ["a"], "item": ["b"]}), dynamic=9)
