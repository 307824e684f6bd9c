"""`sparsejax plan`."""

import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from sparsejax import optimizers
from sparsejax.cli.main import main
from sparsejax.kinds.histories.footprint import assumed_lengths
from sparsejax.nn import ContentSizes
from sparsejax.nn.config import NetworkConfig
from sparsejax.sequence.config import GRUConfig, SequenceConfig
from sparsejax.verbs import plan as planning
from sparsejax.verbs.recipe import recipe

PLAN = ["plan", "--items", "8000000", "--rows", "1000000", "--entries", "30000000"]


def test_plan_says_whether_it_fits(capsys):
    rmsprop = [*PLAN, "--optimizer", "rmsprop", "--memory", "45GB"]
    assert main(rmsprop) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "on one device, data=1, model=1" and last == "fits in 45.0 GB"
    assert main([*rmsprop, "--hidden", "1024"]) == 1
    out, err = capsys.readouterr()
    assert out.endswith("does not fit in 45.0 GB; needs model=4 at least\n") and not err
    mesh = ["--hidden", "1024", "--mesh", "model=4"]
    assert main([*rmsprop, *mesh, "--fused", "--output-dtype", "bfloat16"]) == 0
    assert "on each of 4 devices, data=1, model=4" in capsys.readouterr().out


def test_plan_of_a_network_from_a_file(tmp_path, capsys):
    path = str(tmp_path / "net.json")
    config = NetworkConfig.autoencoder((8, 4))
    pathlib.Path(path).write_text(json.dumps(config.to_json()))
    targets = ["--features", "9000000", "--target-entries", "5000000", "--values"]
    argv = [*PLAN, *targets, "--config", path, "--memory", "9GB"]
    assert main(argv) == 0
    planned = planning.plan(
        config,
        optimizers.adam(1e-3),
        inputs=9_000_000,
        outputs=8_000_000,
        rows=1_000_000,
        entries=30_000_000,
        target_entries=5_000_000,
        values=True,
        memory=9 * 10**9,
    )
    assert capsys.readouterr().out == planned.table() + "\n"
    assert main([*argv, "--tied"]) == 1
    assert "leave out --tied, or --config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "mean", "length", "options"),
    [
        ("sasrec", 5, 50, {}),
        ("hstu", 15, 100, {"width": 64, "blocks": 3, "heads": 4}),
        ("gru", 30, 200, {"width": 64}),
    ],
)
def test_plan_of_a_model_of_histories(kind, mean, length, options, capsys):
    """With the optimizer, the batch and the length that train takes by default."""
    sizes: dict[str, Any] = {"rows": 1_000_000, "entries": mean * 1_000_000}
    argv = [*PLAN, "--entries", str(sizes["entries"]), "--memory", "45GB"]
    argv += [word for name, n in options.items() for word in (f"--{name}", str(n))]
    assert main([*argv, "--model", kind, "--times"]) == 0
    config = SequenceConfig.from_json(
        {"version": 1, "model": kind, "max_length": length, **options}
    )
    planned = planning.plan(
        config,
        recipe(config, 1_000_000).rule,
        inputs=8_000_000,
        times=True,
        batch_size=256,
        memory=45 * 10**9,
        **sizes,
    )
    out, err = capsys.readouterr()
    assert out == planned.table() + "\n" and err == f"max_length {length}\n"


def test_plan_with_content(tmp_path, capsys):
    """Its items lie evenly among others, which have none."""
    path = tmp_path / "products.csv"
    lines = [f"{i},kind{i % 3}|new,{i}.5" for i in range(100)]
    path.write_text("\n".join(["item,kind,price", *lines]))
    argv = ["plan", "--items", "1024", "--rows", "90", "--entries", "900"]
    argv += ["--model", "sasrec", "--memory", "1GB", "--item-features", str(path)]
    assert main(argv) == 0
    # Two tags and the price for each of 100 items. No two of these items are in one of the 256
    # parts.
    sizes = ContentSizes(tags=5, entries=3)
    config: Any = SequenceConfig.from_json({"version": 1, "model": "sasrec"})
    how = recipe(config, 90)
    planned = planning.plan(
        config.suited_to_lengths(assumed_lengths(90, 900)),
        how.rule,
        inputs=1024,
        rows=90,
        entries=900,
        batch_size=256,
        content=sizes,
        memory=10**9,
    )
    assert capsys.readouterr().out == planned.table() + "\n"
    assert main([*argv, "--items", "99"]) == 1
    assert "content of 100 items, but only 99 items" in capsys.readouterr().err


def test_plan_of_a_model_of_histories_from_a_file(tmp_path, capsys):
    path = tmp_path / "gru.json"
    path.write_text('{"version": 1, "model": "gru", "width": 64, "max_length": 20}')
    more = ["--negatives", "100", "--optimizer", "sgd", "--batch-size", "64"]
    argv = [*PLAN, "--config", str(path), *more, "--mesh", "model=2"]
    assert main([*argv, "--memory", "45GB"]) == 0
    planned = planning.plan(
        GRUConfig(width=64, max_length=20, negatives=100),
        optimizers.sgd(1e-3),
        inputs=8_000_000,
        rows=1_000_000,
        entries=30_000_000,
        batch_size=64,
        model=2,
        memory=45 * 10**9,
    )
    out, err = capsys.readouterr()
    assert out == planned.table() + "\n" and not err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["sasrec", "--features", "9"], "their own items; leave out --features"),
        (["sasrec", "--values"], "histories have no values"),
        (["sasrec", "--fused"], "histories are read with it, too; leave out fused"),
        (["sasrec", "--hidden", "8"], "--hidden is for --model autoencoder"),
        (["sasrec", "--entries", "1000001"], "rows must have two entries or more"),
        (["autoencoder", "--times"], "a network does not read times"),
        (
            ["autoencoder", "--negatives", "9"],
            "--negatives is of no use for a model of items",
        ),
    ],
)
def test_plan_says_what_does_not_go_with_a_model(capsys, options, message):
    assert main([*PLAN, "--memory", "45GB", "--model", *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "does not say its memory: pass --memory 141GB"),
        (["--memory", "141"], 'expected a size such as "141GB"'),
        (["--memory", "1GB", "--mesh", "4"], "--mesh is written data=2,model=4"),
        (["--memory", "1GB", "--mesh", "model=3"], "model must be a divisor of 256"),
        (["--memory", "1GB", "--optimizer", "magic"], "unknown optimizer 'magic'"),
    ],
)
def test_plan_says_what_is_wrong(capsys, options, message):
    assert main([*PLAN, *options]) == 1
    assert message in capsys.readouterr().err


def test_plan_compiles_for_a_mesh_that_is_not_here():
    """For 64 devices, in a process of its own, which must be told before JAX begins."""
    argv = ["plan", "--items", "70000", "--rows", "5000", "--entries", "200000"]
    argv += ["--hidden", "32", "--optimizer", "sgd", "--batch-size", "64", "--fused"]
    argv += ["--mesh", "data=2,model=32", "--memory", "16GB", "--compile"]
    done = subprocess.run(
        [sys.executable, "-m", "sparsejax", *argv],
        capture_output=True,
        text=True,
        check=True,
    )
    _, kept, *_ = done.stdout.splitlines()
    assert re.fullmatch(r"kept +(.*B) +\1", kept)
