"""What the README shows is run."""

import json
import pathlib
import re
import shlex

import pytest

from sparsejax.cli import main as cli

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    """What stands between fences with this language behind the first."""
    fenced = re.findall(r"^```([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [body for found, body in fenced if found == language]


def test_python_prints_what_is_shown(capsys):
    names: dict = {}
    first, loop = blocks(README, "python")
    exec(compile(first, "README.md", "exec"), names)  # noqa: S102
    [shown] = blocks(README, "text")
    assert capsys.readouterr().out == shown
    exec(compile(loop, "README.md", "exec"), names)  # noqa: S102


@pytest.mark.usefixtures("symbolic_sizes")
def test_commands_run_as_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = range(40)
    lines = [
        f"u{r}\t" + ":".join(f"i{i}" for i in rows if i % 4 == r % 4) for r in rows
    ]
    pathlib.Path("purchases.tsv").write_text("\n".join(lines))
    pathlib.Path("later.tsv").write_text("u0\ti1\nu1\ti2:i3\n")
    commands = [
        shlex.split(line)[1:]
        for block in blocks(README, "")
        for line in block.splitlines()
        if line.startswith("sparsejax ")
    ]
    names = ["train", "evaluate", "predict", "report", "export"]
    assert [command[0] for command in commands] == names
    for command in commands:
        assert cli.main(command) == 0
    recommended = pathlib.Path("recs.tsv").read_text().splitlines()
    assert len(recommended) == 40 and recommended[0].startswith("u0\ti")
    assert pathlib.Path("run/report.html").exists()
    assert pathlib.Path("model.predictor").exists()


def test_network_of_the_docs_is_the_default():
    from sparsejax.nn.config import NetworkConfig

    (text,) = blocks((ROOT / "docs" / "network.md").read_text(), "json")
    written, default = (
        NetworkConfig.from_json(json.loads(text)),
        NetworkConfig.autoencoder(),
    )
    assert (written.loss, written.input) == (default.loss, default.input)
    assert written.output.temperature == default.output.temperature


def test_loss_of_the_docs():
    import jax.numpy as jnp

    (code,) = blocks((ROOT / "docs" / "losses.md").read_text(), "python")
    names: dict = {}
    exec(compile(code, "losses.md", "exec"), names)  # noqa: S102
    huber = names["HuberLoss"]()
    scores, labels = jnp.array([0.5, 3.0]), jnp.array([0.0, 1.0])
    assert huber.listed(scores, labels).tolist() == pytest.approx([0.125, 1.5])


def test_rules_of_the_docs():
    import jax.numpy as jnp

    page = (ROOT / "docs" / "optimizers.md").read_text()
    parts, named, recipe, own = blocks(page, "python")
    names: dict = {}
    exec(compile(parts, "optimizers.md", "exec"), names)  # noqa: S102
    optimizer = names["optimizer"]
    assert optimizer.rule_of(names["model"].embed.kernel).name == "ftrl"
    assert set(optimizer.rows["embed/kernel"]) == {"z", "n"}
    exec(compile(named, "optimizers.md", "exec"), names)  # noqa: S102
    assert names["rule"].weight_decay == 0.01
    exec(compile(recipe, "optimizers.md", "exec"), names)  # noqa: S102
    assert names["how"].num_epochs == 30
    exec(compile(own, "optimizers.md", "exec"), names)  # noqa: S102
    w, slope = jnp.ones((1, 2)), jnp.array([[5.0, -1.0]])
    moved, _ = names["rule"].step(w, {}, slope, 0.25)
    assert moved.tolist() == [[0.75, 1.25]]


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda p: p.name
)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target
