"""A service applies changes of tables while it answers requests."""

import contextlib
import json
import shutil

import numpy as np
import pytest
from flax import nnx
from served import Client, listening, tensor, until

import sparsejax as sj
from sparsejax.clicks import DynamicTables, WideDeep, WideDeepConfig
from sparsejax.data import ClickSchema, KeyColumn
from sparsejax.serving import logs
from sparsejax.serving.engine import Shape
from sparsejax.serving.service import Service, Settings


def test_a_service_takes_changes_without_a_restart(tmp_path, capsys):
    folder, path = tmp_path / "changes", tmp_path / "clicks.predictor"
    schema = ClickSchema("click", ids={"user": KeyColumn()})
    records = [{"click": n % 2, "user": f"u{n}"} for n in range(16)]
    clicks = sj.read_clicks(records, schema)
    config = WideDeepConfig(dim=4, hidden=(4,), dynamic=DynamicTables(num_rows=512))
    model = WideDeep(config, num_dense=0, features=clicks.num_ids, rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(model, sj.optimizers.adagrad(0.1))
    sj.export_predictor(model, path, names=clicks, batch_size=1)
    sj.load_predictor(path).save(path)  # with an answer, which is compared
    service = Service(
        "films", Settings(shapes=(Shape(1, 4),), changes=str(folder), max_wait=0)
    )
    service.load(path)  # there are no changes yet

    def asked(client):
        status, found = client.infer(tensor("user", "BYTES", ["u3"]))
        assert status == 200, found
        return found["probabilities"]["data"]

    def number(client):
        text = client.ask("GET", "/metrics")[2].decode()
        lines = [line.split() for line in text.splitlines()]
        return {name: float(value) for name, value in (x for x in lines if len(x) == 2)}

    def wait(client, name, least):
        until(lambda: number(client).get(name, 0) >= least)

    changing = service.changing
    assert changing is not None
    watch = lambda: changing.watch(lambda: service.predictor, 0.01)
    taken = "sparsejax_changes_number"
    refused = 'sparsejax_changes_total{result="refused"}'
    with contextlib.closing(service), listening(service, beside=watch) as port:
        client = Client(port)
        before = asked(client)
        for export in range(3):
            if export == 1:  # at a wrong place
                shutil.copytree(folder / "00000000", tmp_path / "copy")
                (tmp_path / "copy").rename(folder / "00000002")  # whole at once
                wait(client, refused, 1)
                assert number(client)[taken] == 0 and asked(client) == before
                shutil.rmtree(folder / "00000002")
            sj.fit(model, optimizer, clicks, batch_size=16, num_epochs=1)
            sj.export_changes(model, folder, optimizer).result()
            wait(client, taken, export)
            wait(client, 'sparsejax_changes_total{result="taken"}', export + 1)
            after = asked(client)
            expected = sj.predict(model, clicks)[3]
            np.testing.assert_allclose(after, expected, rtol=1e-6)
            assert after != before
            before = after
    # The answer in the file is that of before the changes, which a later start takes, too.
    later = Service("films", service.settings)
    with contextlib.closing(later):
        later.load(path)
        assert later.predictor is not None and later.predictor.taken.last is not None
        assert later.predictor.taken.last.number == 2
    logs.flush()
    lines = map(json.loads, capsys.readouterr().err.splitlines())
    told = [line for line in lines if line["event"] == "changes"]
    assert [line.get("number") for line in told if line["result"] == "taken"] == [
        0,
        1,
        2,
        2,
    ]
    wrong = [line["error"] for line in told if line["result"] == "refused"]
    assert wrong and "has the changes of number 0, expected 2" in wrong[0]


def test_models_without_such_tables_take_none(file, tmp_path):
    service = Service("films", Settings(changes=str(tmp_path)))
    with pytest.raises(ValueError, match="changes are for models of clicks"):
        service.made(file, "1")
