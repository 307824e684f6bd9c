"""Publishes a run as the next version for a service, if it is better than the last."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import metrics
from sparsejax.data import UnknownFeaturesWarning
from sparsejax.data.files.names import find_names
from sparsejax.data.reading.histories import unordered
from sparsejax.kinds.kind import Kind, kind_called
from sparsejax.kinds.reading import validation_share
from sparsejax.kinds.source import Source, item_names
from sparsejax.metrics.ranking import METRICS
from sparsejax.predictors.files import load_predictor
from sparsejax.predictors.predictor import Predictor
from sparsejax.predictors.versions import FILE, following, numbered
from sparsejax.runs.folders import Folder
from sparsejax.verbs.export import export_with_answer
from sparsejax.whole_files import temporary_folder, whole_folder


class Gate(NamedTuple):
    """A metric by which a new version must be better than the current one.

    Attributes:
      metric: name of the metric.
      k: cut-off of the metric.
    """

    metric: str
    k: int

    def __str__(self) -> str:
        return f"{self.metric}@{self.k}"

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Reads a gate such as `ndcg@20`.

        Raises:
          ValueError: the text is not a ranking metric with a cut-off.
        """
        found = re.fullmatch(r"(\w+)@([1-9]\d{0,5})", text)
        if not found or found[1] not in METRICS:
            raise ValueError(
                f"a gate is a metric with its cut-off, like ndcg@20, got {text!r}; the "
                f"metrics are {', '.join(METRICS)}"
            )
        return cls(found[1], int(found[2]))


def check(
    folder: pathlib.Path, gate: Gate | None, kind: Kind, *, validation: Any
) -> None:
    """Raises ValueError, before training, if `publish` would fail after it.

    Args:
      folder: folder of the versions.
      gate: metric to compare by, or None.
      kind: kind of the run.
      validation: held-out data, a share, or None.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder of versions, but this is a file")
    if jax.process_count() > 1:
        raise ValueError(
            "several processes cannot write a version: train, then export the run"
        )
    if gate is not None and not kind.ranks_items:
        raise ValueError(
            f"{gate} is measured of models that rank items, not of {kind.name}"
        )
    if gate is not None and validation is None:
        raise ValueError(
            f"{gate} is measured on held-out events: give validation, such as last"
        )
    if gate is not None and validation_share(validation) is not None:
        raise ValueError(
            f"{gate} on a share of the events is unfair: the version before was trained on "
            "most of them; give validation=last, or a file of events that it has not seen"
        )
    number, before = _newest(folder)
    if before is not None:
        _check_before(folder, number, before, gate, kind)


def numbers(folder: pathlib.Path) -> list[int]:
    """The version numbers in a folder, the newest first; empty if the folder does not exist."""
    found = numbered(folder) if folder.exists() else []
    return [number for number in found if (folder / str(number) / FILE).exists()]


def _newest(folder: pathlib.Path) -> tuple[int, Predictor | None]:
    """Loads the newest version that is not damaged.

    Returns:
      The version's number and its predictor; 0 and None if there is no such version.
    """
    for number in numbers(folder):
        with contextlib.suppress(ValueError):  # a damaged version is skipped
            return number, load_predictor(folder / str(number) / FILE)
    return 0, None


def _check_before(
    folder: pathlib.Path, number: int, before: Predictor, gate: Gate | None, kind: Kind
) -> None:
    """Raises ValueError if a run must not replace a version, or cannot be compared with it."""
    found = kind_called(before.signature.kind)
    differs = found is not kind and (
        gate is not None or not (found.ranks_items and kind.ranks_items)
    )
    if differs:
        raise ValueError(
            f"{folder}: version {number} is of {found.name}, but the run of {kind.name}; name "
            "another folder"
        )
    if gate is not None:
        _check_ranks(before, gate)


def _check_ranks(predictor: Predictor, gate: Gate) -> None:
    """Raises ValueError if a predictor has no item names, or recommends fewer items than the
    gate's `k`.
    """
    if predictor.k < gate.k or predictor.items is None:
        raise ValueError(
            f"a version recommends {predictor.k} items "
            f"{'with' if predictor.items is not None else 'without'} names, but {gate} "
            "ranks more, by name: choose a lower cut-off, or train once without the gate"
        )


def publish(
    run: pathlib.Path, source: Source, folder: pathlib.Path, gate: Gate | None, k: int
) -> str:
    """Writes a run as the next version into a folder, and returns a line about the outcome.

    With a gate, it is written only if it is better than the newest version that can be loaded, on
    the run's held-out events: the interval of the difference must be above 0. Both are measured as
    they are served, by their predictors.

    Args:
      run: path of the run folder.
      source: data of the run, including held-out events if there is a gate.
      folder: folder of the versions. It is created if it does not exist.
      gate: metric to compare by, or None.
      k: largest number of items that the version can recommend, unless the newest version or the
          gate has a larger one.

    Raises:
      OSError: a version cannot be read or written.
      ValueError: the newest version cannot be compared with this run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (number, before), opened = _newest(folder), Folder.of(run)
    kind = opened.settings.kind
    if before is not None:
        _check_before(folder, number, before, gate, kind)
    options: dict[str, Any] = {}
    if kind.ranks_items:
        least = 1 if gate is None else gate.k
        options["k"] = max(k, least, 1 if before is None else before.k)
    with temporary_folder(folder) as place:
        path, said = place / FILE, ""
        export_with_answer(
            opened.model(),
            path,
            names=opened.known,
            item_features=opened.item_features(),
            **options,
        )
        if gate is not None and before is not None:
            old, new = (
                measured(each, source, gate) for each in (before, load_predictor(path))
            )
            found = metrics.compare(old, new)[str(gate)]
            said = (
                f": {gate} {found.second:.4f}, of version {number} {found.first:.4f}; "
                f"change {found.difference:+.4f}, 95 % interval "
                f"[{found.low:+.4f}, {found.high:+.4f}]"
            )
            if not found.low > 0:
                chance = "" if found.is_clear else ", which may be chance"
                return f"{folder}: version {number} stays{said}{chance}"
        new_number = following(folder)
        with whole_folder(folder / str(new_number)) as made:
            os.replace(path, made / FILE)
    return f"{folder}: version {new_number} is new{said}"


def _as_known(data: Any, predictor: Predictor) -> Any:
    """Histories with the event and user columns that a predictor reads, and its category ids."""
    columns = {}
    for name in ("events", "users"):
        own, known = (getattr(each, name, None) for each in (data, predictor.model))
        if own is not None:
            columns[name] = None if known is None else own.like(known, "the data")
    return dataclasses.replace(data, **columns)


def measured(predictor: Predictor, source: Source, gate: Gate) -> metrics.Measured:
    """The metric of a predictor for each row that has held-out events, and its mean.

    An event whose item the predictor does not know counts as missed.

    Raises:
      ValueError: the predictor has no names, knows no item of the data, or recommends fewer
        items than the gate ranks; or no row has held-out events.
    """
    _check_ranks(predictor, gate)
    wanted = source.heldout
    if hasattr(wanted, "only_targets"):
        wanted = wanted.only_targets()
    heldout: Any = unordered("heldout", wanted, source.data)
    names = heldout.row_names
    is_shown = find_names(names, source.data.row_names) >= 0
    names = names[is_shown & (np.diff(heldout.matrix.indptr) > 0)]
    if not len(names):
        raise ValueError(f"{gate}: no row has held-out events")
    with warnings.catch_warnings():
        # A warning would be about items that the current version does not know because they are
        # new.
        warnings.simplefilter("ignore", UnknownFeaturesWarning)
        shown = source.data.align_rows(names).align_features(predictor.items)
    if hasattr(shown, "with_context_of"):
        shown, wanted = (_as_known(each, predictor) for each in (shown, wanted))
        shown = shown.with_context_of(wanted)
    found = predictor.recommend(shown, k=gate.k, exclude=shown)
    places = find_names(predictor.items, item_names(source.known))
    ids = np.where(found.ids >= 0, places[found.ids], -1)
    labels = jax.tree.map(jnp.asarray, heldout.align_rows(names).matrix)
    found = METRICS[gate.metric](jnp.asarray(ids), labels, gate.k)
    figures = np.asarray(found, np.float64)
    rows = metrics.Rows(names, {str(gate): figures})
    return metrics.Measured({str(gate): float(figures.mean())}, rows)
