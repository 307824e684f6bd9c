"""`sparsejax demo`."""

import os
import pathlib
import re

from sparsejax.cli import demo
from sparsejax.cli.main import main


def test_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "EPOCHS", 1)
    monkeypatch.setattr(demo, "OPTIMIZER", "sgd")  # compiles fastest
    assert main(["demo"]) == 0
    captured = capsys.readouterr()
    assert "epoch 1/1" in captured.err
    assert re.search(r"ndcg@10 +0\.\d+ +0\.\d+\n", captured.out)
    assert captured.out.count("  recommended") == demo.PRINTED_VISITORS
    assert os.listdir() == ["sparsejax-demo.html"]
    page = pathlib.Path("sparsejax-demo.html").read_text()
    assert page.count("<section>") == demo.SHOWN_VISITORS and "Free Downloads" in page
