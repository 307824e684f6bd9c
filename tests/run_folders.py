"""Run folders, and the files of a checkerboard: even users like even items, odd users like odd
items.
"""

import dataclasses
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np
import scipy.sparse
from flax import nnx

from sparsejax.data import SparseDataset
from sparsejax.engine.train.checkpoint import Checkpoints
from sparsejax.runs import folders

USERS, ITEMS = 60, 20
NETWORK = ["--hidden", "16", "--linear", "None", "--temperature", "0.1"]
# Adagrad's programs compile in half the time of Adam's.
FIT = ["--optimizer", "adagrad", "--learning-rate", "0.1", "--batch-size", "16"]


@dataclasses.dataclass(frozen=True)
class Board:
    """A trained run and the files it was made from.

    Attributes:
      folder: with `train.txt`, `heldout.txt` and `run`.
      train: what is in `train.txt`.
      heldout: two more items of each user, of its colour.
      stderr: what training said.
    """

    folder: pathlib.Path
    train: SparseDataset
    heldout: SparseDataset
    stderr: str

    @property
    def files(self) -> list[str]:
        return [str(self.folder / name) for name in ("train.txt", "heldout.txt")]

    @property
    def run(self) -> str:
        return str(self.folder / "run")


def checkerboard() -> tuple[SparseDataset, SparseDataset]:
    """For each user all items of its colour: a training set, and a set with two held-out items
    each.
    """
    full = np.add.outer(np.arange(USERS), np.arange(ITEMS)) % 2 == 0
    rng = np.random.default_rng(0)
    # Items of the user's colour come first.
    order = np.argsort(rng.random(full.shape) + ~full, axis=1)
    heldout = np.zeros_like(full)
    np.put_along_axis(heldout, order[:, :2], True, axis=1)

    def dataset(dense: np.ndarray) -> SparseDataset:
        return SparseDataset.from_scipy(
            scipy.sparse.csr_array(dense),
            row_names=[f"user {u}" for u in range(USERS)],
            feature_names=[f"item{i}" for i in range(ITEMS)],
        )

    return dataset(full & ~heldout), dataset(heldout)


def write_lines(path: pathlib.Path, data: SparseDataset) -> str:
    """The data set in the text form, written without the code under test."""
    indptr, names = data.matrix.indptr, data.feature_names
    lines = (
        f"{row}\t{':'.join(names[data.matrix.indices[indptr[i] : indptr[i + 1]]])}\n"
        for i, row in enumerate(data.row_names)
    )
    path.write_text("".join(lines))
    return str(path)


def names_of(*names: str) -> np.ndarray:
    """Names as a data set stores them."""
    return np.array(names, dtype=np.dtypes.StringDType())


def recommendations(path: pathlib.Path) -> dict[str, dict[str, float]]:
    """The content of a file that `predict` wrote: `{user: {item: score}}`, in its order."""
    found = {}
    for line in path.read_text().splitlines():
        user, _, rest = line.partition("\t")
        entries = (entry.split(",") for entry in rest.split(":") if rest)
        found[user] = {item: float(score) for item, score in entries}
    return found


def items_of(data: SparseDataset, row: int) -> set[str]:
    """The names of the items in a row."""
    start, end = data.matrix.indptr[row : row + 2]
    return set(data.feature_names[data.matrix.indices[start:end]])


def parameters(folder: str | pathlib.Path) -> dict[str, bytes]:
    """The bytes of each parameter of a run's model."""
    state = nnx.to_pure_dict(nnx.state(folders.load_model(folder)[0], nnx.Param))
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {
        jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves
    }


def kill_in_training(argv: Sequence[str], folder: pathlib.Path) -> int:
    """Kills a command once its run has a checkpoint; returns the step of the checkpoint."""
    training = subprocess.Popen([sys.executable, "-m", "sparsejax", *argv])
    checkpoints = Checkpoints(folder / "checkpoints")
    while not checkpoints.steps() and training.poll() is None:
        time.sleep(0.01)
    training.kill()
    assert training.wait() == -signal.SIGKILL
    return checkpoints.steps()[-1]
