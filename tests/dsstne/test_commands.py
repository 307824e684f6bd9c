"""DSSTNE's commands with the arguments that its users type."""

import gc
import json
import math
import os
import re
import signal
import subprocess
import sys

import dsstne_networks as networks
import netCDF4
import numpy as np
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.cli.main import main
from sparsejax.dsstne import generate, save_network, train
from sparsejax.dsstne.definition import Definition
from sparsejax.dsstne.network import Network
from sparsejax.dsstne.network_files import load_parameters

TEXT = "ann\ttea,3:milk,1\nbob\tmilk\ncyd\ttea:rum:milk,7\n"
NETWORK = {
    "ErrorFunction": "ScaledMarginalCrossEntropy",
    "ScaledMarginalCrossEntropy": {"oneTarget": 1.0, "zeroTarget": 0.0},
    "ShuffleIndices": False,
    "Layers": [
        {"Name": "Input", "N": "auto", "DataSet": "gl_input"},
        {"Name": "Hidden", "N": 4},
        {"Name": "Output", "N": "auto", "DataSet": "gl_output"},
    ],
}
TRAIN = "dsstne train -c config.json -i in.nc -o out.nc -n gl.nc"
PREDICT = (
    "dsstne predict -d gl -n gl.nc -i features -o items -r text -f filters -s recs"
)


def run(command):
    return main(command.split())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a text, its data sets, a network's JSON and a trained network."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "config.json").write_text(json.dumps(NETWORK))
    for kind in ("in", "out"):
        name = f"-d gl_{kind}put -o {kind}.nc -f of_{kind} -s samples"
        assert run(f"dsstne generateNetCDF {name} -i text -c") == 0
    return tmp_path


def written(**layers):
    document = {**NETWORK, "Layers": [dict(layer) for layer in NETWORK["Layers"]]}
    for layer, (name, keys) in zip(document["Layers"], layers.items(), strict=False):
        assert layer["Name"] == name
        layer.update(keys)
    return json.dumps(document)


def test_generate_writes_data_and_indices(folder, capsys):
    assert run("dsstne generateNetCDF -d gl_input -i text -o n.nc -f n -s m -c") == 0
    assert (folder / "of_in").read_text() == "tea\t0\nmilk\t1\nrum\t2\n"
    assert (folder / "samples").read_text() == "ann\t0\nbob\t1\ncyd\t2\n"
    assert "gl_input, 3 examples, 3 features, width 128" in capsys.readouterr().out
    (folder / "more").write_text("bob\tgin:tea\ndee\tgin\n")
    flags = "-d x -i more -o more.nc -f of_in -s samples"
    assert run(f"dsstne generateNetCDF {flags}") == 0
    with netCDF4.Dataset("more.nc") as file:  # gin is unknown, ann and cyd have no line
        assert file["sparseIndex0"][:].tolist() == [0]
        assert file["sparseEnd0"][:].tolist() == [0, 1, 1, 1]
    assert run(f"dsstne generateNetCDF {flags} -m -t analog") == 0
    with netCDF4.Dataset("more.nc") as file:
        assert file["sparseIndex0"][:].tolist() == [3, 0, 3]
        assert file["sparseData0"].dtype == np.float32
    assert (folder / "of_in").read_text().endswith("gin\t3\n")
    assert (folder / "samples").read_text().endswith("dee\t3\n")


# The buffer of the data is freed before the view of it that the error's frames hold.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["-c", "-m"])
@pytest.mark.parametrize("done", [0, 1, 2])
def test_generate_that_is_killed_is_repeated(folder, monkeypatch, how, done):
    """While its files appear, after some of them have."""
    (folder / "more").write_text("bob\tgin:tea\ndee\tgin\n")
    for copy in ("killed", "whole"):
        (folder / copy).mkdir()
        for name in ("of_in", "samples"):
            (folder / copy / name).write_bytes((folder / name).read_bytes())
    generated = (
        "dsstne generateNetCDF -d x -i more -o {0}/n -f {0}/of_in -s {0}/samples"
    )
    replace, turn = os.replace, iter(range(9))

    def killed(*paths):
        if next(turn) == done:
            raise OSError("as if killed")
        replace(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        assert run(f"{generated.format('killed')} {how}") == 1
    gc.collect()
    for copy in ("killed", "whole"):
        assert run(f"{generated.format(copy)} {how}") == 0
    for name in ("n", "of_in", "samples"):
        found = [(folder / copy / name).read_bytes() for copy in ("killed", "whole")]
        assert found[0] == found[1]
    assert len([*(folder / "killed").iterdir()]) == 3


def test_generate_that_fails_changes_nothing(folder, capsys, monkeypatch):
    (folder / "bare").write_text("dan\t\neve\t\n")
    (folder / "more").write_text("eve\tgin\n")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    flags = "-o in.nc -f of_in -s samples"
    # A text of samples without features, over old files.
    assert run(f"dsstne generateNetCDF -d gl_input -i bare {flags} -c") == 1
    assert "bare: no sample has a feature" in capsys.readouterr().err
    # A data set whose name cannot be written.
    assert run(f"dsstne generateNetCDF -d x\0y -i more {flags} -m") == 1
    # The last file cannot be written: another process took its folder away.
    monkeypatch.setattr(generate, "check_writable", lambda path: None)
    flags = flags.replace("samples", "gone/samples")
    assert run(f"dsstne generateNetCDF -d gl_input -i more {flags} -m") == 1
    assert "gone/samples" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(("bias", "error"), [(0.0, 128 * math.log(2)), (-10.2, None)])
def test_the_error_of_weights_that_are_0(folder, capsys, bias, error):
    init = {"Scheme": "Constant", "Scale": 0.0}
    output = {"WeightInit": {**init, "Bias": bias}}
    (folder / "config.json").write_text(
        written(Input={}, Hidden={"WeightInit": init}, Output=output)
    )
    assert run(f"{TRAIN} -alpha 0 -e 1 -b 2") == 0
    if error is None:
        a = 1 / (1 + math.exp(10.2))
        error = -(6 * math.log(a) + (3 * 128 - 6) * math.log(1 - a)) / 3
    line = capsys.readouterr().out.splitlines()[-1]
    found = re.fullmatch(
        r"NNNetwork::Train: Epoch 1, average error ([\d.]+), average training error "
        r"([\d.]+), average regularization error 0.000000, elapsed time [\d.]+s",
        line,
    )
    assert found is not None, line
    assert float(found[1]) == float(found[2]) == pytest.approx(error, rel=1e-5)


def test_train_writes_networks_and_predict_reads_them(folder, capsys):
    (folder / "items").write_text("rum\t2\ntea\t0\nmilk\t1\n")
    (folder / "features").write_text((folder / "of_in").read_text())
    (folder / "filters").write_text("ann\ttea,999\n")
    assert run(f"{TRAIN} -b 2 -e 11 -alpha 5 -lambda 0.001") == 0
    assert {p.name for p in folder.glob("*.nc")} == {
        *("in.nc", "out.nc", "gl.nc", "gl.nc10.nc", "initial_network.nc")
    }
    errors = re.findall(r"training error ([\d.]+)", capsys.readouterr().out)
    assert len(errors) == 11 and float(errors[-1]) < 0.2 * float(errors[0])
    initial, _ = load_parameters("initial_network.nc")
    assert initial.layer("Input").sparse and initial.layer("Output").units == 128
    with netCDF4.Dataset("initial_network.nc") as file:  # as the user guide's listing
        assert file.getncattr("version") == np.float32(0.9)
        for name, value in {
            "layers": np.uint32(3),
            "weights": np.uint32(2),
            "weight0_width": np.uint64(4),
            "weight0_height": np.uint64(128),
            "layer1_Nx": np.uint32(4),
            "weight1_width": np.uint64(128),
        }.items():
            found = file.getncattr(name)
            assert found == value and found.dtype == value.dtype, name
        assert file["weight0_weights"].dtype == np.float32
        largest, limit = abs(file["weight0_weights"][:]).max(), math.sqrt(6 / 132) / 2
        assert file["weight0_weights"].shape == (512,)
        assert 0.95 * limit < largest <= np.float32(limit)
    assert run(f"{PREDICT} -k 5 -p 6.4f") == 0
    lines = (folder / "recs").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["ann", "bob", "cyd"]
    names = [re.findall(r"(\w+),\s*([\d.]+):", line) for line in lines]
    assert {name for name, _ in names[0]} == {"milk", "rum"}  # tea is filtered
    assert {name for name, _ in names[1]} == {"milk", "rum", "tea"}  # not the padding
    scores = [float(score) for _, score in names[1]]
    assert scores == sorted(scores, reverse=True)
    before = (folder / "gl.nc").read_bytes()
    for more in ("", " -resume"):
        assert run(f"{TRAIN}{more}") == 1  # the flags are others
        assert "gl.nc: already exists" in capsys.readouterr().err
    # As after a kill at the very end, when the checkpoints were gone.
    assert run(f"{TRAIN} -b 2 -e 11 -alpha 5 -lambda 0.001 -resume") == 0
    assert (folder / "gl.nc").read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "u\tp,0.682:q,0.614:r,0.098:\n"),
        ("-t analog", "u\tp,0.700:q,0.682:r,0.069:\n"),
        ("-k 1", "u\tp,0.682:\n"),
        ("-multiply", "u\tq,1.227:p,0.682:r,0.000:\n"),
        ("-multiply -k 1", "u\tq,1.227:\n"),
        ("-l Hidden", "u\t0.881 0.731\n"),
        ("-k 1 -p-7.2lf", "u\tp,0.68   :\n"),
        ("-k 1 -p -8.3f", "u\tp,0.682   :\n"),
        ("-k 1 -p +.1e", "u\tp,+6.8e-01:\n"),
        ("-k 1 -p 07.3f", "u\tp,000.682:\n"),
        ("-k 1 -p f", "u\tp,0.681700:\n"),
    ],
)
def test_predict_gives_the_scores_of_a_file(folder, flags, expected):
    networks.tiny(folder / "gl.nc")
    (folder / "features").write_text("a\t0\nb\t1\nc\t2\nd\t3\n")
    (folder / "items").write_text("p\t0\nq\t1\nr\t2\n")
    (folder / "text").write_text("u\ta,0.5:c,2\n")
    filters = "u\tq,2:r\n" if "-multiply" in flags else "w\tp\n"
    (folder / "filters").write_text(filters)
    assert run(f"{PREDICT} {flags}") == 0
    assert (folder / "recs").read_text() == expected


@pytest.mark.parametrize("flags", ["", "-multiply"])
def test_nothing_is_recommended_for_a_hole_of_an_index(folder, flags):
    """As in DSSTNE's own tests, whose indices need not have every number."""
    networks.tiny(folder / "gl.nc")
    (folder / "features").write_text("a\t0\nc\t2\n")
    (folder / "items").write_text("q\t1\nr\t2\n")
    (folder / "text").write_text("u\ta,0.5:c,2\n")
    (folder / "filters").write_text("w\tq,1\n")
    assert run(f"{PREDICT} {flags}") == 0
    assert (folder / "recs").read_text() == "u\tq,0.614:r,0.098:\n"


def test_new_names_get_numbers_behind_the_holes(folder, capsys):
    (folder / "f").write_text("milk\t5\ntea\t2\n")
    (folder / "s").write_text("dan\t1\n")
    (folder / "more").write_text("ann\ttea:rum\ndan\tmilk\n")
    command = "dsstne generateNetCDF -d x -i more -o x.nc -f f -s s -m"
    assert run(command) == 0
    said = capsys.readouterr()
    assert "1 samples of the index have no line and get an empty row" in said.err
    assert "x.nc: x, 3 examples, 3 features, width 128" in said.out
    assert sorted((folder / "f").read_text().split("\n")) == [
        "", "milk\t5", "rum\t6", "tea\t2"
    ]  # fmt: skip
    assert (folder / "s").read_text() == "dan\t1\nann\t2\n"
    data = sj.dsstne.read_datasets(
        folder / "x.nc", features=folder / "f", samples=folder / "s"
    )
    rows = data["x"].to_scipy().toarray()
    assert rows.shape == (3, 128)
    assert [np.flatnonzero(row).tolist() for row in rows] == [[], [5], [2, 6]]


def test_predict_reads_what_cannot_be_trained(folder, capsys):
    """And `train` refuses it, before it writes anything."""
    networks.tiny(
        folder / "gl.nc", deltaBoost_one=np.float32(30), errorFunction=np.uint32(3)
    )
    inputs = [{"N": 4, "DataSet": "gl_input", "Sparse": True, "Kind": "Input"}] * 2
    twice = Definition.from_json(
        {"Layers": [*inputs, {"N": 3, "Source": ["Input0", "Input1"]}]}
    )
    save_network(folder / "twice.nc", Network(twice, rngs=nnx.Rngs(0)))
    (folder / "features").write_text("a\t0\nb\t1\nc\t2\nd\t3\n")
    (folder / "items").write_text("p\t0\nq\t1\nr\t2\n")
    (folder / "text").write_text("u\ta:c\n")
    (folder / "filters").write_text("")
    assert run(PREDICT) == 0
    assert (folder / "recs").read_text() == "u\tp,0.682:q,0.614:r,0.098:\n"
    for flags in ("", "-multiply"):
        assert run(f"{PREDICT.replace('gl.nc', 'twice.nc')} {flags}") == 0
        assert (folder / "recs").read_text().count(":") == 3
    config = {**NETWORK, "DeltaBoost": {"one": 30}}
    (folder / "config.json").write_text(json.dumps(config))
    before = {path.name for path in folder.iterdir()}
    assert run(TRAIN.replace("gl.nc", "new.nc")) == 1
    assert "DeltaBoost" in capsys.readouterr().err
    assert {path.name for path in folder.iterdir()} == before


def test_predict_ranks_the_output_called_output(folder):
    layers = [
        {"Name": "x", "N": 3, "DataSet": "gl_input", "Sparse": True},
        {"Name": "h", "N": 2},
        {"Name": "first", "Kind": "Output", "N": 2, "DataSet": "a"},
        {"Name": "Output", "Kind": "Output", "Source": "h", "N": 3, "DataSet": "b"},
    ]
    for number, shown in enumerate(
        (layers, [layers[0], layers[1] | {"Kind": "Hidden"}])
    ):
        definition = Definition.from_json({"Layers": shown})
        network = Network(definition, rngs=nnx.Rngs(0))
        save_network(folder / f"{number}.nc", network)
    (folder / "items").write_text("p\t0\nq\t1\nr\t2\n")
    (folder / "filters").write_text("")
    command = PREDICT.replace("features", "of_in")
    assert run(command.replace("gl.nc", "0.nc")) == 0
    assert (folder / "recs").read_text().count(":") == 3 * 3
    # A network without outputs has layers that can be written.
    without = command.replace("gl.nc", "1.nc")
    assert run(without) == 1
    assert run(f"{without} -l h") == 0
    assert (
        len((folder / "recs").read_text().splitlines()[0].split("\t")[1].split()) == 2
    )


# Trains, saves after each epoch, and is killed at the end of the third.
KILLED = """
import os, signal, sys
from sparsejax.cli.main import main
from sparsejax.dsstne import generate, train

train.CHECKPOINT_SECONDS = 0
note = train.Training.note

def killed(self, step, entry):
    if entry["epoch"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    note(self, step, entry)

train.Training.note = killed
main(sys.argv[1:])
"""


def test_a_training_that_was_killed_goes_on_with_the_same_bits(folder, monkeypatch):
    command = f"{TRAIN} -b 2 -e 5 -alpha 1 -optimizer nesterov"
    assert run(command) == 0
    whole = (folder / "gl.nc").read_bytes()
    (folder / "gl.nc").unlink()
    before = {path.name for path in folder.iterdir()}
    python = [sys.executable, "-c", KILLED, *command.split()]
    assert subprocess.run(python, check=False).returncode == -signal.SIGKILL
    assert {p.name for p in folder.iterdir()} - before == {"gl.nc.checkpoints"}
    with monkeypatch.context() as patched:
        # Stopped again, between its last two steps: the network is written, and then the
        # checkpoints are removed.
        patched.setattr(train, "remove_folder", interrupt)
        assert run(f"{command} -resume") == 130
    assert (folder / "gl.nc").read_bytes() == whole
    assert run(f"{command} -resume") == 0
    assert (folder / "gl.nc").read_bytes() == whole
    assert not (folder / "gl.nc.checkpoints").exists()


def interrupt(path):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "optimizer", ["momentum", "adagrad", "nesterov", "rmsprop", "adadelta", "adam"]
)
def test_every_optimizer_trains(folder, capsys, optimizer):
    assert run(f"{TRAIN} -e 3 -optimizer {optimizer} -mu 0.5 -mu1 0.9 -alpha 0.1") == 0
    errors = re.findall(r"training error ([\d.]+)", capsys.readouterr().out)
    assert float(errors[-1]) < float(errors[0])


@pytest.mark.parametrize(
    ("flags", "mu", "mu1"),
    [
        ("", 0.5, 0),
        ("-optimizer nesterov", 0.5, 0),
        ("-optimizer rmsprop -mu 0.7", 0.7, 0),
        ("-optimizer adam", 0.9, 0.999),
        ("-optimizer adam -mu 0.5", 0.5, 0.999),
        ("-mu1 0 -optimizer adam", 0.9, 0),
    ],
)
def test_the_decay_rates_of_optimizers(folder, monkeypatch, flags, mu, mu1):
    found = []
    monkeypatch.setattr(train, "train", found.append)
    assert run(f"{TRAIN} {flags}") == 0
    assert (found[0].mu, found[0].mu1) == (mu, mu1)


def test_the_error_of_validation_data(folder, capsys):
    assert run(f"{TRAIN} -alpha 0 -e 2 -b 2 -vi in.nc -vo out.nc") == 0
    printed = capsys.readouterr().out
    trained = re.findall(r"training error ([\d.]+)", printed)
    measured = re.findall(r"validation error ([\d.]+)", printed)
    np.testing.assert_allclose(
        [*map(float, trained)], [*map(float, measured)], rtol=1e-5
    )
    assert len(measured) == 2
    assert run(f"{TRAIN} -vi in.nc") == 2


def test_a_mesh_gives_the_same(folder, capsys):
    lines = []
    for number, flags in enumerate(("", "-mesh data=1,model=8")):
        assert run(f"{TRAIN}{number} -e 3 -b 64 -alpha 1 {flags}") == 0
        lines.append(capsys.readouterr().out.splitlines()[-3:])
    plain, meshed = (
        [float(n) for line in some for n in re.findall(r"error ([\d.]+)", line)]
        for some in lines
    )
    np.testing.assert_allclose(plain, meshed, rtol=1e-5)
    _, one = load_parameters("gl.nc0")
    _, two = load_parameters("gl.nc1")
    for pair, array in one.weights.items():
        np.testing.assert_allclose(two.weights[pair], array, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("dsstne generateNetCDF -d x -i text -o a -f of_in -s samples -c -m", "-c makes"),
        ("dsstne generateNetCDF -d x -i no -o a -f of_in -s samples", "no: no such file"),
        ("dsstne train -c config.json -i in.nc -o in.nc -n new", "'gl_output'"),
        ("dsstne train -c no.json -i in.nc -o out.nc -n new", "no.json: No such file"),
        ("dsstne train -c text -i in.nc -o out.nc -n new", "text: not JSON"),
        ("dsstne train -c config.json -i in.nc -o text -n new", "text: is no NetCDF-4"),
        ("dsstne train -c config.json -i in.nc -o out.nc -n no/new", "no folder no"),
        ("dsstne train -c config.json -i in.nc -o more.nc -n new", "has 4 examples"),
        (
            "dsstne train -c wide.json -i in.nc -o out.nc -n new",
            "layer 'Input': its data set 'gl_input' is 128, wider than the layer",
        ),
        (PREDICT.replace("-d gl", "-d other"), "data set 'other_input'"),
        (PREDICT.replace("-n gl.nc", "-n in.nc"), "so it holds no network of DSSTNE"),
        (PREDICT.replace("-i features", "-i of_many"), "has 4 units"),
        (f"{PREDICT} -p 4.3d", "-p 4.3d is no format"),
        (f"{PREDICT} -p 4.3f%s", "is no format"),
        (f"{PREDICT} -p ,.3f", "is no format"),
        (f"{PREDICT} -mesh data=x", "-mesh"),
        (PREDICT.replace("-i features", "-i holes"), "of the numbers 0 to 500 have no name"),
        (PREDICT.replace("-r text", "-r wrong -t analog"), "wrong:2: "),
        ("dsstne generateNetCDF -d x -i wrong -o a -f f -s s -c -t analog", "wrong:2: "),
        ("dsstne generateNetCDF -d x -i spaces -o a -f f -s s -c", "no line has a TAB"),
        (PREDICT.replace("-r text", "-r spaces"), "spaces: no line has a TAB"),
        (PREDICT.replace("-f filters", "-f spaces"), "spaces: no line has a TAB"),
        ("dsstne train -c huge.json -i in.nc -o out.nc -n new", "huge.json: the weights"),
        (
            "dsstne train -c large.json -i in.nc -o out.nc -n new -optimizer adam",
            "large.json: the weights would take",
        ),
        (f"{PREDICT} -l Hiden", "-l Hiden: the layers are Input, Hidden, Output"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(folder, capsys, command, message):
    networks.tiny(folder / "gl.nc")
    (folder / "features").write_text("a\t0\nb\t1\nc\t2\nd\t3\n")
    (folder / "of_many").write_text("".join(f"{n}\t{n}\n" for n in range(5)))
    (folder / "items").write_text("p\t0\nq\t1\nr\t2\n")
    (folder / "filters").write_text("w\tp\n")
    (folder / "wide.json").write_text(written(Input={"N": 3}))
    (folder / "huge.json").write_text(written(Input={}, Hidden={"N": 2**31 - 1}))
    # The weights take 35 % of the memory; Adam needs this four times.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    large = {"N": int(0.35 * memory / (4 * 2 * 128))}
    (folder / "large.json").write_text(written(Input={}, Hidden=large))
    (folder / "holes").write_text("a\t0\nc\t500\n")
    (folder / "wrong").write_text("u\ta,1\nv\ta,1:b,nan\n")
    (folder / "spaces").write_text("Example1    Feature1,123\n\nExample2 Feature2\n")
    (folder / "four").write_text("".join(f"{n}\ttea\n" for n in range(4)))
    run("dsstne generateNetCDF -d gl_output -i four -o more.nc -f f4 -s s4 -c")
    capsys.readouterr()
    before = {p.name for p in folder.iterdir()}
    assert run(command) == 1
    *warnings, error = capsys.readouterr().err.splitlines()
    assert all(line.startswith("sparsejax: warning: ") for line in warnings)
    assert error.startswith("sparsejax: error: ") and message in error
    assert {p.name for p in folder.iterdir()} == before


def test_an_unknown_flag_is_wrong_usage(folder, capsys):
    assert run(f"{TRAIN} -momentum 0.5") == 2
    assert "-momentum" in capsys.readouterr().err
    assert run(f"{TRAIN} -alpha nan") == 2
    assert run(f"{TRAIN} -alpha 0.025g") == 2
    # As C reads it: what is wrong here is the file.
    assert run(f"{TRAIN.replace('config.json', 'no.json')} -alpha 0.025f -mu .5F") == 1
    assert "no.json: No such file" in capsys.readouterr().err
    assert run(f"{PREDICT} -k 0") == 2
    assert "must be at least 1, got 0" in capsys.readouterr().err
    assert run("dsstne") == 2
    assert run("dsstne --help") == 0
    assert "generateNetCDF" in capsys.readouterr().out


def test_launchers_have_the_names_of_dsstne(folder):
    (folder / "bin").mkdir()
    assert run("dsstne install bin") == 0
    done = subprocess.run(
        [folder / "bin" / "train", "-h"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "-lambda1" in done.stdout


def test_knn_search(folder, capsys):
    (folder / "vectors").write_text("a\t1 0\nb\t0 1\n")
    (folder / "more").write_text("c\t3 4\n")
    (folder / "queries").write_text("q\t1 2\n")
    files = "--data-files vectors,more --input-files queries --output-file near"
    assert run(f"dsstne knn-search {files} --k 2") == 0
    assert (folder / "near").read_text() == "q\tc:11.000 b:2.000\n"
    flags = "--k 9 --data-type fp16 --output-keys-only"
    assert run(f"dsstne knn-search {files} {flags}") == 0
    assert (folder / "near").read_text() == "q\tc b a\n"
    for text, message in [
        ("q\t1 2 3\n", "has vectors of 3 numbers"),
        ("q\t1 2\nr 1 2\n", ":2: there is no"),
        ("q\t1 x\n", ":1: expected finite numbers, got '1 x'"),
        ("", "queries"),
    ]:
        (folder / "queries").write_text(text)
        assert run(f"dsstne knn-search {files}") == 1
        assert message in capsys.readouterr().err


def test_knn_search_as_dsstne_calls_it(folder, capsys):
    """Several files to a flag, folders that are made, and standard output."""
    for name, text in [("a", "a\t1 0\n"), ("b,c", "b\t0 1\n"), ("d", "d\t3 4\n")]:
        (folder / name).write_text(text)
    (folder / "q").write_text("q\t1 2\n")
    (folder / "r").write_text("r\t1 0\n")
    files = "--data-files a b,c --k 2 --input-files q r --data-files d"
    expected = "q\td:11.000 b:2.000\nr\td:3.000 a:1.000\n"
    capsys.readouterr()
    assert run(f"dsstne knn-search {files}") == 0
    assert capsys.readouterr().out == expected
    for out in ("new/folder/near", "new/near", "near"):
        assert run(f"dsstne knn-search {files} --output-file {out}") == 0
        assert (folder / out).read_text() == expected
    for out, message in [
        ("q/near", "no folder q"),
        ("q/x/near", "q is not a folder"),
        ("new", "not a file"),
    ]:
        assert run(f"dsstne knn-search {files} --output-file {out}") == 1
        assert message in capsys.readouterr().err
    wrong = files.replace("-files a", "-files q none")
    assert run(f"dsstne knn-search {wrong} --output-file fresh/near") == 1
    assert not (folder / "fresh").exists()
