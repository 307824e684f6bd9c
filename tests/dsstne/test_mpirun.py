"""Commands under Open MPI's `mpirun`, whose environment variables connect the processes."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import numpy as np

from sparsejax.cli.main import main
from sparsejax.dsstne.network_files import load_parameters

ROOT = pathlib.Path(__file__).parents[2]
TEXT = "ann\ttea,3:milk,1\nbob\tmilk\ncyd\ttea:rum:milk,7\n"
LAYERS = [
    {"N": "auto", "DataSet": "gl_input"},
    {"N": 4},
    {"Name": "Output", "N": "auto", "DataSet": "gl_output"},
]
TRAIN = "dsstne train -c config.json -i in.nc -o out.nc -e 10 -b 2 -alpha 1 -vi in.nc -vo out.nc -n"
PREDICT = "dsstne predict -d gl -i of_in -o of_out -r text -f filters -p 8.6f -n"
# A process joins the others once, so it trains and predicts.
PROGRAM = """
import sys
from sparsejax.cli.main import main
from sparsejax.dsstne import cli
status = main(sys.argv[1].split())
cli.run(sys.argv[2].split()[1:])
raise SystemExit(status)
"""


def under_mpirun(*argv):
    """Runs two processes with the variables that Open MPI 4 sets; returns their results."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    given = {
        "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://127.0.0.1:1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "JAX_COORDINATOR_PORT": str(port),
        "JAX_NUM_CPU_DEVICES": "1",
        "PYTHONPATH": str(ROOT),
    }
    started = []
    for rank in ("0", "1"):
        ranks = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *argv],
                env=os.environ | given | ranks,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(p.returncode, *texts) for p, texts in zip(started, said, strict=True)]


def errors(printed):
    return [float(number) for number in re.findall(r"error ([\d.]+)", printed)]


def test_two_processes_do_what_one_does(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "filters").write_text("ann\ttea,9\n")
    (tmp_path / "config.json").write_text(json.dumps({"Layers": LAYERS}))
    for kind in ("in", "out"):
        name = f"-d gl_{kind}put -o {kind}.nc -f of_{kind} -s samples"
        assert main(f"dsstne generateNetCDF {name} -i text -c".split()) == 0
    capsys.readouterr()
    assert main(f"{TRAIN} one.nc".split()) == 0
    assert main(f"{PREDICT} one.nc -s one".split()) == 0
    expected = errors(capsys.readouterr().out)
    before = {path.name for path in tmp_path.iterdir()}

    results = under_mpirun(f"{TRAIN} two.nc", f"{PREDICT} two.nc -s two")
    (status, printed, said), (other_status, nothing, other_said) = results
    assert status == other_status == 0, said + other_said
    np.testing.assert_allclose(errors(printed), expected, rtol=1e-5)
    assert len(expected) == 10 * 4 and nothing == ""
    made = {path.name for path in tmp_path.iterdir()} - before
    assert made == {"two.nc", "two.nc10.nc", "two"}
    (_, one), (_, two) = load_parameters("one.nc"), load_parameters("two.nc")
    for pair, array in one.weights.items():
        np.testing.assert_allclose(two.weights[pair], array, rtol=1e-4, atol=1e-6)
    alone, together = (
        re.split(r"([\d.]+):", (tmp_path / name).read_text()) for name in ("one", "two")
    )
    assert alone[::2] == together[::2]  # the names, and so the order
    one_scores, two_scores = (np.array(t[1::2], float) for t in (alone, together))
    np.testing.assert_allclose(two_scores, one_scores, atol=1e-5)


def test_open_mpi_5_needs_another_package(monkeypatch, capsys):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.delenv("OMPI_MCA_orte_hnp_uri", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["dsstne", "train", "-h"]) == 1
    assert "pip install mpi4py" in capsys.readouterr().err
