"""`sparsejax tune`."""

import dataclasses
import json
import math
import pathlib
import re
import shlex

import pytest
from run_folders import write_lines

import sparsejax as sj
from sparsejax.cli import tune
from sparsejax.cli.main import main
from sparsejax.kinds.kind import Range, kind_for
from sparsejax.kinds.models import MODELS
from sparsejax.options.models import Described
from sparsejax.runs import folders

pytest.importorskip("optuna", reason="comes with the extra `tune`")
import optuna

SMALL = ["--hidden", "8", "--batch-size", "32", "--k", "2", "--validation", ".2"]


@pytest.fixture
def argv(board, tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "data.txt", board.train)
    return ["tune", "data.txt", *SMALL]


def trials() -> list[optuna.trial.FrozenTrial]:
    journal = optuna.storages.journal.JournalFileBackend("tuned/trials.log")
    storage = optuna.storages.JournalStorage(journal)
    return optuna.load_study(study_name="tune", storage=storage).get_trials()


def score(trial: optuna.trial.FrozenTrial) -> float:
    assert trial.value is not None
    return trial.value


def test_the_result_can_be_used_and_trained_again(argv, capsys):
    argv += ["--format", "text", "--no-value", "--seed", "7"]
    assert main([*argv, "--trials", "2", "--epochs", "2"]) == 0
    printed, said = capsys.readouterr()
    first, second = trials()
    # The first trial has the settings of the flags.
    start = {"hidden": 8, "temperature": 0.18, "corruption": 0.5, "learning_rate": 2e-3}
    assert first.params == start != second.params
    best = max(first, second, key=score)
    assert score(best) >= score(first) and f"the best is trial {best.number}" in said
    line = re.search(
        r"ndcg@2 ([\d.]+), 95 % interval ([\d.]+) to ([\d.]+);.*within it", said
    )
    assert line is not None
    value, low, high = map(float, line.groups())
    assert low < value < high and value == pytest.approx(best.value, abs=1e-4)
    folder = f"tuned/trial-{best.number}"
    settings, _ = folders.load_run(folder)
    progress = folders.checkpoints_of(folder, settings).progress()
    assert progress is not None
    scores = [entry["ndcg@2"] for entry in progress["history"]]
    assert scores[-1] == pytest.approx(best.value)
    words = shlex.split(printed.replace("RUN", "again"))
    for part in ("--format text", "--seed 7", "--no-value"):
        assert f" {part} " in f"{' '.join(words)} "
    assert main(words[1:]) == 0
    again, _ = folders.load_run("again")
    assert again.network == settings.network and again.optimizer == settings.optimizer
    assert best.user_attrs["epoch"] == 2
    assert again.num_epochs == 2  # the learning rate falls until the last epoch
    # All trials are done, so nothing is run.
    capsys.readouterr()
    assert main([*argv, "--trials", "2", "--epochs", "2"]) == 0
    assert capsys.readouterr().out == printed and len(trials()) == 2


@pytest.fixture
def curves(monkeypatch) -> list[float]:
    """Replaces training by curves that rise for six epochs, to a height that depends on the
    settings.
    """
    heights = []

    def fit(model, optimizer, data, *, num_epochs, k, log, **_):
        if heights and math.isnan(heights[-1]):
            heights.pop()
            raise KeyboardInterrupt
        config = model.config
        away = math.log(config.output.temperature / 0.2) ** 2
        height = math.exp(-away - (config.input.corruption - 0.3) ** 2)
        heights.append(height)
        for epoch in range(1, num_epochs + 1):
            log(epoch, {"epoch": epoch, f"ndcg@{k}": height * min(epoch, 6) / 6})

    monkeypatch.setattr(tune, "fit", fit)
    monkeypatch.setattr(tune.commands_of_train, "train", lambda command: None)
    monkeypatch.setattr(tune, "interval", lambda *_: "")
    return heights


def test_it_is_interrupted_and_goes_on(argv, curves, tmp_path, capsys):
    argv += ["--epochs", "20", "--patience", "5"]
    curves.append(math.nan)
    assert main([*argv, "--trials", "20"]) == 130
    assert "to continue, repeat the command" in capsys.readouterr().err
    assert main([*argv, "--trials", "8"]) == 0
    curves.append(math.nan)
    assert main([*argv, "--trials", "20"]) == 130
    interrupted = trials()[-1]
    assert interrupted.state.name == "RUNNING"
    # As if the command had been killed by SIGKILL.
    with open("tuned/trials.log", "a") as file:
        file.write('{"op_code": 5, "work')
    (tmp_path / "tuned" / "trials.log.lock").touch()
    assert main([*argv, "--trials", "20"]) == 0
    found = trials()
    states = [trial.state.name for trial in found]
    assert states.count("FAIL") == 2 and "RUNNING" not in states
    assert states.count("COMPLETE") + states.count("PRUNED") == 20
    again = found[interrupted.number + 1]
    assert again.params == interrupted.params and again.state.name != "FAIL"
    ended = [trial for trial in found if trial.state.name != "FAIL"]
    assert len({tuple(trial.params.values()) for trial in ended}) == 20
    # Bad trials are pruned; good ones end when their metric no longer rises.
    for trial in found:
        last = {"COMPLETE": 6 + 5, "FAIL": 0}.get(trial.state.name)
        steps = len(trial.intermediate_values)
        assert steps == last if last is not None else 3 <= steps < 11
    assert "PRUNED" in states
    best = max(score(t) for t in found if t.state.name == "COMPLETE")
    # The first trial, with the defaults, ran again after an interruption.
    assert best > score(found[1])
    config = json.loads((tmp_path / "tuned" / "network.json").read_text())
    temperature = config["layers"][-1]["temperature"]
    assert math.exp(-(math.log(temperature / 0.2) ** 2)) >= best
    # A tuning with other settings cannot be continued.
    capsys.readouterr()
    for other in (["--k", "3"], ["--activation", "relu"], ["--validation", ".4"]):
        assert main([*argv, *other]) == 1
        assert "tuned: was begun with " in capsys.readouterr().err


def test_models_of_histories(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [f"u{u} " + " ".join(f"i{(u + n) % 9}" for n in range(5)) for u in range(9)]
    pathlib.Path("histories.txt").write_text("\n".join(lines))
    trained = []

    def fit(model, optimizer, data, *, validation, num_epochs, k, log, **_):
        assert data.num_entries == 36 and validation.num_entries == 9
        trained.append((model.config, optimizer.rule))
        for epoch in range(1, num_epochs + 1):
            log(epoch, {"epoch": epoch, f"ndcg@{k}": model.config.dropout / epoch})

    monkeypatch.setattr(tune, "fit", fit)
    final = []
    monkeypatch.setattr(tune.commands_of_train, "train", final.append)
    monkeypatch.setattr(tune, "interval", lambda *_: "")
    argv = ["tune", "histories.txt", "--format", "adjacency", "--model", "gru"]
    assert main([*argv, "--trials", "3", "--epochs", "2"]) == 0
    assert trained[0][0] == sj.GRUConfig()
    best = max(trained, key=lambda pair: pair[0].dropout)
    found = json.loads(pathlib.Path("tuned/network.json").read_text())
    assert sj.sequence.SequenceConfig.from_json(found) == best[0]
    # Without --patience a run keeps its last epoch, so the last epoch's metric decides.
    assert max(map(score, trials())) == best[0].dropout / 2
    # The printed command, and the command that trained the run of the best trial.
    printed = shlex.split(capsys.readouterr().out)
    assert "--optimizer" not in printed
    rate = float(printed[printed.index("--learning-rate") + 1])
    assert printed[printed.index("--epochs") + 1] == "2"
    recipe = sj.training.recipe(best[0], 9, num_epochs=2, peak=rate)
    assert best[1] == recipe.rule
    [command] = final
    assert (command.learning_rate, command.validation) == (rate, "last")


def test_widths_that_heads_divide(tmp_path, monkeypatch):
    """A trial that raises is not met again by who repeats the command."""
    monkeypatch.chdir(tmp_path)
    lines = [f"u{u} " + " ".join(f"i{(u + n) % 9}" for n in range(5)) for u in range(9)]
    pathlib.Path("histories.txt").write_text("\n".join(lines))
    widths = []

    def fit(model, optimizer, data, *, k, log, **_):
        widths.append(model.config.width)
        if len(widths) == 1:
            raise RuntimeError("no luck")
        log(1, {"epoch": 1, f"ndcg@{k}": 0.5})

    monkeypatch.setattr(tune, "fit", fit)
    monkeypatch.setattr(tune.commands_of_train, "train", lambda command: None)
    monkeypatch.setattr(tune, "interval", lambda *_: "")
    argv = ["tune", "histories.txt", "--format", "adjacency", "--model", "sasrec"]
    argv += ["--width", "96", "--heads", "3", "--trials", "2", "--epochs", "1"]
    with pytest.raises(RuntimeError, match="no luck"):
        main(argv)
    assert main(argv) == 0
    assert [trial.state.name for trial in trials()] == ["FAIL", "COMPLETE", "COMPLETE"]
    assert widths == [96, 96, 96]


def test_items_with_content(tmp_path, monkeypatch, capsys):
    """The trials, the run of the best one and the command that is printed have it."""
    monkeypatch.chdir(tmp_path)
    lines = [f"u{u} " + " ".join(f"i{(u + n) % 9}" for n in range(5)) for u in range(9)]
    pathlib.Path("histories.txt").write_text("\n".join(lines))
    items = ["item,kind", *(f"i{i},k{i % 2}" for i in range(10))]
    pathlib.Path("items.csv").write_text("\n".join(items))

    def fit(model, optimizer, data, *, k, log, **_):
        assert model.num_items == 10 and model.output.content.tags.values[...].any()
        log(1, {"epoch": 1, f"ndcg@{k}": 0.5})

    monkeypatch.setattr(tune, "fit", fit)
    final = []
    monkeypatch.setattr(tune.commands_of_train, "train", final.append)
    monkeypatch.setattr(tune, "interval", lambda *_: "")
    argv = ["tune", "histories.txt", "--format", "adjacency", "--model", "gru"]
    argv += ["--item-features", "items.csv"]
    assert main([*argv, "--trials", "1", "--epochs", "2"]) == 0
    printed = shlex.split(capsys.readouterr().out)
    assert printed[printed.index("--item-features") + 1] == "items.csv"
    [command] = final
    assert command.item_features == "items.csv"


@pytest.mark.parametrize("model", MODELS)
def test_settings_that_are_drawn_become_those_of_the_network(model):
    kind = kind_for(model)
    config, _ = kind.described(model)
    tuned = kind.tuned_in(config)
    assert (
        kind.with_tuned(config, tuned) == config and tuned.keys() == kind.tuned.keys()
    )
    for name, choices in kind.choices(config).items():
        other = choices.high if isinstance(choices, Range) else choices[-1]
        changed = kind.with_tuned(config, {**tuned, name: other})
        assert kind.tuned_in(changed) == {**tuned, name: other}
        assert kind.with_tuned(changed, tuned) == config


def test_networks_whose_sizes_are_not_drawn():
    """Trials then draw the rest alone."""
    kind = kind_for("autoencoder")
    options = Described(hidden=(8, 4), temperature=None, corruption=0.25)
    config, suited = kind.described("autoencoder", options)
    assert suited == ["linear"] and kind.tuned_in(config) == {"corruption": 0.25}
    changed = kind.with_tuned(config, {"corruption": 0.5})
    again = dataclasses.replace(options, corruption=0.5)
    assert changed == kind.described("autoencoder", again)[0] != config


def test_it_ends_when_the_time_is_over(argv, curves, capsys):
    assert main([*argv, "--time", "0s"]) == 0
    assert "the time is over after 1 trials" in capsys.readouterr().err
    assert len(trials()) == 1


def test_what_is_refused(argv, tmp_path, monkeypatch, capsys):
    for more, message in [
        (["--time", "soon"], "--time soon: expected a time such as 90s"),
        (["--trials", "0"], "--trials must be at least 1, got 0"),
        (["--run", "."], ".: does not hold a tuning, but data.txt"),
        (["--validation", "1.5"], "a share must be between 0 and 1"),
    ]:
        assert main([*argv, *more]) == 1
        assert message in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    assert main(argv) == 1
    assert "pip install 'sparsejax[tune]'" in capsys.readouterr().err


@pytest.mark.parametrize("call", ["enqueue_trial", "tell", "_choice"])
def test_a_second_kill_loses_no_trial_and_repeats_none(argv, curves, monkeypatch, call):
    """Whatever was about to be done: enqueue it again, end the old one, draw its settings."""
    argv += ["--trials", "3", "--epochs", "2", "--learning-rate", ".00321"]
    curves.append(math.nan)
    assert main(argv) == 130  # in the first trial

    def killed(*_, **__):
        raise KeyboardInterrupt

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(tune if call == "_choice" else optuna.Study, call, killed)
            assert main(argv) == 130
    assert main(argv) == 0
    rates = [t.params["learning_rate"] for t in trials() if t.state.name != "FAIL"]
    assert len(rates) == 3 and rates.count(0.00321) == 1


@pytest.mark.parametrize("left", [[], [".lock"], ["vocabulary.parquet"], ["run.json"]])
def test_it_was_killed_before_the_first_checkpoint_of_the_best(
    argv, curves, monkeypatch, left
):
    final = []
    monkeypatch.setattr(tune.commands_of_train, "train", final.append)
    monkeypatch.setattr(tune, "interval", lambda *_: "")
    argv += ["--trials", "1", "--epochs", "2"]
    assert main(argv) == 0 and not final[0].resume
    final[0].directory.mkdir()
    for name in left:
        (final[0].directory / name).touch()
    assert main(argv) == 0
    folders.check_folder(final[1].directory, resume=final[1].resume)
