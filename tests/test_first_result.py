"""The gate that compares how long commands take with those of another commit."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

PATH = pathlib.Path(__file__).parents[1] / "benchmarks" / "first_result.py"


@pytest.fixture
def first_result(monkeypatch):
    monkeypatch.syspath_prepend(str(PATH.parent))
    spec = importlib.util.spec_from_file_location("first_result", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_second_more_is_told(first_result, capsys):
    seconds = {
        "train cold": ([6.9, 7.1, 9.0], [8.2, 8.0, 7.9]),
        "predict warm": ([2.2, 2.1, 2.3], [2.2, 5.0, 2.3]),  # one turn was disturbed
    }
    assert first_result.verdict(seconds) == 1
    train, predict = capsys.readouterr().out.splitlines()[1:]
    assert train.split() == ["train", "cold", "6.90", "7.90", "1.14", "slower"]
    assert predict.split() == ["predict", "warm", "2.10", "2.20", "1.05"]
    del seconds["train cold"]
    assert first_result.verdict(seconds) == 0


def test_parts_are_those_of_the_clock(first_result):
    """A moment counts once, and imports count before what is compiled meanwhile."""
    spans = [
        (0.0, 2.0, "tracing"),
        (1.0, 4.0, "compiling"),
        (3.0, 5.0, "imports"),
        (6.0, 7.0, "imports"),
    ]
    found = first_result.exclusive(spans)
    assert found == {"tracing": 1.0, "lowering": 0.0, "compiling": 2.0, "imports": 3.0}
