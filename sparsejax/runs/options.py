"""All that is said about a run's files, its training and its measuring, without any flag."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from sparsejax.data.files.columns import BY_NAME, Column, TimeColumn
from sparsejax.data.sets.click_schema import ClickSchema


def _nothing(text: str) -> None:
    """Says nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """How files and tables are read; arguments of `sparsejax.read`.

    Attributes:
      format: see `sparsejax.read`; so are `user`, `item`, `value`, `time`, `delimiter`,
        `separator`, `time_format` and `indicator`.
      skip_bad_lines: whether lines are left out that cannot be read. Files that have no
        lines, such as Parquet, are read as always.
      say: is told what was read, and what was chosen.
    """

    format: str | None = None
    user: Column = None
    item: Column = None
    value: Column = None
    time: TimeColumn = BY_NAME
    delimiter: str | None = None
    separator: str | None = None
    time_format: str | None = None
    indicator: bool = False
    skip_bad_lines: bool = False
    say: Callable[[str], None] = _nothing

    def columns(self) -> dict[str, Any]:
        """The columns that were named, by the names of arguments."""
        given = {
            n: v for n, v in vars(self).items() if v is not None and v is not False
        }
        del given["say"]
        if self.time is BY_NAME:
            del given["time"]
        elif self.time is None:
            given["time"] = None
        return given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How a run is trained; `Run.train` says what each attribute means.

    Attributes:
      data: a file, a table, or a data set.
      config: the configuration of the model.
      suited: the settings of the configuration that the data decides.
      origin: the folder of the run whose model is trained on.
      follow: whether files of a folder are trained on as they appear, until a signal comes.
      changes: folder to which the changes of a run that follows are exported.
      export_seconds: between two exports of changes.
      keep_linear: whether linear parts are kept in the user's cache folder.
    """

    data: Any
    config: Any
    item_features: Any = None
    suited: Collection[str] = ()
    origin: pathlib.Path | None = None
    reading: Reading = Reading()
    schema: ClickSchema | None = None
    validation: Any = None
    k: int = 20
    patience: int | None = None
    optimizer: str | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    warmup_epochs: float = 0.0
    decay: Literal["cosine", "none"] | None = None
    batch_size: int | None = None
    chunk_rows: int | None = None
    fused: bool = False
    deterministic: bool = False
    num_epochs: int | None = None
    seed: int = 0
    checkpoint_seconds: float = 30.0
    resume: bool = False
    follow: bool = False
    changes: str | os.PathLike[str] | None = None
    export_seconds: float | None = None
    keep_linear: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correcting:
    """How probabilities of clicks are corrected, see `sparsejax.calibrate`.

    Attributes:
      calibrate: the examples to correct by.
      method: see `sparsejax.calibrate`; so is `negatives_kept`.
    """

    calibrate: Any = None
    method: Literal["platt", "isotonic"] | None = None
    negatives_kept: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measuring:
    """How a run is measured; `Run.evaluate` says what each attribute means.

    Attributes:
      inputs: what the model is shown; of clicks the examples to measure on.
      history: more of what the model is shown, which was not trained on.
    """

    inputs: Any
    heldout: Any = None
    history: Collection[Any] = ()
    fold_in: float | None = None
    seed: int | None = None
    candidates: Any = None
    popularity: Any = None
    baselines: bool = False
    groups: str | None = None
    by: Literal["entries"] | None = None
    k: int | Sequence[int] = 20
    unknown: Literal["miss", "skip"] = "miss"
    unknown_users: Literal["count", "skip"] = "count"
    keep_seen: bool = False
    exclude_items: Collection[str] = ()
    only_items: Collection[str] | None = None
    keep_rows: bool = False
    correcting: Correcting = Correcting()
    reading: Reading = Reading()

    def counted(self) -> dict[str, Any]:
        """Arguments of `sparsejax.evaluate` that say how interactions count."""
        return {
            "k": self.k,
            "exclude": None if self.keep_seen else "inputs",
            "exclude_items": self.exclude_items,
            "only_items": self.only_items,
            "unknown": self.unknown,
            "unknown_users": self.unknown_users,
            "by": self.by,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recommending:
    """The question to a run what it recommends; `Run.recommend` says what each attribute means.

    Attributes:
      inputs: what the model is shown; of clicks the examples to predict.
      users: names of the rows, or None for all of them.
      hint: what to say after an error about these names.
    """

    inputs: Any
    users: Collection[str] | None = None
    hint: str = ""
    k: int = 10
    keep_seen: bool = False
    exclude: Any = None
    exclude_items: Collection[str] = ()
    only_items: Collection[str] | None = None
    reading: Reading = Reading()
