"""`sparsejax export`."""

import pytest

import sparsejax as sj
from sparsejax.cli import run
from sparsejax.cli.main import main


@pytest.mark.usefixtures("symbolic_sizes")
def test_a_run_is_exported(board, tmp_path, capsys):
    path = tmp_path / "model.predictor"
    flags = ["--k", "4", "--batch-size", "1"]
    assert main(["export", board.run, str(path), *flags]) == 0
    assert capsys.readouterr().err == f"the predictor is in {path}\n"
    predictor = sj.load_predictor(path)
    model, names = run.load_model(board.run)
    found = sj.recommend(model, board.train.align_features(names), 4)
    row = 3
    items = board.train.to_scipy()[[row]].indices
    history = board.train.feature_names[items].tolist()
    expected = found.names(names)[row]
    assert predictor.recommend_names(history, exclude_seen=False) == expected
    assert main(["export", board.run, str(tmp_path / "no" / "file")]) == 1
    assert "there is no folder" in capsys.readouterr().err
