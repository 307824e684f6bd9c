"""Lines that commands print about training and measuring."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

import jax
from flax import nnx
from tqdm import tqdm

from sparsejax.baselines.models import BASELINES
from sparsejax.mesh import processes
from sparsejax.runs.report import means_over


def print_summary(account: str, model: nnx.Module) -> None:
    """Prints the sizes of the data and of the model to stderr."""
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    parameters = sum(leaf.size for leaf in leaves)
    print(f"{account}, {parameters:,} parameters", file=sys.stderr)
    if idle := processes.idle_gpus():
        print(
            f"one GPU of {idle + 1} is used; --mesh auto divides the model over all",
            file=sys.stderr,
        )


def print_epoch(num_epochs: int, step: int, entry: Mapping[str, float]) -> None:
    """Prints the results of an epoch to stderr, above the progress bar; `fit` calls it."""
    chosen = ("recall@", "ndcg@", "auc", "log_loss")
    shown = [name for name in entry if name.startswith(chosen)]
    metrics = "".join(f"  {name} {entry[name]:.4f}" for name in shown)
    tqdm.write(
        f"epoch {entry['epoch']}/{num_epochs}  loss {entry['loss']:.5g}  "
        f"{entry['examples_per_second']:,.0f} examples/s{metrics}",
        file=sys.stderr,
    )


def print_file(step: int, entry: Mapping[str, float]) -> None:
    """Prints the results of the training on a new file to stderr."""
    print(
        f"file {entry['epoch']:,.0f}  step {step:,}  loss {entry['loss']:.5g}  "
        f"{entry['examples_per_second']:,.0f} examples/s  "
        f"{entry['inserted']:.1%} of the ids new  {entry['refused']:.1%} refused",
        file=sys.stderr,
    )


class TimeLeft:
    """Reports once, after the second epoch, how long the remaining epochs will take.

    The first epoch includes compilation, so its duration is not used.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._ends = clock, []

    def epoch_ended(self, epoch: int, num_epochs: int) -> None:
        """Prints a line to stderr if the remaining epochs take a minute or more."""
        self._ends.append(self._clock())
        if len(self._ends) != 2:
            return
        left = (self._ends[1] - self._ends[0]) * (num_epochs - epoch)
        if left >= 60:
            told = tqdm.format_interval(left)
            tqdm.write(f"the other epochs take about {told}", file=sys.stderr)


def print_metrics(measured: Mapping[str, float]) -> None:
    """Prints a table of metrics: of the model, and of each baseline that was measured."""
    names = [name for name in measured if f"popularity_{name}" in measured]
    if not names:  # clicks
        width = max(map(len, measured))
        for name, value in measured.items():
            print(f"{name:{width}}  {value:>10,.6g}")
        return
    width = max(map(len, names))
    baselines = ["popularity", *BASELINES, "retrieval", "ranking"]
    shown = [name for name in baselines if f"{name}_{names[0]}" in measured]
    heads = "".join(f"  {name:>10}" for name in ["model", *shown])
    print(f"{'':{width}}{heads}")
    for name in names:
        row = [measured[name], *(measured[f"{other}_{name}"] for other in shown)]
        print(f"{name:{width}}" + "".join(f"  {value:>10.4f}" for value in row))
    print(means_over(measured))
