"""Reads examples of clicks from files and tables for runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsejax.data.events.sniff import is_parquet
from sparsejax.data.files import stored
from sparsejax.data.files.names import Names
from sparsejax.data.scans.scan_clicks import ScannedClicks
from sparsejax.data.sets.click_schema import (
    ClickSchema,
    HashedColumn,
    KeyColumn,
    VocabularyColumn,
    unweighted,
    without_propensity,
    without_time,
)
from sparsejax.data.sets.clicks import (
    ClickDataset,
    check_same_schema,
    read_clicks,
    read_served,
)
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.kinds.clicks.scores import check_same_columns, check_same_labels
from sparsejax.kinds.reading import is_file, is_saved, name_of, skips_bad_lines
from sparsejax.kinds.source import Opened
from sparsejax.options.measuring import Evaluate, Paged
from sparsejax.options.reading import Reading
from sparsejax.sparse import CSR
from sparsejax.wide_ids import NUM_IDS


def read_examples(
    source: Any, schema: ClickSchema | None, reading: Reading
) -> ClickDataset:
    """Reads examples, and reports a summary of them through `reading.say`."""
    if isinstance(source, ClickDataset):
        if schema is not None:
            raise ValueError(
                "schema is of no use for a data set, which has one: leave it out"
            )
        return source
    _check_source(source)
    if schema is not None:
        skip = skips_bad_lines(source, reading)
        data = read_clicks(source, without_time(schema), skip_bad_lines=skip)
    elif is_file(source) and is_parquet(source):
        data = ClickDataset.load(source)
    else:
        raise ValueError(
            f"{name_of(source)}: name the columns of this file: schema=..."
        )
    reading.say(f"{name_of(source)}: {data!r}")
    return data


def read_like(
    source: Any,
    known: ClickDataset | ScannedClicks,
    reading: Reading,
    *,
    labelled: bool = True,
    append: bool = False,
    training: bool = False,
    weighted: bool = False,
) -> ClickDataset:
    """Reads examples with the columns and ids of earlier data, and reports what was read.

    Args:
      source: the file, or a data set.
      known: earlier data with the columns and ids.
      reading: settings of reading; its `say` is called with a summary.
      labelled: whether labels are read.
      append: whether new categories get ids after the known ones.
      training: whether columns that only training needs are read, too.
      weighted: whether the weights of the examples are read, if the schema names some.

    Raises:
      ValueError: a saved data set has other columns or other ids.
    """
    is_data, vocabulary = isinstance(source, ClickDataset), dict(known.vocabularies)
    skip = skips_bad_lines(source, reading)
    if not is_data:
        _check_source(source)
    if is_data or is_saved(source, stored.CLICKS):
        data = _with_columns_of(known, source, append)
        if training:
            _check_targets(known.schema, data, name_of(source))
        if is_data:
            return data
    elif labelled:
        schema = without_time(known.schema)
        if training:
            data = read_clicks(
                source, schema, features=vocabulary, append=append, skip_bad_lines=skip
            )
        else:
            schema = without_propensity(schema) if weighted else unweighted(schema)
            data = read_served(source, schema, vocabulary, skip_bad_lines=skip)
    else:
        how = {"labelled": False, "skip_bad_lines": skip}
        data = read_served(source, known.schema, vocabulary, **how)
    said = repr(data) if labelled else f"{data.num_rows:,} examples"
    reading.say(f"{name_of(source)}: {said}")
    return data


def _with_columns_of(known: Any, source: Any, append: bool) -> ClickDataset:
    """Converts a saved data set, or one in memory, to the ids of earlier data."""
    data = source if isinstance(source, ClickDataset) else ClickDataset.load(source)
    try:
        if append:
            check_same_schema(known.schema, data.schema, "this data set")
            check_same_labels(known, data)
            return data.append_features(known.vocabularies)
        check_same_columns(known, data)
    except ValueError as error:
        text = "has other columns or categories than the data of the model"
        raise ValueError(f"{name_of(source)}: {text}") from error
    return data


def _check_targets(schema: ClickSchema, data: ClickDataset, source: str) -> None:
    """Raises ValueError if training data lacks weights or propensities that earlier data had."""
    had = {
        "weights": schema.weight is not None or bool(schema.label_weights),
        "propensities": schema.propensity is not None,
    }
    for name, wanted in had.items():
        if wanted and getattr(data, name) is None:
            raise ValueError(
                f"{source}: has no {name}, which the data of the run had; read it with a schema "
                "that names their column"
            )


def _check_source(source: Any) -> None:
    """Raises TypeError if `source` is neither a file, nor a table, nor a list of records."""
    is_table = hasattr(source, "__arrow_c_stream__")
    if not (is_file(source) or is_table or isinstance(source, list | tuple | Mapping)):
        raise TypeError(
            "examples of clicks are a file, a table, a dict of columns, a list of dicts, or a "
            f"ClickDataset, got {type(source).__name__}"
        )


def were_trained_on(clicks: ClickDataset, settings: Any) -> bool:
    """Whether a run was trained on these examples, or on the part of them that it did not hold
    out.
    """
    trained = settings.data_fingerprint
    if fingerprint_of(clicks) == trained:
        return True
    if (share := settings.validation_split) is None:
        return False
    kept, _ = held_out(clicks, float(share))
    return fingerprint_of(kept) == trained


def held_out(clicks: ClickDataset, share: float) -> tuple[ClickDataset, ClickDataset]:
    """Splits examples into a training part and a held-out part with the given share."""
    # The seed is fixed and not the run's: runs with different seeds are then compared on the same
    # examples.
    return clicks.split_rows(1 - share, seed=0)


def without_rows(
    sizes: Mapping[str, int], schema: ClickSchema, vocabularies: Mapping[str, Names]
) -> ClickDataset:
    """Makes a click data set without examples."""
    ids = {
        name: np.zeros(0, np.uint64 if size == NUM_IDS else np.int32)
        for name, size in sizes.items()
    }
    several = (0, len(schema.several))
    labels = np.zeros(several if schema.several else 0, np.float32)
    weights = None if schema.weight is None else np.zeros(0, np.float32)
    return ClickDataset(
        labels,
        np.zeros((0, len(schema.dense)), np.float32),
        ids,
        without_time(schema),
        vocabularies,
        weights=np.zeros(several, np.float32) if schema.label_weights else weights,
        propensities=None if schema.propensity is None else np.zeros(0, np.float32),
    )


def fingerprint_of(clicks: ClickDataset) -> str:
    beside = [x for x in (clicks.weights, clicks.propensities) if x is not None]
    return fingerprint(clicks.labels, clicks.dense, *clicks.ids.values(), *beside)


def groups_of(
    measuring: Evaluate | Paged, reading: Reading, run: Opened, clicks: ClickDataset
) -> Any:
    """Groups for metrics: the categories in the file if it can be read again, else the column's
    name.

    The model's ids are not used if possible: several hashed or rare categories share an id.
    """
    name, source, schema = measuring.groups, measuring.heldout, run.known.schema
    if name is None:
        return None
    column = schema.ids.get(name)
    if (
        not isinstance(column, HashedColumn | VocabularyColumn)
        or isinstance(source, ClickDataset)
        or is_saved(source, stored.CLICKS)
        or reading.skip_bad_lines  # bad lines in another column would not be skipped
        or isinstance(clicks.ids[name], CSR)  # raises an error that names the column
    ):
        return name
    only = dataclasses.replace(
        unweighted(without_time(schema)), dense={}, ids={name: KeyColumn()}
    )
    return read_clicks(source, only).ids[name]
