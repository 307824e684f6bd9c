"""An example with its answer, stored in a predictor's file, so that other processes can compare.

Checksums prove that a file has not changed. They do not prove that it still answers as before on
another device, by another release, or if weights were damaged before they were written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np

from sparsejax import codec
from sparsejax.predictors.runtime import Entries, Rows
from sparsejax.predictors.signature import Array, Signature

_LABEL, _VERSION = "the stored answer", 1
# Allowed difference between a score and the stored score, divided by the largest stored score. On
# CPUs, float32 results differ by about 1e-6. A GPU multiplies float32 with 11 bits of precision,
# and bfloat16 has 8 bits on any device: errors of .4 % in each layer. A wrong weight changes
# scores by about their own size.
_ON_CPUS, _ELSEWHERE = 1e-3, 5e-2
_SHOWN = 5  # number of items in a message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """A row of one input, in plain numbers.

    Attributes:
      values: values of its entries, or all numbers of a dense row; None for entries without
          values.
      indices: column numbers of the entries of a sparse row.
      indptr: offsets at which its bags begin and end.
    """

    values: tuple[float, ...] | None = None
    indices: tuple[int, ...] | None = None
    indptr: tuple[int, ...] | None = None

    @classmethod
    def of(cls, given: Rows) -> Self:
        """Converts a row to numbers that JSON can store."""
        if isinstance(given, np.ndarray):
            return cls(values=_floats(given))
        values = None if given.data is None else _floats(np.asarray(given.data))
        indices, indptr = (np.asarray(a) for a in (given.indices, given.indptr))
        return cls(
            values=values,
            indices=tuple(indices.tolist()),
            indptr=tuple(indptr.tolist()),
        )

    def rows(self, like: Array) -> Rows:
        """Converts the row back to an input of a program.

        Raises:
          ValueError: it is not a valid row of this input.
        """
        try:
            if not like.sparse:
                values = np.array(self.values or (), like.like.dtype)
                return values.reshape(1, *like.shape)
            indices, indptr = (
                np.array(each, np.int32) for each in (self.indices, self.indptr)
            )
            ends = [0, len(indices)]
            if len(indptr) != like.bags + 1 or indptr[[0, -1]].tolist() != ends:
                raise ValueError(f"{like.bags} bags that are not those of the indices")
            # With dtype uint32, an index is the lower half of a 64-bit id, so any value is valid.
            outside = (indices < 0) | (indices >= like.shape[-1])
            if (np.diff(indptr) < 0).any() or (
                outside.any() and like.dtype != "uint32"
            ):
                raise ValueError("indices that it does not have")
            if self.values is None:
                return Entries(None, indices, indptr)
            if like.dtype is None or len(self.values) != len(indices):
                raise ValueError(f"{len(self.values)} values")
            return Entries(np.array(self.values, like.dtype), indices, indptr)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{_LABEL}: input {like.name!r}: {error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredAnswer:
    """An example, and a predictor's answer to it when its file was written.

    Attributes:
      platform: platform on which the answer was computed.
      narrow: whether the programs compute with 16-bit numbers.
      example: a row for each input.
      ids: ids of items, best first; None for clicks.
      scores: scores of the items, or the logit of a click.
    """

    platform: str
    narrow: bool
    example: tuple[Given, ...]
    ids: tuple[int, ...] | None
    scores: tuple[float, ...]

    @classmethod
    def of(cls, model: Any) -> Self:
        """Computes the answer of a `Predictor.model` to an example, by its smallest program.

        Raises:
          FloatingPointError: a score is NaN or infinite.
        """
        given, programs = model.example(), model.programs
        size = min(programs.by_rows)
        entries = [len(g.indices) for g in given if not isinstance(g, np.ndarray)]
        found = programs.run(size, given, model.room(size, max(entries, default=0)))
        ids, scores = _first_row([np.asarray(output) for output in found])
        if not np.isfinite(scores).all():
            raise FloatingPointError(
                f"the predictor gives the scores {_floats(scores)[:_SHOWN]} for an example; its "
                "weights are not finite, or too large"
            )
        return cls(
            platform=jax.default_backend(),
            narrow="f16" in programs.code[size].mlir_module(),
            example=tuple(Given.of(each) for each in given),
            ids=None if ids is None else tuple(ids.tolist()),
            scores=_floats(scores),
        )

    @classmethod
    def from_json(cls, document: codec.Json, signature: Signature) -> Self:
        """Reads the document that `to_json` made.

        Raises:
          ValueError: the document is not a valid answer, or belongs to another signature.
        """
        stated = codec.without_version(document, _VERSION, _LABEL)
        found = codec.read(cls, stated, _LABEL)
        found.rows(signature.inputs)
        has_ids, wanted = found.ids is not None, len(signature.outputs) > 1
        count = len(found.scores)
        if has_ids != wanted or count != (
            count if found.ids is None else len(found.ids)
        ):
            raise ValueError(f"{_LABEL}: ids and scores do not fit the signature")
        if not wanted and count != math.prod(signature.outputs[0].shape):
            raise ValueError(f"{_LABEL}: {count} logits of one example")
        return found

    def to_json(self) -> dict[str, Any]:
        """The answer as a JSON object, which `from_json` reads."""
        return {"version": _VERSION, **codec.document(self)}

    def rows(self, inputs: Sequence[Array]) -> list[Rows]:
        """Converts the example to inputs of the programs.

        Raises:
          ValueError: the example is not a valid row of these inputs.
        """
        if len(inputs) != len(self.example):
            raise ValueError(
                f"{_LABEL} has {len(self.example)} inputs, expected {len(inputs)}"
            )
        pairs = zip(self.example, inputs, strict=True)
        return [given.rows(like) for given, like in pairs]

    def check(self, outputs: Sequence[np.ndarray]) -> None:
        """Compares the first row of the outputs of the programs with the stored answer.

        Items may have changed places only if their scores are equal within the tolerance.

        Raises:
          ValueError: they differ by more than rounding errors.
        """
        ids, scores = _first_row(outputs)
        same = self.platform == jax.default_backend() == "cpu" and not self.narrow
        part = _ON_CPUS if same else _ELSEWHERE
        largest = max(map(abs, self.scores), default=0.0)
        # Clicks: logits near 0 are probabilities near one half, so a difference below `part` is
        # allowed.
        if ids is None or self.ids is None:
            most = part * max(1.0, largest)
            fits = bool(np.all(abs(scores - np.array(self.scores)) <= most))
            now, before = (
                ", ".join(f"{x:.6g}" for x in y) for y in (scores, self.scores)
            )
            what = "logit"
        else:
            most = part * largest
            found = dict(zip(ids.tolist(), scores.tolist(), strict=True))
            fits = _is_like(found, dict(zip(self.ids, self.scores, strict=True)), most)
            now = _shown(ids.tolist(), scores.tolist())
            before, what = _shown(self.ids, self.scores), "items with scores"
        if not fits:
            raise ValueError(
                f"for the example in its file the predictor gives the {what} {now}; expected "
                f"{before}, as at the export on {self.platform}, and scores within {most:.2g}: "
                "its weights are damaged, or this release or device computes something else; "
                "export it again"
            )


def _is_like(found: dict[int, float], stored: dict[int, float], most: float) -> bool:
    """Whether lists of best items are equal, apart from scores that differ by at most `most`."""
    if len(found) != len(stored):
        return False
    if any(not abs(found[i] - stored[i]) <= most for i in found.keys() & stored.keys()):
        return False
    # An item in only one list must have, within `most`, no higher score than the other's last
    # item.
    return all(
        mine[item] <= min(other.values()) + most
        for mine, other in ((found, stored), (stored, found))
        for item in mine.keys() - other.keys()
    )


def _first_row(outputs: Sequence[np.ndarray]) -> tuple[np.ndarray | None, np.ndarray]:
    """Ids and scores of the first row's items. For clicks, None and the first row's logits."""
    if len(outputs) == 1:
        return None, outputs[0][:1].reshape(-1)
    ids, scores = (output[0] for output in outputs[:2])
    return ids[ids >= 0], scores[ids >= 0]


def _floats(array: np.ndarray) -> tuple[float, ...]:
    return tuple(array.astype(np.float64).reshape(-1).tolist())


def _shown(ids: Sequence[int], scores: Sequence[float]) -> str:
    pairs = zip(ids[:_SHOWN], scores[:_SHOWN], strict=True)
    text = ", ".join(f"{item}: {score:.6g}" for item, score in pairs)
    return f"{{{text}{', ...' if len(ids) > _SHOWN else ''}}}"
