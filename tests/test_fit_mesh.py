"""The benchmark of meshes: each kind of training on CPU devices, and its predictions."""

import json
import math
import pathlib

import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def fit_mesh(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import fit_mesh

    return fit_mesh


def test_each_part_has_a_prediction(fit_mesh):
    results = fit_mesh.committed()
    known = {row["of_part"] for row in results}
    assert known <= fit_mesh.parts().keys()
    small = [part for part in fit_mesh.parts() if "items" not in part]
    for name, way, *numbers in map(str.split, small[::20]):
        devices, batch = map(int, numbers)
        expected = fit_mesh.predicted(results, name, way, devices, batch)
        assert 0 < expected < 1000 and math.isfinite(expected)


def test_a_prediction_shares_out_the_work_and_adds_what_crosses(fit_mesh):
    name, batch = "items-8M", 1024
    one, four = (fit_mesh.load(name, "model", n, batch) for n in (1, 4))
    assert one.wire == 0 and four.memory == one.memory / 4
    # Weights and state are read and written, slopes written and read, by float64's count.
    assert one.memory > 8e6 * 256 * 4 * 4 + 8e6 * batch * 4
    # Two sums [batch, 256] by a ring of four.
    assert four.summed == 2 * 1.5 * batch * 256 * 4
    measured = [{"of_part": f"{name} one 1 1024", "milliseconds": 40.0}]
    measured[0]["device"] = "NVIDIA H200"
    found = fit_mesh.predicted(measured, name, "model", 4, batch)
    np.testing.assert_allclose(found, 10 + four.wire)


@pytest.mark.parametrize(
    "part",
    [
        "items-8M model 8 1024",
        "epoch model 4 256",
        "dlrm-float32 model_narrow 4 65536",
        "dynamic model 2 65536",
        "dynamic model 8 65536",
        "hstu data_same 2 2048",
        "hstu data_same 8 2048",
        "sasrec model 2 4096",
        "gru data 2 2048",
        "own-exact model 2 512",
    ],
)
def test_a_part_trains_on_its_mesh(fit_mesh, part, capfd):
    assert part in fit_mesh.parts()
    (found,) = fit_mesh.measure(part)
    assert found["of_part"] == part and found["visible"] == 8
    assert found["milliseconds"] > 0 and found["predicted_milliseconds"] > 0
    losses = found["losses"]
    assert len(losses) == 4 and np.isfinite(losses).all() and losses[-1] < losses[0]
    assert found.get("same_bits_twice", True)
    said = capfd.readouterr().err
    assert 0 < said.index("predicted") < said.index("took")


def test_a_table_is_killed_and_goes_on_with_half_of_the_devices(fit_mesh, capfd):
    (found,) = fit_mesh.measure("big model 8 65536")
    assert found["devices_afterwards"] == 4
    assert 0 < found["resumed_at_step"] <= found["killed_after_step"]
    assert np.isfinite(found["losses"]).all()
    # What this process has trained begins behind the checkpoint, and goes to the end.
    said = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert 0 < said[0]["step"] - found["resumed_at_step"] <= 4
    assert said[-1]["epoch"] == found["epochs"]


def test_no_results_are_lost_or_awaited_in_vain(fit_mesh, monkeypatch, capsys):
    import report

    for flag, text in (("--only", "names none of"), ("--output", "of one operation")):
        monkeypatch.setattr("sys.argv", ["kernels.py", "run", flag, "add"])
        with pytest.raises(SystemExit):
            parts = {"add jax": {}, "sum jax": {}}
            report.command("", "kernels.py", parts, list, by_operation=True)
        assert text in capsys.readouterr().err
