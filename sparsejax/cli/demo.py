"""`sparsejax demo`: trains, measures and recommends on the bundled data."""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Sequence

import numpy as np

from sparsejax import optimizers
from sparsejax.cli import printing
from sparsejax.cli.flags import Demo
from sparsejax.data import SparseDataset, datasets
from sparsejax.data.files.names import as_names
from sparsejax.kinds.items.kind import KIND
from sparsejax.nn.config import NetworkConfig
from sparsejax.nn.models import FeedForward
from sparsejax.runs import report
from sparsejax.verbs.build import build
from sparsejax.verbs.evaluate import evaluate
from sparsejax.verbs.fit import fit
from sparsejax.whole_files import check_writable

NETWORK = NetworkConfig.autoencoder((128,))
OPTIMIZER, LEARNING_RATE = "adam", 1e-3
EPOCHS, BATCH_SIZE, SEED = 15, 512, 0
TRAINED = 0.9  # share of the visits to train on; the curves show the other visits
GIVEN = 0.6  # share of a test visitor's visits that the model reads
K, SHOWN_VISITORS, PRINTED_VISITORS, SHOWN_AREAS = 10, 6, 3, 5


def demo(command: Demo) -> None:
    """`sparsejax demo`: trains, measures on new visitors, and shows some of them."""
    check_writable(command.report)
    web = datasets.msweb()
    print(
        "Which areas of www.microsoft.com did visitors look at, one week of 1998?\n"
        "An autoencoder is trained on the visits of some, then recommends to others.",
        file=sys.stderr,
    )
    model, history = _trained(web.train)
    given, heldout = web.test.split(GIVEN, seed=SEED)
    print(f"\n{given.num_rows:,} other visitors; a part of their visits is held out.\n")
    measured = evaluate(model, given, heldout, k=K, popularity=web.train)
    printing.print_metrics(measured)
    examples = report.examples_of(
        model, given, heldout, rows=SHOWN_VISITORS, k=SHOWN_AREAS
    )
    titles = _unique(web.titles)
    examples = [_with_titles(example, titles) for example in examples]
    _show(examples[:PRINTED_VISITORS])
    names = web.train.feature_names.tolist()
    areas = as_names(titles[name] for name in names)
    counts = np.bincount(web.train.matrix.indices, minlength=len(names))
    report.write_report(
        command.report,
        model,
        history,
        title="Areas of www.microsoft.com that visitors looked at",
        measured=measured,
        examples=examples,
        similar=report.similar_to_popular(model, areas, counts),
    )
    print(f"\nThe page {command.report} shows this and more")


def _trained(visits: SparseDataset) -> tuple[FeedForward, list[dict[str, float]]]:
    """Trains a model on visits. Returns the model and the history of its training."""
    train, validation = visits.split(TRAINED, seed=SEED)
    rule = optimizers.get(OPTIMIZER, learning_rate=LEARNING_RATE)
    model, optimizer = build(NETWORK, train, rule, seed=SEED)
    printing.print_summary(KIND.account(train), model)
    history = fit(
        model,
        optimizer,
        train,
        batch_size=BATCH_SIZE,
        num_epochs=EPOCHS,
        seed=SEED,
        validation=validation,
        k=K,
        log=functools.partial(printing.print_epoch, EPOCHS),
    )
    return model, history


def _unique(titles: dict[str, str]) -> dict[str, str]:
    """Titles by path. If several areas have equal titles, their paths are added."""
    count = collections.Counter(titles.values())
    return {n: t if count[t] == 1 else f"{t} ({n})" for n, t in titles.items()}


def _with_titles(example: report.Example, titles: dict[str, str]) -> report.Example:
    """Replaces the paths in an example by titles."""
    return report.Example(
        row=example.row,
        shown=[titles[name] for name in example.shown],
        recommended=[titles[name] for name in example.recommended],
        heldout=[titles[name] for name in example.heldout],
    )


def _show(examples: Sequence[report.Example]) -> None:
    """Prints the visited, recommended and held-out areas of a few visitors."""
    for example in examples:
        print(f"\n{example.row}")
        _print_titles("visited", example.shown)
        _print_titles("recommended", example.recommended, marked=example.heldout)
        _print_titles("held out", example.heldout, marked=example.recommended)
    print("\n* recommended and held out")


def _print_titles(
    label: str, titles: Sequence[str], *, marked: Sequence[str] = ()
) -> None:
    shown = (title + " *" * (title in marked) for title in titles)
    print(f"  {label:<12}", f"\n{'':15}".join(shown))
