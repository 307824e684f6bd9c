"""`sparsejax demo`: the whole path on the bundled data."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import numpy as np
from flax import nnx

from sparsejax import commands, optimizers
from sparsejax.config import NetworkConfig
from sparsejax.data import SparseDataset, datasets
from sparsejax.models import FeedForward
from sparsejax.optimizers import Optimizer
from sparsejax.prediction import evaluate, recommend
from sparsejax.training import fit

NETWORK = NetworkConfig.autoencoder((128,))
OPTIMIZER, LEARNING_RATE = "adam", 1e-3
EPOCHS, BATCH_SIZE, SEED = 15, 512, 0
GIVEN = 0.6  # share of a test visitor's visits that the model is shown
K, SHOWN_VISITORS, SHOWN_AREAS = 10, 3, 5


def main() -> None:
    """Trains, measures on visitors the model has not seen, and shows some of them."""
    web = datasets.msweb()
    print(
        "Which areas of www.microsoft.com did visitors look at, one week of 1998?\n"
        "Training an autoencoder on the visits of some; then other visitors follow.",
        file=sys.stderr,
    )
    size = web.train.num_features
    model = FeedForward(NETWORK, inputs=size, outputs=size, rngs=nnx.Rngs(SEED))
    rule = optimizers.get(OPTIMIZER, learning_rate=LEARNING_RATE)
    commands.print_summary(web.train, model)
    fit(
        model,
        Optimizer(model, rule),
        web.train,
        batch_size=BATCH_SIZE,
        num_epochs=EPOCHS,
        seed=SEED,
        log=functools.partial(commands.print_epoch, EPOCHS),
    )
    given, heldout = web.test.split(GIVEN, seed=SEED)
    print(f"\n{given.num_rows:,} other visitors: part of their visits is held out.\n")
    print(commands.table(evaluate(model, given, heldout, k=K, popularity=web.train)))
    _show(model, given, heldout, web.titles)


def _show(
    model: FeedForward,
    given: SparseDataset,
    heldout: SparseDataset,
    titles: dict[str, str],
) -> None:
    """Prints what some visitors saw, what is recommended, and what was held out."""
    # Those with something to go by and something to find.
    enough = np.diff(given.matrix.indptr) >= 3
    enough &= np.diff(heldout.matrix.indptr) >= 2
    visitors = given.row_names[enough][:SHOWN_VISITORS]
    given, heldout = given.align_rows(visitors), heldout.align_rows(visitors)
    found = recommend(model, given, k=SHOWN_AREAS, exclude=given).names(given)
    for row, name in enumerate(visitors.tolist()):
        wanted = _features(heldout, row)
        print(f"\n{name}")
        _print_titles("visited", _features(given, row), titles)
        _print_titles("recommended", found[row], titles, marked=wanted)
        _print_titles("held out", wanted, titles, marked=found[row])
    print("\n* recommended and held out")


def _print_titles(
    label: str,
    names: Sequence[str],
    titles: dict[str, str],
    *,
    marked: Sequence[str] = (),
) -> None:
    shown = (titles[name] + " *" * (name in marked) for name in names)
    print(f"  {label:<12}", f"\n{'':15}".join(shown))


def _features(data: SparseDataset, row: int) -> list[str]:
    start, end = data.matrix.indptr[row : row + 2]
    return data.feature_names[data.matrix.indices[start:end]].tolist()
