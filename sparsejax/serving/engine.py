"""A predictor on the device: programs of a few fixed shapes, compiled before any request.

The bits of an answer depend only on the row and on the shape that is chosen for its batch: not
on the other rows of the batch, nor on the row's position in it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from sparsejax.predictors.predictor import Predictor
from sparsejax.predictors.runtime import (
    Entries,
    Programs,
    Rows,
    apart,
    in_one_array,
    sizes_for,
)
from sparsejax.processors import usable
from sparsejax.sparse import CSR, host_rows

# Limits of the default programs. On a CPU, programs have at most 64 rows, which take 17 ms, and
# one program has a single row with 1,024 entries. On a GPU, up to 128 rows take as long as one,
# and each program takes seconds to compile: so no default program has 8 rows, unless this is the
# largest number.
_MOST_ROWS, _LONG_ROW = 64, 1024
# Up to this many rows, a program takes as long as with one row. On a CPU, each row takes time.
_ALIKE, _ALIKE_ON_GPU = {"cpu": 1}, 128
# Name of an event in JAX's monitoring: `coarse_top_k` had to compute all scores for a batch.
WHOLE_PASS = "/sparsejax/whole_pass"


class TooLargeError(ValueError):
    """A row has more entries than any shape can hold."""


class Shape(NamedTuple):
    """A program's number of rows, and its capacity for entries of each input and of exclusions."""

    rows: int
    entries: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.entries}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parses a text such as `8x512`.

        Raises:
          ValueError: the text has another form.
        """
        found = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", text)
        if not found:
            raise ValueError(f"a shape is rows x entries, like 8x512, got {text!r}")
        return cls(int(found[1]), int(found[2]))


def check_shapes(shapes: Iterable[Shape], known: Iterable[int]) -> None:
    """Raises ValueError unless each shape's number of rows is among the `known` ones."""
    known = sorted(known)
    for shape in shapes:
        if shape.rows not in known:
            raise ValueError(
                f"the shape {shape}: the predictor has programs of "
                f"{', '.join(map(str, known))} rows; choose among them"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """The size of a batch, which a program must hold.

    Attributes:
      rows: number of rows.
      entries: number of entries of each sparse input.
    """

    rows: int
    entries: tuple[int, ...]

    def __add__(self, other: Size) -> Size:
        pairs = zip(self.entries, other.entries, strict=True)
        return Size(self.rows + other.rows, tuple(a + b for a, b in pairs))

    def fits(self, shape: Shape) -> bool:
        """Whether a program of this shape can hold the batch."""
        most = max(self.entries, default=0)
        return self.rows <= shape.rows and most <= shape.entries


def shapes_of(predictor: Predictor, shapes: Iterable[Shape] = ()) -> tuple[Shape, ...]:
    """The given shapes, by default those for the device; sorted by size."""
    return tuple(sorted({*shapes} or _default_shapes(predictor)))


def _default_shapes(predictor: Predictor) -> set[Shape]:
    room, known = predictor.model.room, predictor.model.programs.by_rows
    sizes, least = [*known], min(known)
    if jax.default_backend() == "cpu":
        sizes = [size for size in sizes if size <= max(_MOST_ROWS, least)]
    else:
        always = least, max(sizes)
        sizes = [size for size in sizes if size in always or size >= _MOST_ROWS]
    usual = {Shape(size, room(size, 1)) for size in sizes}
    return usual | {Shape(least, room(least, _LONG_ROW))}


class Engine:
    """The programs of a predictor, compiled only for a few shapes.

    Attributes:
      predictor: the predictor whose programs it runs.
      shapes: shapes for which the programs are compiled, sorted by size.
      queues: whether a batch may be started before the last one is done. On a GPU the host
        needs half of the time of a batch to start its kernels. On a CPU the programs of two
        stages run on one processor, so that two of them run at a time.
    """

    def __init__(
        self,
        predictor: Predictor,
        shapes: Iterable[Shape] = (),
        *,
        programs: Programs | None = None,
    ):
        """Compiles and runs the program of each shape once.

        Args:
          predictor: the predictor to serve.
          shapes: shapes to compile. By default shapes for rows of usual length, on a
            CPU with up to 64 rows, and one shape for a single row of 1,024 entries.
          programs: programs that replace those for all items. Only the shapes with the
            fewest rows are compiled, and the smallest shape with the most entries.

        Raises:
          ValueError: the predictor has no program with a shape's rows, gives NaN for an empty
            row, or gives another answer to its file's example than the file has.
        """
        self.predictor = predictor
        several = predictor.signature.stages is not None and len(usable()) > 1
        self.queues = several or jax.default_backend() != "cpu"
        self._alike = _ALIKE.get(jax.default_backend(), _ALIKE_ON_GPU)
        self._programs = predictor.model.programs
        self.shapes = shapes_of(predictor, shapes)
        if programs is not None:
            self._programs, least = programs, self.shapes[0].rows
            # The widest shape is kept, so that a request that fits any other shape is accepted.
            widest = max(self.shapes, key=lambda each: (each.entries, -each.rows))
            kept = [x for x in self.shapes if x.rows == least or x == widest]
            self.shapes = tuple(kept)
        check_shapes(self.shapes, self._programs.by_rows)
        # A GPU's compiler takes seconds for each program, and runs without Python's lock.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            found = pool.map(lambda shape: self._programs.compiled(*shape), self.shapes)
            self._compiled = dict(zip(self.shapes, found, strict=True))
        self._outputs = {
            shape: [
                jax.ShapeDtypeStruct((shape.rows, *each.shape), each.dtype)
                for each in predictor.signature.outputs
            ]
            + [jax.ShapeDtypeStruct((), np.int32)] * self._programs.tells_of_passes
            for shape in self.shapes
        }
        for shape in self.shapes:
            found = self.run(shape, self.packed(shape, [self._programs.nothing]))
            if any(np.isnan(array).any() for array in found if array.dtype.kind == "f"):
                raise ValueError(
                    "the predictor gives NaN for an empty row, so it is not served; look at "
                    "the run that it comes from"
                )

        if programs is None:
            self._check_answer()

    def _check_answer(self) -> None:
        """Raises ValueError if the example in the predictor's file now has another answer."""
        stored = self.predictor.answer
        # After changes of the tables, the answer in the file is outdated.
        if stored is None or self.predictor.taken.last is not None:
            return
        given = stored.rows(self._programs.inputs)
        shape = self.shape_for(self.size_of(given))
        if shape is not None:  # otherwise no request of this size is answered
            stored.check(self.run(shape, self.packed(shape, [given])))

    def size_of(self, given: Sequence[Rows]) -> Size:
        """The size of rows, which were made by the predictor's `rows_of_...`."""
        like, first = self._programs.inputs[0], given[0]
        rows = len(first) if isinstance(first, np.ndarray) else len(first.indptr) - 1
        entries = (len(g.indices) for g in given if not isinstance(g, np.ndarray))
        return Size(rows // (like.bags if like.sparse else 1), tuple(entries))

    def shape_for(self, size: Size) -> Shape | None:
        """The smallest shape that holds a batch."""
        return next((shape for shape in self.shapes if size.fits(shape)), None)

    def is_filled(self, shape: Shape, rows: int) -> bool:
        """Whether rows fill half of a shape, or a smaller shape would take as long."""
        return 2 * rows >= shape.rows or shape.rows <= self._alike

    def pieces(self, given: Sequence[Rows]) -> list[tuple[Size, Sequence[Rows]]]:
        """Divides a request's rows into the parts that `Predictor.recommend` would make.

        On a GPU there are fewer parts, as small programs take equally long. A part that no shape
        can hold is divided further.

        Raises:
          TooLargeError: no shape can hold one of the rows.
        """
        size = self.size_of(given)
        if not size.rows:
            return []
        found, start = [], 0
        sizes = {shape.rows for shape in self.shapes}
        largest = max((rows for rows in sizes if rows <= self._alike), default=0)
        sizes = {rows for rows in sizes if rows >= largest}
        for count in sizes_for(size.rows, sizes):
            end = min(start + count, size.rows)
            found += self._divided(given, size, start, end)
            start = end
        return found

    def _divided(self, given, size: Size, start: int, end: int) -> list:
        if (start, end) == (0, size.rows):
            part, of_part = given, size
        else:
            pairs = zip(self._programs.inputs, given, strict=True)
            part = [_rows(each, like.bags, start, end) for like, each in pairs]
            of_part = self.size_of(part)
        if self.shape_for(of_part) is not None:
            return [(of_part, part)]
        if end - start == 1:
            longest = max(shape.entries for shape in self.shapes)
            raise TooLargeError(
                f"row {start} has {max(of_part.entries):,} entries, more than the "
                f"{longest:,} that this service has room for"
            )
        middle = (start + end) // 2
        halves = (start, middle), (middle, end)
        return [each for half in halves for each in self._divided(given, size, *half)]

    def packed(self, shape: Shape, parts: Sequence[Sequence[Rows]]) -> Any:
        """Joins all parts of a batch to the argument of a program, on the host."""
        joined: dict[tuple[int, ...], Rows] = {}
        inputs = []
        for each in zip(*parts, strict=True):
            same = tuple(map(id, each))  # a row's entries are often its exclusions, too
            if same not in joined:
                joined[same] = _joined(each)
            inputs.append(joined[same])
        return in_one_array(self._programs.arguments(shape.rows, inputs, shape.entries))

    def started(self, shape: Shape, packed: Any) -> Any:
        """Starts the program for a packed batch; returns its output array without waiting."""
        return self._compiled[shape](packed)

    def fetched(self, shape: Shape, outputs: Any) -> list[np.ndarray]:
        """Waits for the outputs that `started` returned, and copies them to the host."""
        found = apart(jax.device_get(outputs), self._outputs[shape])
        if self._programs.tells_of_passes and found.pop():
            jax.monitoring.record_event(WHOLE_PASS)
        return found

    def run(self, shape: Shape, packed: Any) -> list[np.ndarray]:
        """The outputs for a packed batch, on the host; waits for them."""
        return self.fetched(shape, self.started(shape, packed))


def _rows(given: Rows, bags: int, start: int, end: int) -> Rows:
    """Rows `start .. end - 1` of an input."""
    if isinstance(given, np.ndarray):
        return given[start:end]
    if isinstance(given, CSR):
        return host_rows(given, np.arange(start, end))
    indptr = given.indptr[start * bags : end * bags + 1]
    part = slice(indptr[0], indptr[-1])
    data = None if given.data is None else given.data[part]
    return Entries(data, given.indices[part], indptr - indptr[0])


def _joined(parts: Sequence[Any]) -> Rows:
    """Concatenates an input's rows of several requests. Missing values become 1."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    ends = np.cumsum([0, *(len(part.indices) for part in parts)])
    rows = [part.indptr[1:] + end for part, end in zip(parts, ends, strict=False)]
    data = None
    if any(part.data is not None for part in parts):
        ones = (np.ones(len(part.indices), np.float32) for part in parts)
        pairs = zip(parts, ones, strict=True)
        data = np.concatenate([one if p.data is None else p.data for p, one in pairs])
    indices = np.concatenate([part.indices for part in parts])
    return Entries(data, indices, np.concatenate([[0], *rows]))
