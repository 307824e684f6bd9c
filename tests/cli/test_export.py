"""`sparsejax export`."""

from collections import Counter

import jax
import pytest

import sparsejax as sj
from sparsejax.cli import compilation_cache
from sparsejax.cli.main import main
from sparsejax.runs import folders


@pytest.mark.usefixtures("symbolic_sizes")
def test_a_run_is_exported(board, tmp_path, capsys):
    path = tmp_path / "model.predictor"
    flags = ["--k", "4", "--batch-size", "1"]
    assert main(["export", board.run, str(path), *flags]) == 0
    assert capsys.readouterr().err == f"the predictor is in {path}\n"
    predictor = sj.load_predictor(path)
    assert predictor.answer is not None and len(predictor.answer.scores) == 4
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    model, names = folders.load_model(board.run)
    found = sj.recommend(model, board.train.align_features(names), 4, exclude=None)
    row = 3
    items = board.train.to_scipy()[[row]].indices
    history = board.train.feature_names[items].tolist()
    expected = found.names(names)[row]
    assert predictor.recommend_names(history, exclude_seen=False) == expected
    assert main(["export", board.run, str(tmp_path / "no" / "file")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert main(["export", board.run, str(path), "--unknown-ids", "zeros"]) == 1
    assert "--unknown-ids is of no use for a model of items" in capsys.readouterr().err
    assert main(["export", board.run, str(path), "--int8"]) == 1
    assert "--int8 takes hidden sizes that are" in capsys.readouterr().err


@pytest.mark.usefixtures("symbolic_sizes", "no_kept_programs")
def test_programs_are_compiled_for_those_who_load_it(
    board, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, counts = tmp_path / "model.predictor", Counter()

    def note(event: str, **_: str | int) -> None:
        counts[event.rpartition("/")[2]] += 1

    argv = ["export", board.run, str(path), "--k", "4", "--batch-size", "8"]
    assert main([*argv, "--compile", "--no-compilation-cache"]) == 1
    assert "--compile keeps programs" in capsys.readouterr().err
    assert main([*argv, "--compile"]) == 0
    jax.clear_caches()
    jax.monitoring.register_event_listener(note)
    try:
        with compilation_cache.programs_kept(since=0.0):
            predictor = sj.load_predictor(path)
            for rows in 1, 8:
                predictor.recommend(board.train.to_scipy()[:rows])
    finally:
        jax.monitoring.unregister_event_listener(note)
    assert counts["cache_hits"] >= 2 and not counts["cache_misses"]
