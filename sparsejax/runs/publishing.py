"""Writes a run as the next version of what a service serves, if it is better."""

from __future__ import annotations

import os
import pathlib
import re
import tempfile
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import metrics
from sparsejax.data import SequenceDataset, UnknownFeaturesWarning
from sparsejax.data.files.names import find_names
from sparsejax.predictors.files import load_predictor
from sparsejax.predictors.predictor import Predictor
from sparsejax.runs.folders import Folder
from sparsejax.runs.kind import Runs, Source
from sparsejax.verbs.export import export_predictor
from sparsejax.whole_files import whole_folder

FILE = "model.predictor"  # of each version, in a folder with its number as name
_METRICS: dict[str, Callable[..., Any]] = {
    "hit_rate": metrics.hit_rate_at_k,
    "map": metrics.map_at_k,
    "mrr": metrics.mrr_at_k,
    "ndcg": metrics.ndcg_at_k,
    "recall": metrics.recall_at_k,
}


class Gate(NamedTuple):
    """A metric in which a new version must be better than the one that serves.

    Attributes:
      metric: its name.
      k: its cut-off.
    """

    metric: str
    k: int

    def __str__(self) -> str:
        return f"{self.metric}@{self.k}"

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Reads `ndcg@20`.

        Raises:
          ValueError: it is something else.
        """
        found = re.fullmatch(r"(\w+)@([1-9]\d{0,5})", text)
        if not found or found[1] not in _METRICS:
            raise ValueError(
                f"a gate is a metric with its cut-off, like ndcg@20, got {text!r}; the "
                f"metrics are {', '.join(_METRICS)}"
            )
        return cls(found[1], int(found[2]))


def check(
    folder: pathlib.Path, gate: Gate | None, runs: Runs, *, heldout: bool
) -> None:
    """Raises ValueError before a training after which `publish` would not work.

    Args:
      folder: of versions.
      gate: a metric, or None.
      runs: the kind of the run.
      heldout: whether there will be held-out events.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder of versions, but this is a file")
    if jax.process_count() > 1:
        raise ValueError(
            "several processes cannot write a version: train, then export the run"
        )
    if gate is None:
        return
    if runs.name == "clicks":
        raise ValueError(f"{gate} is measured of models that rank items, not of clicks")
    if not heldout:
        raise ValueError(
            f"{gate} is measured on held-out events: give validation, such as last"
        )


def newest(folder: pathlib.Path) -> int:
    """The number of the newest version in a folder; 0 if there is none."""
    found = [
        int(each.parent.name)
        for each in folder.glob(f"*/{FILE}")
        if each.parent.name.isascii() and each.parent.name.isdigit()
    ]
    return max(found, default=0)


def publish(
    run: pathlib.Path, source: Source, folder: pathlib.Path, gate: Gate | None, k: int
) -> str:
    """Writes the next version into a folder, and says so.

    With a gate it is written only if it is better than the newest version on the run's
    held-out events. Both are measured as they serve: by their predictors.

    Args:
      run: folder of the run.
      source: the data of the run, with held-out events if there is a gate.
      folder: of versions. It is made if it does not exist.
      gate: a metric, or None.
      k: most items that the version can recommend, unless the newest one or the gate has
        more.

    Raises:
      OSError: a version cannot be read or written.
      ValueError: the newest version is no predictor, or cannot be compared with this run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number, opened = newest(folder), Folder.of(run)
    before = load_predictor(folder / str(number) / FILE) if number else None
    ranks = opened.settings.runs.name != "clicks"
    if before is not None and (before.signature.kind != "clicks") != ranks:
        raise ValueError(
            f"{folder}: version {number} is of {before.signature.kind}, but the run of "
            f"{opened.settings.runs.name}; name another folder"
        )
    options: dict[str, Any] = {}
    if ranks:
        least = 1 if gate is None else gate.k
        options["k"] = max(k, least, 1 if before is None else before.k)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as place:
        path, said = pathlib.Path(place) / FILE, ""
        export_predictor(opened.model(), path, names=opened.known, **options)
        if gate is not None and before is not None:
            new, old = (
                measured(each, source, gate) for each in (load_predictor(path), before)
            )
            said = f": {gate} {new:.4f}, of version {number} {old:.4f}"
            if not new > old:
                return f"{folder}: version {number} stays{said}"
        with whole_folder(folder / str(number + 1)) as made:
            os.replace(path, made / FILE)
    return f"{folder}: version {number + 1} is new{said}"


def measured(predictor: Predictor, source: Source, gate: Gate) -> float:
    """The mean of a metric over the rows that have held-out events.

    An event of an item that the predictor does not know is missed.

    Raises:
      ValueError: the predictor has no names, knows no item of the data, or recommends fewer
        items than the gate ranks; or no row has held-out events.
    """
    if predictor.k < gate.k or predictor.items is None:
        raise ValueError(
            f"a version recommends {predictor.k} items "
            f"{'with' if predictor.items is not None else 'without'} names, but {gate} "
            "ranks more, by name: choose a lower cut-off, or train once without the gate"
        )
    heldout = source.heldout
    if isinstance(heldout, SequenceDataset):
        heldout = heldout.to_sparse()
    names = heldout.row_names
    is_shown = find_names(names, source.data.row_names) >= 0
    names = names[is_shown & (np.diff(heldout.matrix.indptr) > 0)]
    if not len(names):
        raise ValueError(f"{gate}: no row has held-out events")
    with warnings.catch_warnings():
        # The version that serves does not know what is new.
        warnings.simplefilter("ignore", UnknownFeaturesWarning)
        shown = source.data.align_rows(names).align_features(predictor.items)
    found = predictor.recommend(shown, k=gate.k, exclude=shown)
    places = find_names(predictor.items, source.known)
    ids = np.where(found.ids >= 0, places[found.ids], -1)
    labels = jax.tree.map(jnp.asarray, heldout.align_rows(names).matrix)
    return float(jnp.mean(_METRICS[gate.metric](jnp.asarray(ids), labels, gate.k)))
