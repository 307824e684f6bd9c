"""`sparsejax report`; the page itself is tested in test_report.py."""

import pathlib

from sparsejax.cli.main import main


def test_report_of_a_run(board, tmp_path, capsys):
    out = str(tmp_path / "report.html")
    train, heldout = board.files
    argv = ["report", board.run, "--out", out]
    (tmp_path / "titles.csv").write_text('id,title\nitem3,"Tea, green"\n')
    more = ["--train", train, "--test", heldout, "--k", "2"]
    assert main([*argv, *more, "--titles", str(tmp_path / "titles.csv")]) == 0
    assert f"the report is in {out}" in capsys.readouterr().err
    page = pathlib.Path(out).read_text()
    # The page shows losses, speeds and validation metrics of all 25 epochs, not only of the best.
    assert "best ndcg@2, epoch " in page and page.count("epoch 25: ") >= 4
    assert "popularity" in page and page.count("<section>") == 6
    assert "means over 60 users." in page and "95 % interval" in page
    assert "60 users · 20 items" in page and "times as many as popularity" in page
    assert "Tea, green" in page and ">item3<" not in page and "item4" in page
    assert "user 0" in page and "hidden1 size" in page and "adagrad" in page
    assert main(argv) == 0  # the command runs without data, and overwrites the old page
    page = pathlib.Path(out).read_text()
    assert "20 items · report of" in page
    assert "popularity" not in page and "user 0" not in page
    assert "item0" in page and "epoch 25: " in page
    assert main(argv[:2]) == 0
    assert (pathlib.Path(board.run) / "report.html").read_text() == page
