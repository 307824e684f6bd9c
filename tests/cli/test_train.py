"""`sparsejax train`."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_folders import FIT, NETWORK, checkerboard, parameters, write_lines

from sparsejax import optimizers
from sparsejax.cli import printing
from sparsejax.cli.main import main
from sparsejax.engine.train.checkpoint import Checkpoints
from sparsejax.engine.train.progress import Estimate
from sparsejax.kinds.kind import kind_of
from sparsejax.nn.config import LinearConfig, NetworkConfig, temperature_for
from sparsejax.options.training import Training
from sparsejax.runs import folders, training
from sparsejax.sequence.config import SASRecConfig
from sparsejax.verbs.recipe import recipe

NETWORK_CONFIG, HISTORIES = NetworkConfig.autoencoder((4,)), SASRecConfig()


def test_train_says_what_it_does(board):
    lines = board.stderr.splitlines()
    entries = board.train.num_entries
    count = sum(len(bits) // 4 for bits in parameters(board.run).values())
    counts = f"60 rows, 20 items, {entries} entries; every entry counts 1"
    assert lines[0].endswith(f"train.txt: {counts}")
    assert lines[2] == f"60 rows, 20 features, {entries} entries, {count:,} parameters"
    epochs = [line for line in lines if line.startswith("epoch ")]
    assert len(epochs) == 25
    assert re.match(r"epoch 1/25  loss \d.*examples/s.*ndcg@2 \d", epochs[0])
    assert "Traceback" not in board.stderr


def test_network_from_a_file(small, tmp_path, capsys):
    config = NetworkConfig.autoencoder((4, 3), activation="tanh", tied=False)
    (tmp_path / "net.json").write_text(json.dumps(config.to_json()))
    argv = [word for word in small if word not in NETWORK]
    argv += ["--config", str(tmp_path / "net.json")]
    # This also applies to a flag that states its own default.
    assert main([*argv, "--activation=relu"]) == 1
    assert "leave out --activation, or --config" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(argv) == 0
    assert folders.load_run(tmp_path / "run")[0].network == config


def test_every_setting_is_kept(small, tmp_path):
    heldout = write_lines(tmp_path / "heldout.txt", checkerboard()[1])
    argv = ["--optimizer", "adagrad", "--activation", "tanh", "--normalize", "--tied"]
    argv += ["--corruption", "0.25", "--dropout", "0.5", "--temperature", "0.2"]
    argv += [
        "--precision",
        "highest",
        "--seed",
        "7",
        "--loss",
        "sigmoid_binary_cross_entropy",
    ]
    argv += ["--validation", heldout, "--k", "3", "--patience", "2", "--deterministic"]
    assert main([*small, *argv]) == 0
    settings = folders.load_run(tmp_path / "run")[0]
    assert settings.network == NetworkConfig.autoencoder(
        (16,),
        activation="tanh",
        normalize=True,
        corruption=0.25,
        dropout=0.5,
        temperature=0.2,
        tied=True,
        loss="sigmoid_binary_cross_entropy",
        precision="highest",
    )
    assert settings.optimizer == optimizers.adagrad(2e-3)
    assert (settings.seed, settings.k, settings.patience) == (7, 3, 2)
    assert settings.indicator and settings.deterministic
    assert (
        folders.Settings.from_json(json.loads(json.dumps(settings.to_json())))
        == settings
    )


def test_schedule_and_weight_decay(small, tmp_path):
    """60 rows in batches of 10 are 6 steps an epoch."""
    argv = [*small, "--batch-size", "10", "--learning-rate", "0.01"]
    argv += ["--optimizer", "adamw", "--weight-decay", "0.1", "--warmup-epochs", "0.5"]
    assert main(argv) == 0
    rate = optimizers.schedule(
        "warmup_constant_schedule", init_value=0.0, peak_value=0.01, warmup_steps=3
    )
    rule = optimizers.adamw(rate, weight_decay=0.1)
    assert folders.load_run(tmp_path / "run")[0].optimizer == rule
    assert main([*argv, "--resume", "--epochs", "2"]) == 0
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps()[-1] == 12


@pytest.mark.parametrize(
    ("warmup", "name", "options"),
    [
        (0.0, "cosine_decay_schedule", {"init_value": 0.01, "decay_steps": 18}),
        (
            1.0,
            "warmup_cosine_decay_schedule",
            {
                "init_value": 0.0,
                "peak_value": 0.01,
                "warmup_steps": 6,
                "decay_steps": 18,
            },
        ),
    ],
)
def test_cosine_decay_ends_with_the_last_epoch(warmup, name, options):
    asked = Training(
        data="data",
        config=NETWORK_CONFIG,
        optimizer="momentum",
        learning_rate=0.01,
        warmup_epochs=warmup,
    )
    rate = optimizers.schedule(name, **options)
    rule = training.rule_of(asked, kind_of(HISTORIES).defaults, 6, 3)
    assert rule == optimizers.momentum(rate)


def test_models_of_histories_have_a_training_of_their_own():
    asked = Training(data="data", config=HISTORIES)
    rate = optimizers.schedule("cosine_decay_schedule", init_value=2e-3, decay_steps=18)
    rule = training.rule_of(asked, kind_of(NETWORK_CONFIG).defaults, 6, 3)
    assert rule == optimizers.adam(rate)
    assert rule == recipe(NETWORK_CONFIG, 6 * 512, num_epochs=3).rule
    rule = training.rule_of(asked, kind_of(HISTORIES).defaults, 6, 3)
    assert rule == optimizers.adamw(rate, b2=0.98, weight_decay=0.1)
    assert rule == recipe(HISTORIES, 6 * 256, num_epochs=3).rule
    asked = dataclasses.replace(asked, learning_rate=0.01, decay="none")
    rule = training.rule_of(asked, kind_of(HISTORIES).defaults, 6, 3)
    assert rule == optimizers.adamw(0.01, b2=0.98, weight_decay=0.1)
    asked = dataclasses.replace(asked, optimizer="adam")
    rule = training.rule_of(asked, kind_of(HISTORIES).defaults, 6, 3)
    assert rule == optimizers.adam(0.01)


def test_a_schedule_counts_the_steps_of_chunks(tmp_path, monkeypatch):
    rows = [[f"i{i % 9}", f"i{(i + 3) % 9}"] for i in range(100)]
    table = pa.table({"user": [f"u{i}" for i in range(100)], "items": rows})
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=10)
    argv = ["train", str(tmp_path / "c.parquet"), "--run", str(tmp_path / "run")]
    argv += ["--chunk-rows", "10", "--batch-size", "8", "--epochs", "2", *NETWORK]
    assert main([*argv, "--optimizer", "sgd"]) == 0
    settings = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "'decay_steps': 40" in str(settings["optimizer"])  # 2 of each 10 chunks
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoints.steps()[-1] == 40


def test_values_are_ignored_on_demand_and_then_later_too(tmp_path):
    data, ones = tmp_path / "data.tsv", tmp_path / "ones.tsv"
    data.write_text("user\titem\tvalue\na\tx\t1\na\ty\t5\nb\tx\t2\n")
    ones.write_text("a\tx\na\ty\nb\tx\n")
    argv = [*NETWORK, "--epochs", "1", "--optimizer", "sgd"]
    argv += ["--temperature", "None", "--no-normalize"]  # the values stay visible

    def predicted(folder: str, path: pathlib.Path) -> str:
        out = tmp_path / "recs"
        run = str(tmp_path / folder)
        argv = ["predict", run, str(path), "--out", str(out), "--keep-seen"]
        assert main(argv) == 0
        return out.read_text()

    train = ["train", str(data), "--run"]
    assert main([*train, str(tmp_path / "without"), *argv, "--no-value"]) == 0
    assert predicted("without", data) == predicted("without", ones)
    assert main([*train, str(tmp_path / "with"), *argv]) == 0
    assert predicted("with", data) != predicted("with", ones)


def test_train_on_a_part_of_the_data_at_a_time(small, tmp_path, capsys):
    saved = str(tmp_path / "saved.parquet")
    assert main(["convert", small[1], saved]) == 0
    train = ["train", saved, *small[2:], "--chunk-rows", "10"]
    assert main(train) == 0
    assert "epoch 1/1" in capsys.readouterr().err
    assert main([*train, "--resume", "--epochs", "2"]) == 0
    assert main([*train, "--resume", "--validation", saved]) == 1
    assert "leave out --chunk-rows" in capsys.readouterr().err
    assert main(["train", *small[1:], "--chunk-rows", "10", "--resume"]) == 1
    assert "is not a Parquet file" in capsys.readouterr().err
    # These formats are not read in chunks.
    for flag in (["--separator", "|"], ["--format", "text"]):
        assert main([*train, "--resume", *flag]) == 1
        said = capsys.readouterr().err
        assert f"{flag[0]} is for data in memory; leave out --chunk-rows" in said


@pytest.mark.parametrize(
    ("validation", "by"), [("last", ["last"]), (".25", ["random", "--fraction", ".75"])]
)
def test_validation_from_the_data_is_that_of_two_files(
    events, tmp_path, capsys, validation, by
):
    """The same model, bit for bit, as from the files that `split` writes."""
    fit = [*NETWORK, *FIT, "--optimizer", "sgd", "--epochs", "2", "--k", "3"]
    fit += ["--decay", "none"]
    one, two = tmp_path / "one", tmp_path / "two"
    train = ["train", events, "--run", str(one), "--validation", validation, *fit]
    assert main([*train, "--epochs", "1"]) == 0
    err = capsys.readouterr().err
    assert re.search(r"^validation: held out \d+ of 32 entries", err, re.MULTILINE)
    assert "ndcg@3" in err
    settings = folders.load_run(one)[0]
    assert settings.validation_split == validation
    assert settings.described()["validation_split"] == validation
    assert main([*train, "--resume"]) == 0
    out = str(tmp_path / "parts")
    assert main(["split", events, "--out", out, "--by", *by]) == 0
    files = [f"{out}/train.parquet", "--validation", f"{out}/heldout.parquet"]
    assert main(["train", *files, "--run", str(two), *fit]) == 0
    assert parameters(one) == parameters(two)
    assert folders.load_run(two)[0].validation == settings.validation
    # The files contain the data of the earlier run.
    assert main(["train", *files, "--run", str(one), *fit, "--resume"]) == 0
    other = ".5" if validation == "last" else ".1"
    assert main([*train, "--resume", "--validation", other]) == 1
    assert "other validation data" in capsys.readouterr().err


def test_validation_of_a_wrong_share(small, tmp_path, monkeypatch, capsys):
    for text in ("0", "1.5", "-.1", "2"):
        assert main([*small, f"--validation={text}"]) == 1
        assert (
            "a share must be between 0 and 1; a file of this" in capsys.readouterr().err
        )
    assert main([*small, "--validation", ".001"]) == 1
    assert "too few to hold out 0.001 of them" in capsys.readouterr().err
    # Files with names that look like flags or formats.
    monkeypatch.chdir(tmp_path)
    for name in ("last", ".1"):
        write_lines(tmp_path / name, checkerboard()[1])
    assert main([*small, "--validation", "./last"]) == 0
    assert main([*small, "--resume", "--validation", "./.1"]) == 0
    assert "other validation data" not in capsys.readouterr().err
    chunked = [*small, "--resume", "--chunk-rows", "9", "--validation"]
    for text in (".1", "last"):
        assert main([*chunked, text]) == 1
        assert "leave out --chunk-rows" in capsys.readouterr().err


def test_train_writes_for_tensorboard(small, tmp_path, monkeypatch, capsys):
    logs = tmp_path / "logs"
    assert main([*small, "--tensorboard", str(logs)]) == 0
    (file,) = logs.iterdir()
    assert b"examples_per_second" in file.read_bytes()
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    argv = [*small, "--run", str(tmp_path / "other"), "--tensorboard", str(logs)]
    assert main(argv) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "--tensorboard needs another package: pip install 'sparsejax[" in error


@pytest.mark.usefixtures("no_kept_programs")  # programs could not be written, either
def test_a_checkpoint_that_cannot_be_written_is_told_in_a_line(small, tmp_path):
    limited = 'ulimit -f 8; exec "$@"'
    small[small.index("--hidden") + 1] = "64"
    argv = ["sh", "-c", limited, "sh", sys.executable, "-m", "sparsejax", *small]
    # Otherwise Python would leave compiled modules that are truncated at that size.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "epoch" not in line]
    assert re.search("error: checkpoint .* cannot be written to .*run", lines[-1])
    assert len(lines) < 6  # two of the lines say that programs cannot be cached, either


def test_failed_training_leaves_nothing_behind(small, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "deep" / "er" / "run"
    argv = [*small, "--run", str(folder), "--learning-rate", "1e30"]
    argv += ["--optimizer", "sgd", "--loss", "l2_loss", "--epochs", "3"]
    before = sorted(os.listdir(tmp_path))
    assert main([*argv, "--activation", "linear"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search("^sparsejax: error: the loss is (inf|nan) in epoch", error)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("temperature", ["auto", "0.3", "None"])
def test_temperature(small, tmp_path, capsys, temperature):
    argv = [word for word in small if word not in NETWORK[4:]]
    argv += [] if temperature == "auto" else ["--temperature", temperature]
    assert main(argv) == 0
    said, found = capsys.readouterr().err, folders.load_run(tmp_path / "run")[0].network
    chosen, why = temperature_for(checkerboard()[0].num_features)
    assert (why in said) == (temperature == "auto")
    wanted = {"auto": chosen, "0.3": 0.3, "None": None}
    assert isinstance(found, NetworkConfig)
    assert found.output.temperature == wanted[temperature]


@pytest.mark.parametrize("linear", ["auto", "5", None])
def test_linear_part(small, tmp_path, capsys, linear):
    argv = [word for word in small if word not in NETWORK[2:]]
    argv += [] if linear == "auto" else ["--linear", str(linear)]
    assert main(argv) == 0
    said, found = capsys.readouterr().err, folders.load_run(tmp_path / "run")[0].network
    sizes = checkerboard()[0]
    chosen, why = LinearConfig.for_data(
        sizes.num_rows, sizes.num_features, sizes.num_entries
    )
    assert (why in said) == (linear == "auto")
    wanted = {"auto": chosen, "5": LinearConfig(rank=5), None: None}
    assert isinstance(found, NetworkConfig) and found.linear == wanted[linear]
    model, _ = folders.load_model(tmp_path / "run")
    part = model.output.linear
    assert (part is None) == (linear is None)
    assert part is None or float(abs(part.scale[...]).sum()) > 0


@pytest.mark.parametrize(
    ("seconds", "epochs", "said"),
    [
        (40, 5, ["", "the other epochs take about 02:00\n", "", "", ""]),
        (4000, 3, ["", "the other epochs take about 1:06:40\n", ""]),
        (19, 5, [""] * 5),  # this is less than a minute, so it is not reported
        (900, 2, ["", ""]),  # after this no time is left
    ],
)
def test_the_time_left_is_said_once(seconds, epochs, said, capsys):
    # The first epoch takes longer, because it compiles.
    ends = iter([1e4 + seconds * epoch for epoch in range(epochs)])
    left = printing.TimeLeft(lambda: next(ends))
    for epoch, text in enumerate(said, start=1):
        left.epoch_ended(epoch, epochs)
        assert capsys.readouterr().err == text


@pytest.mark.parametrize(("seconds", "told"), [(100, "2:43:20"), (10, None)])
def test_a_long_training_says_so_in_its_first_epoch(seconds, told):
    # The first dispatch, which compiles, does not count.
    times = iter([500.0, 505.0, 500.0 + seconds, 2000.0])
    left = Estimate(lambda: next(times))
    # These calls are too early for an estimate.
    assert left.after(64, 6400) is left.after(96, 6400) is None
    said = left.after(128, 6400)
    assert said == (told and f"at this speed training takes about {told} more")
    assert left.after(192, 6400) is None  # the estimate is made only once
