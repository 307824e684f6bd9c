"""The uses of a run: evaluation, recommendation, report and export."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sparsejax import metrics
from sparsejax.baselines.models import BASELINES
from sparsejax.callers import warn_caller
from sparsejax.data import SparseDataset
from sparsejax.data.files.names import Names
from sparsejax.data.files.opening import Path
from sparsejax.data.reading.item_titles import read_titles
from sparsejax.engine.rank.evaluation import Evaluation
from sparsejax.engine.rank.recommendations import Recommendations
from sparsejax.kinds.reading import some_rows
from sparsejax.kinds.source import Opened, item_names
from sparsejax.kinds.threads import meanwhile
from sparsejax.options.measuring import Evaluate, Paged
from sparsejax.options.predicting import Export, Exported, Rank, Recommend
from sparsejax.options.reading import Reading
from sparsejax.runs.folders import Folder
from sparsejax.runs.report import examples_of, similar_to_popular, write_report
from sparsejax.verbs.export import export_with_answer
from sparsejax.verbs.recommend import lower_recommend, recommend
from sparsejax.verbs.vectors import user_vectors


def measured(asked: Evaluate, reading: Reading, run: Opened) -> Mapping[str, float]:
    """Measures a run on held-out data.

    Args:
      asked: settings of the evaluation.
      reading: settings of reading.
      run: the run.
    """
    found = run.settings.kind.measured(asked, reading, run)
    figures = found.metrics
    if asked.baselines:
        prepared, train = found.beside()
        figures = _with_baselines(figures, prepared, train, reading.say)
    return _warn_of_popularity(figures)


def recommended(
    asked: Recommend,
    reading: Reading,
    run: Opened,
    check: Callable[[Names], None] | None = None,
    hint: str = "",
) -> tuple[Names, Recommendations]:
    """Recommends items to rows; returns the names of the rows and the recommendations.

    Args:
      asked: settings of the recommendation.
      reading: settings of reading.
      run: the run whose model recommends.
      check: function that is called with the names of rows before the model runs.
      hint: advice to append to an error about these names.
    """
    kind = run.settings.kind

    def read() -> dict[str, Any]:
        data = kind.read_shown(asked.inputs, reading, run)
        if asked.users is not None:
            data = some_rows(data, asked.users, hint)
        if check is not None:
            check(data.row_names)
        exclude = kind.excluded(asked, reading, run, data)
        return asked.shared_with(Rank) | {"inputs": data, "exclude": exclude}

    shown = meanwhile(read)

    def ahead(shapes: Any) -> Callable[[], object]:
        return lower_recommend(Rank(shapes, **shown()))

    model = run.model(ahead)
    how = shown()
    return how["inputs"].row_names, recommend(model, **how)


def vectors_of(
    inputs: Any, reading: Reading, run: Opened, context: Any = None
) -> tuple[np.ndarray, Names]:
    """The vectors of the rows of some data, and the row names.

    `context` has the columns that are known about the next event.
    """
    data = run.settings.kind.read_shown(inputs, reading, run)
    if context is not None:
        data = data.with_context(context)
    return user_vectors(run.model(), data), data.row_names


def report(
    path: Path,
    title: str,
    asked: Paged,
    reading: Reading,
    run: Folder,
    say: Callable[[str], object] = warn_caller,
) -> None:
    """Writes the page about a run, see `write_report`."""
    found = run.settings.kind.findings(asked, reading, run)
    examples, similar = [], None
    if found.shown is not None:
        how = {"keep_seen": not asked.exclude_seen}
        examples = examples_of(found.model, found.shown, found.heldout, **how)
    if found.counts is not None:
        names = item_names(run.known)
        similar = similar_to_popular(found.model, names, found.counts)
    titles = asked.titles
    write_report(
        path,
        found.model,
        run.history(),
        title=title,
        measured=found.measured,
        calibration=found.calibration,
        examples=examples,
        similar=similar,
        settings=run.settings.described(),
        data=found.facts,
        titles=None if titles is None else read_titles(titles, say),
    )


def export(asked: Export, reading: Reading, run: Opened) -> None:
    """Writes the predictor of a run."""
    kind = run.settings.kind
    model = kind.corrected(run, asked, reading)
    if getattr(model, "uses_times", False):
        reading.say(
            "note: the predictor recommends without times; export_predictor in Python, "
            "with the data as names, makes one that reads them"
        )
    export_with_answer(
        model,
        asked.path,
        names=run.known,
        item_features=run.item_features(),
        **asked.useful(kind.name, Exported),
    )


def _with_baselines(
    measured: Mapping[str, float],
    prepared: Evaluation,
    train: SparseDataset,
    say: Callable[[str], None],
) -> Mapping[str, float]:
    """Adds metrics of each baseline, whose names begin with the baseline's name.

    Args:
      measured: metrics of the model.
      prepared: data on which the baselines are measured.
      train: data that the baselines are fitted to.
      say: function that is called with a line of text about each baseline that needs too much
          memory.
    """
    found: dict[str, float] = {}
    for name, baseline in BASELINES.items():
        try:
            model = baseline(train)
        except MemoryError as error:
            say(f"left out: {error}")
            continue
        its = prepared.run(model)
        found |= {f"{name}_{n}": its[n] for n in its if f"popularity_{n}" in its}
    found |= measured
    rows = getattr(measured, "rows", None)
    return found if rows is None else metrics.Measured(found, rows)


def _warn_of_popularity(measured: Mapping[str, float]) -> Mapping[str, float]:
    """Warns if recommending the most popular items to all rows is better than the model.

    Returns:
      The metrics, unchanged.
    """
    for name, value in measured.items():
        popular = measured.get(f"popularity_{name}")
        of_all = name.startswith("ndcg@") and not name.endswith("]")
        if of_all and popular is not None and popular > value:
            warnings.warn(
                f"recommending the most popular items to everyone is better than this model: "
                f"{name} {popular:.4f}, of the model {value:.4f}. Train longer, or with the "
                "settings that suit the data",
                stacklevel=2,
            )
            break
    return measured
