"""`sparsejax vectors` and `sparsejax similar`."""

import numpy as np
import pyarrow.parquet as pq
from run_folders import ITEMS, Board

from sparsejax.cli.main import main
from sparsejax.runs import folders
from sparsejax.sparse import CSR
from sparsejax.verbs import vectors


def test_vectors_of_a_run(board, tmp_path, capsys):
    assert main(["vectors", board.run, "--out", str(tmp_path / "items.npz")]) == 0
    users = ["--out", str(tmp_path / "users.parquet"), "--data", board.files[0]]
    assert main(["vectors", board.run, *users]) == 0
    argv = ["vectors", board.run, "--out", str(tmp_path / "x.npz"), "--user", "who"]
    assert main(argv) == 1 and not (tmp_path / "x.npz").exists()
    assert "--user needs --data, without which it has" in capsys.readouterr().err
    model, names = folders.load_model(board.run)
    with np.load(tmp_path / "items.npz") as found:
        assert found["names"].tolist() == names.tolist()
        expected = np.asarray(model.output.kernel[...])[:ITEMS]
        np.testing.assert_array_equal(found["vectors"], expected)
    table = pq.read_table(tmp_path / "users.parquet")
    assert table["name"].to_pylist() == board.train.row_names.tolist()
    x = CSR.from_scipy(board.train.to_scipy()[:, _order(board, names)])
    expected = np.asarray(model.encode(x, deterministic=True))
    np.testing.assert_allclose(table["vector"].to_pylist(), expected, atol=1e-6)


def _order(board: Board, names: np.ndarray) -> list[int]:
    return [board.train.feature_names.tolist().index(n) for n in names.tolist()]


def test_similar_items_of_a_run(board, capsys):
    assert main(["similar", board.run, "item4", "item7", "--k", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    model, names = folders.load_model(board.run)
    found = vectors.similar_items(model, ["item4", "item7"], 4, names=names)
    for line, item, others, scores in zip(
        lines, ("item4", "item7"), found.names(names), found.scores, strict=True
    ):
        entries = (f"{o},{s:.6g}" for o, s in zip(others, scores, strict=True))
        assert line == f"{item}\t{':'.join(entries)}"
