"""Recommends items for the rows of a data frame of Spark, as another data frame."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from sparsejax.data.files import arrow
from sparsejax.data.files.entries import offsets
from sparsejax.data.files.names import to_arrow
from sparsejax.data.files.opening import Path
from sparsejax.engine.rank.name_lists import matrix_of_histories
from sparsejax.predictors.files import predictor_identity
from sparsejax.predictors.predictor import Predictor
from sparsejax.spark import jobs, scoring, workers
from sparsejax.sparse import CSR

# Column names in the files of `prepare`; the first two columns are in every file.
_PREPARED = ("indices", "row", "values", "left_out")
_NEW = ("items", "scores")


def recommend(
    frame: Any,
    predictor: Path,
    *,
    k: int | None = None,
    items: str | None = None,
    exclude_seen: bool = True,
    unknown: Literal["skip", "error"] = "skip",
    indicator: bool = False,
    exclude_items: Collection[str] = (),
    only_items: Collection[str] | None = None,
) -> Any:
    """The best items for each row of a data frame, as a new data frame.

    ::

        histories = purchases.groupBy("user").agg(F.collect_set("item").alias("items"))
        found = sj.spark.recommend(histories, "s3://bucket/model.predictor", k=10)
        found.writeTo("shop.recommendations").createOrReplace()

    The result is lazy: nothing is computed before it is written or read. It has the columns
    of the frame except the history. Two columns are added: `items`, the names of the best
    items, and `scores`, their scores, both best first. The files of `predict` have this form,
    too.

    A history is an array of names: text or integers. Order and repetitions have no effect,
    and a null counts as an empty history. Or pass the rows of a prepared folder,
    `session.read.parquet("shop/train")`: then the folder must have the items of the model in
    their order. This cannot be checked in a frame; `predict` checks it.

    Args:
      frame: the data frame, also one of Spark Connect.
      predictor: a file of `export_predictor` that all workers can read, or its address.
      k: number of items for each row. The default, and the maximum, is the `k` of the
        predictor.
      items: name of the column with the histories. The default is "items", or if there is
        none "indices", the column of prepared rows.
      exclude_seen: whether items that a row already has are not recommended to it.
      unknown: "skip" skips names that are not items of the model; "error" raises.
      indicator: ignore the values of prepared rows, as in the training of the model.
      exclude_items: names of items that are never recommended, such as those sold out.
      only_items: names of the only items that are recommended.

    Raises:
      ImportError: pyspark is not installed.
      TypeError: `frame` is no data frame, or `predictor` is a loaded one.
      ValueError: the frame has no histories, or a column has a type that Spark cannot send to
        Python.
    """
    columns = _Columns.of(frame, items)
    if isinstance(predictor, Predictor):
        raise TypeError("name the file of the predictor: each worker loads it")
    if unknown not in ("skip", "error"):
        raise ValueError(f'unknown is "skip" or "error", got {unknown!r}')
    if k is not None and k < 1:
        raise ValueError(f"k must be positive, got {k}")
    path = jobs.absolute(predictor)
    workers.check_workers(frame.sparkSession)
    task = functools.partial(
        _recommended,
        predictor=path,
        identity=predictor_identity(path),
        columns=columns,
        k=k,
        exclude_seen=exclude_seen,
        unknown=unknown,
        indicator=indicator,
        which={
            "exclude_items": list(exclude_items),
            "only_items": None if only_items is None else list(only_items),
        },
    )
    return columns.given(frame).mapInArrow(task, columns.schema(frame))


@dataclasses.dataclass(frozen=True)
class _Columns:
    """The columns of a data frame, by role.

    Attributes:
      history: name of the column with the histories.
      prepared: whether histories are column numbers of the matrix instead of names.
      kept: names of the columns that are copied to the result.
    """

    history: str
    prepared: bool
    kept: tuple[str, ...]

    @classmethod
    def of(cls, frame: Any, items: str | None) -> _Columns:
        """Finds the columns of a data frame, and checks their names and types."""
        from pyspark.sql import DataFrame

        if not isinstance(frame, DataFrame):
            raise TypeError(f"frame is a DataFrame of Spark, got {type(frame)}")
        names = frame.columns
        there = f"the frame has the columns {', '.join(names)}"
        prepared = (
            items is None and "items" not in names and {*_PREPARED[:2]} <= {*names}
        )
        history = "indices" if prepared else "items" if items is None else items
        if history not in names:
            raise ValueError(
                f"no column {history}: {there}; name the one with the histories: items=..."
            )
        dropped = _PREPARED[::2] + _PREPARED[3:] if prepared else ()
        kept = tuple(n for n in names if n != history and n not in dropped)
        for name in kept:
            if name in _NEW or names.count(name) > 1:
                raise ValueError(
                    f"the result would have two columns {name}: {there}; drop or rename "
                    "one before"
                )
        columns = cls(history, prepared, kept)
        columns._check_types(frame)
        return columns

    def _check_types(self, frame: Any) -> None:
        """Raises ValueError if Python cannot read a kept column, or a history is no array."""
        from pyspark.errors import PySparkException
        from pyspark.sql import types
        from pyspark.sql.pandas.types import to_arrow_type

        kind = frame.schema[self.history].dataType
        wanted = (types.IntegralType,)
        if not self.prepared:
            wanted = (*wanted, types.StringType)
        if not isinstance(kind, types.ArrayType) or not isinstance(
            kind.elementType, wanted
        ):
            raise ValueError(
                f"column {self.history} has the type {kind.simpleString()}, but a history "
                "is an array of names, text or integers. Of one event a row make "
                'frame.groupBy("user").agg(collect_set("item").alias("items"))'
            )
        for name in self.kept:
            kind = frame.schema[name].dataType
            try:
                to_arrow_type(kind, timezone="UTC")
            except PySparkException:
                raise ValueError(
                    f"column {name} has the type {kind.simpleString()}, which cannot be "
                    "given to a Python worker: drop it, or cast it before"
                ) from None

    def given(self, frame: Any) -> Any:
        """A frame for the workers: the kept columns, and the history as an array of one type."""
        from pyspark.sql import functions

        kind = "array<int>" if self.prepared else "array<string>"
        history = functions.col(_quoted(self.history)).cast(kind)
        more = [_PREPARED[2]] if self.prepared and _PREPARED[2] in frame.columns else []
        kept = [functions.col(_quoted(name)) for name in (*self.kept, *more)]
        return frame.select(*kept, history.alias(self.history))

    def schema(self, frame: Any) -> Any:
        """Spark's schema of the result."""
        from pyspark.sql import types

        text, number = types.StringType(), types.FloatType()
        fields = [frame.schema[name] for name in self.kept]
        fields.append(types.StructField(_NEW[0], types.ArrayType(text, False), False))
        fields.append(types.StructField(_NEW[1], types.ArrayType(number, False), False))
        return types.StructType(fields)


def _quoted(name: str) -> str:
    """Quotes a column's name for an expression, in which dots and spaces would be syntax."""
    return "`" + name.replace("`", "``") + "`"


def _recommended(
    batches: Iterator[pa.RecordBatch],
    *,
    predictor: str,
    identity: str,
    columns: _Columns,
    k: int | None,
    exclude_seen: bool,
    unknown: Literal["skip", "error"],
    indicator: bool,
    which: Mapping[str, Any],
) -> Iterator[pa.RecordBatch]:
    """Function of a task for `mapInArrow`: recommends items for each row of each batch."""
    model = scoring.predictor_here(predictor, identity)
    if model.items is None:
        raise ValueError(
            "the predictor has no names of items; export it with names=..."
        )
    names = to_arrow(model.items)
    for batch in batches:
        history = batch.column(columns.history)
        if columns.prepared:
            matrix = _matrix_of_prepared(batch, model.num_items, indicator)
        else:
            matrix = matrix_of_histories(history, names, unknown=unknown)
        exclude = matrix if exclude_seen else None
        found = model.recommend(matrix, k=k, exclude=exclude, **which)
        items, scores = found.to_lists(model.items)
        kept = [batch.column(name) for name in columns.kept]
        yield pa.RecordBatch.from_arrays(
            [*kept, items.cast(pa.list_(pa.string())), scores], [*columns.kept, *_NEW]
        )


def _matrix_of_prepared(batch: pa.RecordBatch, size: int, indicator: bool) -> CSR:
    """Sparse matrix of the histories in a batch of rows from a prepared folder."""
    indices = batch.column(_PREPARED[0])
    values = None
    if _PREPARED[2] in batch.schema.names and not indicator:
        values = arrow.numbers(batch.column(_PREPARED[2]).flatten()).astype(np.float32)
    columns = arrow.numbers(indices.flatten())
    if columns.size and columns.max() >= size:
        raise ValueError(
            f"a row has the column {columns.max():,}, but the predictor has {size:,} "
            "items; prepare the data with the vocabulary that the model was trained on: "
            "features=..."
        )
    return CSR(
        values, columns, offsets(arrow.numbers(indices.value_lengths())), num_cols=size
    )
