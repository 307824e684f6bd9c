"""Converts tensors to rows of a predictor, and the results of its programs to tensors.

Inputs by name, for each kind of predictor::

    items, histories    items BYTES [n], one row; with lengths INT32 [rows] several rows,
                        concatenated; or [rows, n], padded with ""
                        values FP32, for items; times FP64, for histories: in the shape of items
                        exclude BYTES, in the form of items, with exclude_lengths
                        candidates BYTES, the only items to rank, in the form of items
                        events/NAME, for histories, for each column of events that the model
                        reads: FP32, or BYTES for categories, in the form of items; or
                        BYTES [n, m] for lists of categories of the n items, padded with ""
                        context/NAME [rows], columns that are known of the next event
                        users/NAME [rows], columns of users; a missing one is looked up by
                        users BYTES [rows], whose earlier items are put before the row's items
    stages              as for items or histories, without candidates; and a tensor for each
                        column, [rows], or [1] for all rows
    similar             items BYTES [n]: a row for each of them
    clicks              a tensor [n] for each column of the schema, or [1] for all
                        rows; lists of categories are [n, m], padded with ""
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from sparsejax.data.files.name_index import EncodedNames, NameTable, Places
from sparsejax.data.files.names import find_names
from sparsejax.data.files.opening import DataError
from sparsejax.data.reading.by_name import read_user_features
from sparsejax.data.reading.histories import EVENTS
from sparsejax.data.sets.click_schema import ClickSchema
from sparsejax.data.sets.event_schema import CONTEXT, USERS
from sparsejax.data.sets.events import Events
from sparsejax.predictors.predictor import Predictor
from sparsejax.predictors.ranking import NameLists
from sparsejax.predictors.runtime import Rows
from sparsejax.serving.batcher import Answer
from sparsejax.serving.histories import Histories
from sparsejax.serving.protocol import (
    NUMBERS,
    Asked,
    Chosen,
    Limits,
    RefusedError,
    Tensor,
    Vocabulary,
)

_INTEGERS = {name for name, kind in NUMBERS.items() if np.dtype(kind).kind in "iu"}
_REALS = NUMBERS.keys() - {"BOOL"}
_STRANGERS = "unknown_users"  # name of an output
# Score and value that pad the ranks without an item, if all rows of an answer have equal length.
# JSON has no -inf. The value is that of `Recommendations`.
_PADDING = np.finfo(np.float32).min, 0


@dataclasses.dataclass(frozen=True)
class Question:
    """A request, converted to rows.

    Attributes:
      given: the rows in the form of the programs' inputs.
      num_rows: number of rows.
      unknown: for each row, the number of its unknown names.
      k: number of items for each row; for clicks the number of best rows, 0 for all.
      padded: whether all rows of the answer have one length.
      only: whether the last of the rows names the items to rank.
      strangers: for each row 1 if the histories lack its user; None without histories.
    """

    given: Sequence[Rows]
    num_rows: int
    unknown: np.ndarray | None = None
    k: int = 0
    padded: bool = False
    only: bool = False
    strangers: np.ndarray | None = None


@runtime_checkable
class Form(Protocol):
    """The inputs and outputs of requests to one kind of predictor.

    Attributes:
      inputs: names, datatypes and shapes of the inputs.
      outputs: names, datatypes and shapes of the outputs.
      takes_missing: whether an element of an input may be missing.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    takes_missing: bool

    def question(self, asked: Asked, limits: Limits) -> Question:
        """Converts a request to rows.

        Raises:
          RefusedError: the tensors do not fit this predictor.
        """
        ...

    def tensors(self, question: Question, answer: Answer) -> dict[str, Tensor]:
        """Converts an answer to the outputs, by name."""
        ...


def form_of(
    predictor: Predictor,
    histories: Histories | None = None,
    room: int | None = None,
    user_features: str | None = None,
) -> Form:
    """The form of requests to a predictor.

    Args:
      predictor: the predictor.
      histories: earlier items of users, or None.
      room: most entries of a row, to which the earlier items of a user are cut; None
        cuts nothing.
      user_features: file with the columns of users, or None.

    Raises:
      DataError: the columns of users cannot be read.
      ValueError: the predictor has no names, or cannot use these histories or columns.
    """
    first = getattr(predictor.model, "first", None)
    if user_features is not None and getattr(first, "users", None) is None:
        raise ValueError(
            f"{user_features}: the model reads no columns of users; leave them out"
        )
    if predictor.signature.ranks_items:
        return Lists(predictor, histories, room, user_features)
    if histories is not None:
        raise ValueError(
            f"{histories.path}: a model of clicks reads no histories; leave them out"
        )
    return Records(predictor)


def _check_known(given: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    """Raises RefusedError if `given` has a name that is not in `known`."""
    if unknown := [name for name in given if name not in known]:
        shown = ", ".join(known) if known else "none"
        raise RefusedError(
            422, f"unknown {what} {unknown[0]!r:.80}; this model knows {shown}"
        )


def _check_type(tensor: Tensor, known: set[str], shown: str) -> None:
    if tensor.datatype not in known:
        raise RefusedError(
            422,
            f"the input {tensor.name!r} must have datatype {shown}, got {tensor.datatype}",
        )


class _Ranked:
    """Answers with the names of the best items of each row."""

    takes_missing: bool = False

    def __init__(self, predictor: Predictor, names: Vocabulary | None = None):
        self._predictor, self._model = predictor, predictor.model
        kinds = {"items": "BYTES", "scores": "FP32", "lengths": "INT32"}
        kinds["unknown"] = "INT32"
        if len(predictor.signature.outputs) == 3:
            kinds["values"] = "FP32"
        self.outputs = [Tensor(name, kind, (-1,), None) for name, kind in kinds.items()]
        self.names = Vocabulary(self._model.table) if names is None else names

    def _k(self, asked: Asked) -> int:
        """The number of items per row that a request wants."""
        k = asked.parameters.get("k", self._predictor.k)
        if type(k) is not int or not 1 <= k <= self._predictor.k:
            raise RefusedError(
                422,
                f"k must be a whole number from 1 to {self._predictor.k}, the most that "
                f"this model was exported for, got {k!r:.40}",
            )
        return k

    def tensors(self, question: Question, answer: Answer) -> dict[str, Tensor]:
        """Output tensors with the best items of each row, by the outputs' names."""
        ids, *figures = (array[:, : question.k] for array in answer)
        is_item = ids >= 0
        lengths = is_item.sum(axis=1, dtype=np.int32)
        if question.padded:
            shape = ids.shape
            pairs = zip(figures, _PADDING, strict=False)
            figures = [np.where(is_item, x, padding).ravel() for x, padding in pairs]
            ids = ids.ravel()
        else:
            if is_item.all():  # the usual case, in a tenth of the time
                ids, *figures = (x.ravel() for x in (ids, *figures))
            else:
                ids, *figures = (x[is_item] for x in (ids, *figures))
            shape = ids.shape
        assert question.unknown is not None
        unknown = question.unknown.astype(np.int32)
        found = [
            Tensor("items", "BYTES", shape, Chosen(self.names, ids)),
            *(
                Tensor(name, "FP32", shape, x)
                for name, x in zip(("scores", "values"), figures, strict=False)
            ),
            Tensor("lengths", "INT32", lengths.shape, lengths),
            Tensor("unknown", "INT32", unknown.shape, unknown),
        ]
        if question.strangers is not None:
            strangers = question.strangers.astype(np.int32)
            found.append(Tensor(_STRANGERS, "INT32", strangers.shape, strangers))
        return {tensor.name: tensor for tensor in found}


class Lists(_Ranked):
    """Predictors of items and of histories: lists of names."""

    def __init__(
        self,
        predictor: Predictor,
        histories: Histories | None = None,
        room: int | None = None,
        user_features: str | None = None,
    ):
        """Checks that the predictor accepts names; see `form_of`.

        Raises:
          ValueError: the predictor accepts no names, or cannot use these histories or columns.
        """
        # The check has no rows: a row might need columns of its user or of the next event.
        times = [] if predictor.model.reads_times else None
        predictor.model.first.rows_of_names([], times=times)
        super().__init__(predictor)
        self._beside: str = predictor.signature.beside_items
        if self._beside == "times" and not self._model.reads_times:
            self._beside = ""
        self._histories, self._room = histories, room
        kinds = {"items": "BYTES", "lengths": "INT32"}
        if histories is not None:
            self._check_histories(histories)
            known = find_names(histories.features, predictor.items)
            self._known = known >= 0  # items of the histories that the model knows
        first = self._model.first
        self._users: Events | None = getattr(first, "users", None)
        self._people: tuple[Events, Places] | None = None
        if user_features is not None:
            found = read_user_features(user_features, self._users)
            table = NameTable.of(found.user_names)
            self._people = found.columns, Places(table.index)
        if histories is not None or self._people is not None:
            kinds["users"] = "BYTES"
            self.outputs.append(Tensor(_STRANGERS, "INT32", (-1,), None))
        if self._beside:
            kinds[self._beside] = {"values": "FP32", "times": "FP64"}[self._beside]
        self._lists = ["exclude", "candidates"]
        if predictor.signature.layer is None:  # the programs always rank all items
            self._lists.remove("candidates")
        for name in self._lists:
            kinds |= {name: "BYTES", f"{name}_lengths": "INT32"}
        self._columns: list[str] = []
        if (requests := getattr(self._model, "requests", None)) is not None:
            self._columns = requests.columns
            _ = requests.reader  # made now, so that the first request is not delayed
            numbers = set() if requests.schema is None else {*requests.schema.dense}
            kinds |= {n: "FP32" if n in numbers else "BYTES" for n in self._columns}
        self._events: Events | None = getattr(first, "events", None)
        self._beside_items = _column_inputs(self._events, self._users)
        kinds |= self._beside_items
        self.inputs = [Tensor(name, kind, (-1,), None) for name, kind in kinds.items()]
        self.takes_missing = bool(self._columns or self._beside_items)

    def question(self, asked: Asked, limits: Limits) -> Question:
        """Converts lists of names to rows."""
        tensors = asked.tensors
        _check_known(tensors, [each.name for each in self.inputs], "input")
        _check_known(asked.parameters, ["k", "exclude_seen", "timeout"], "parameter")
        if self.takes_missing:
            own = (n for n in tensors if n not in self._beside_items)
            _check_whole({n: tensors[n] for n in own if n not in self._columns})
        items, indptr, users = _items_and_users(tensors, limits)
        (histories, kept), rows = self._lists_of(items, indptr), len(indptr) - 1
        options: dict[str, Any] = {}
        if self._beside in tensors:
            numbers = _of_items(tensors[self._beside], items)[kept]
            ends = itertools.pairwise(histories.indptr.tolist())
            options[self._beside] = [numbers[a:b] for a, b in ends]
        if self.takes_missing:
            given = _columns_of(self._beside_items, tensors, items, kept, rows)
            further = self._further_columns(tensors, rows, limits)
            options["columns"] = given | further
        for name in self._lists:
            if name in tensors:
                options[name] = self._further(name, tensors, indptr, limits)
            elif f"{name}_lengths" in tensors:
                raise RefusedError(422, f"{name}_lengths needs the input {name!r}")
        only = options.pop("candidates", None)
        if users is not None and self._histories is not None:
            beside = options.pop(self._beside, None)
            further = options.get("exclude")
            histories, beside = self._joined(users.data, histories, beside, further)
            if beside is not None:
                options[self._beside] = beside
        k, options["exclude_seen"] = self._k(asked), _exclude_seen(asked)
        try:
            if self._people is not None and users is not None:
                options["columns"][USERS] = self._known_users(users, options["columns"])
            given, unknown = self._model.rows_of_names(histories, only=only, **options)
        except (DataError, TypeError, ValueError) as error:
            raise RefusedError(422, str(error)[:500]) from None
        padded, strangers = len(items.shape) == 2, self._strangers(users, rows)
        return Question(given, rows, unknown, k, padded, only is not None, strangers)

    def _known_users(self, users: Tensor, columns: Mapping[str, Any]) -> Events:
        """The known columns of a request's users, except for columns that the request contains."""
        assert self._people is not None
        known, places = self._people
        sent = {name.removeprefix(USERS) for name in columns if name.startswith(USERS)}
        return known.rows(places.find([*users.data]), replaced=sent)

    def _strangers(self, users: Tensor | None, rows: int) -> np.ndarray | None:
        """`[rows]` int32: 1 if the user is unknown; None without histories and user columns."""
        if self._histories is None and self._people is None:
            return None
        found = np.zeros(rows, np.int32)
        if users is not None:
            names, found = [*users.data], found + 1
            if self._people is not None:
                found[self._people[1].find(names) >= 0] = 0
            if self._histories is not None:
                found[[name in self._histories for name in names]] = 0
        return found

    def _further_columns(
        self, tensors: Mapping[str, Tensor], rows: int, limits: Limits
    ) -> dict[str, Any]:
        """The request columns for a two-stage predictor, by name."""
        found = {}
        for name in self._columns:
            if (tensor := tensors.get(name)) is None:
                raise RefusedError(422, f"the input {name!r} is missing: [rows] or [1]")
            count, *width = tensor.shape
            if count not in (1, rows) or (width > [1] and tensor.datatype != "BYTES"):
                raise RefusedError(
                    422,
                    f"the input {name!r} must be [{rows}], as there are rows of items, or [1]; "
                    f"got {list(tensor.shape)}",
                )
            _check_names(max(width, default=1), limits)
            found[name] = _of_all_rows(_cells(tensor), rows)
        return found

    def _further(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        indptr: np.ndarray,
        limits: Limits,
    ) -> NameLists:
        """The lists of names, such as exclusions, that the tensor `name` has for each row."""
        given = tensors[name]
        found = _indptr(given, tensors.get(f"{name}_lengths"), limits)
        if len(found) != len(indptr):
            raise RefusedError(
                422,
                f"there are {len(indptr) - 1} rows of items, but {len(found) - 1} of {name}; "
                f"give {name}_lengths, one number for each row",
            )
        return self._lists_of(given, found)[0]

    def _lists_of(self, items: Tensor, indptr: np.ndarray) -> tuple[NameLists, Any]:
        """Each row's names without padding, and which of the tensor's elements these are."""
        names, kept = items.data, slice(None)
        if len(items.shape) == 2:
            if isinstance(names, EncodedNames):
                kept = names.ends > names.starts
                names = EncodedNames(names.data, names.starts[kept], names.ends[kept])
            else:
                kept = np.fromiter(map(bool, names), bool, len(names))
                names = [*itertools.compress(names, kept)]
            indptr = np.concatenate([[0], np.cumsum(kept)])[indptr]
        if isinstance(names, EncodedNames):
            return NameLists(names, indptr, self.names.index.find(names)), kept
        return NameLists(names, indptr), kept

    def _check_histories(self, histories: Histories) -> None:
        if getattr(self._model.first, "events", None) is not None:
            raise ValueError(
                f"{histories.path}: the model reads columns of events, which histories of users "
                "do not bring to a service yet; leave it out, and send them with each request"
            )
        ordered = self._predictor.signature.beside_items == "times"
        if ordered and not histories.ordered:
            raise ValueError(
                f"{histories.path}: its rows have no order, which the model reads; save them "
                "with SequenceDataset.save"
            )
        if self._beside == "times" and not histories.has_times:
            raise ValueError(
                f"{histories.path}: its items have no times, which the model reads; save them "
                "with times"
            )

    def _joined(
        self,
        users: Sequence[str],
        asked: NameLists,
        beside: Any,
        further: NameLists | None,
    ) -> tuple[NameLists, list[np.ndarray] | None]:
        """Puts the stored items of users before the items of a request, with values or times.

        A value in the request replaces the user's stored value of the same item. Of a long
        history, only the latest items are used: as many as fit beside the items of the request
        and its `further` excluded items.
        """
        stored = self._histories
        assert stored is not None
        what = self._beside
        has = {"values": stored.has_values, "times": stored.has_times}
        numbered = beside is not None or has.get(what, False)
        names: list[str] = []
        ends, numbers = [0], []
        taken = np.diff(asked.indptr)
        if further is not None:
            taken = taken + np.diff(further.indptr)
        for row, (user, own) in enumerate(zip(users, asked.lists(), strict=True)):
            most = None if self._room is None else max(0, self._room - int(taken[row]))
            had, values, times = stored.of(
                user, self._known, most=most, once=what == "values"
            )
            before = values if what == "values" else times
            before = np.ones(len(had)) if before is None else before
            if what == "values":
                again = np.fromiter(map({*own}.__contains__, had), bool, len(had))
                had = [*itertools.compress(had, ~again)]
                before = before[~again]
            now = np.ones(len(own)) if beside is None else beside[row]
            if what == "times" and beside is None:
                now = now[:0]  # times are missing, which is reported later
            names += [*had, *own]
            ends.append(len(names))
            numbers.append(np.concatenate([before, now]))
        return NameLists(names, np.array(ends)), numbers if numbered else None


class Similar(_Ranked):
    """Items that are similar to given items: each given item makes a row."""

    def __init__(self, predictor: Predictor, names: Vocabulary):
        super().__init__(predictor, names)
        self.inputs = [Tensor("items", "BYTES", (-1,), None)]

    def question(self, asked: Asked, limits: Limits) -> Question:
        """Converts names to rows."""
        _check_known(asked.tensors, ["items"], "input")
        _check_known(asked.parameters, ["k", "timeout"], "parameter")
        items = asked.tensors.get("items")
        if items is None or len(items.shape) != 1:
            raise RefusedError(422, "expected the input 'items': BYTES, [n] names")
        _check_type(items, {"BYTES"}, "BYTES")
        _check_rows(len(items.data), limits)
        given, unknown = self._model.rows_of_items(items.data)
        return Question(given, len(items.data), unknown, self._k(asked))

    def tensors(self, question: Question, answer: Answer) -> dict[str, Tensor]:
        """Converts an answer to the outputs, by name. An unknown item has no similar items."""
        ids, scores = answer
        assert question.unknown is not None
        ids = np.where(question.unknown[:, None], -1, ids)
        return super().tensors(question, [ids, scores])


def _column_inputs(events: Events | None, users: Events | None) -> dict[str, str]:
    """Names of the inputs for event and user columns, with the datatype of each."""
    found = {}
    for begin, columns in ((EVENTS, events), (CONTEXT, events), (USERS, users)):
        if columns is not None:
            schema = columns.schema
            names = schema.context if begin == CONTEXT else schema.used
            kinds = ("FP32" if name in schema.dense else "BYTES" for name in names)
            found |= {f"{begin}{n}": kind for n, kind in zip(names, kinds, strict=True)}
    return found


def _check_whole(tensors: Mapping[str, Tensor]) -> None:
    """Raises RefusedError if a tensor has an element that is missing."""
    for name, tensor in tensors.items():
        if isinstance(tensor.data, list) and None in tensor.data:
            raise RefusedError(422, f"an element of the input {name!r} is null")


def _items_and_users(
    tensors: Mapping[str, Tensor], limits: Limits
) -> tuple[Tensor, np.ndarray, Tensor | None]:
    """The tensor of items, the offsets of its rows, and the tensor of the rows' users or None."""
    users = tensors.get("users")
    if users is not None:
        _check_type(users, {"BYTES"}, "BYTES")
        _check_rows(len(users.data), limits)
    if "items" in tensors:
        items = tensors["items"]
        indptr = _indptr(items, tensors.get("lengths"), limits)
    elif users is not None and "lengths" not in tensors:
        items = Tensor("items", "BYTES", (0,), [])
        indptr = np.zeros(len(users.data) + 1, np.int64)
    else:
        raise RefusedError(422, "the input 'items' is missing: BYTES, [n] names")
    if users is not None and users.shape != (len(indptr) - 1,):
        raise RefusedError(
            422,
            f"the input 'users' must be [rows], as there are rows of items, "
            f"[{len(indptr) - 1}], got {list(users.shape)}",
        )
    return items, indptr, users


def _exclude_seen(asked: Asked) -> bool:
    """Whether a request excludes the items of a row from the row's recommendations."""
    seen = asked.parameters.get("exclude_seen", True)
    if not isinstance(seen, bool):
        raise RefusedError(422, f"exclude_seen must be true or false, got {seen!r:.40}")
    return seen


def _of_items(beside: Tensor, items: Tensor) -> np.ndarray:
    """The numbers of a tensor that has one number for each item of the request."""
    _check_type(beside, _REALS, "FP32 or FP64")
    if beside.shape != items.shape:
        raise RefusedError(
            422,
            f"the input {beside.name!r} must have the shape of items, "
            f"{list(items.shape)}, got {list(beside.shape)}",
        )
    return beside.data


def _columns_of(
    inputs: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    items: Tensor,
    kept: Any,
    rows: int,
) -> dict[str, Any]:
    """The user columns and event columns of a request, without padding, by name."""
    found: dict[str, Any] = {}
    for name, datatype in inputs.items():
        if (tensor := tensors.get(name)) is None:
            continue
        is_number = datatype == "FP32"
        if is_number:
            _check_type(tensor, _REALS, "FP32 or FP64")
        of_events = name.startswith(EVENTS)
        count = len(items.data) if of_events else rows
        shape = items.shape if of_events else (rows,)
        if tensor.shape != shape and (is_number or tensor.shape[:1] != (count,)):
            raise RefusedError(
                422,
                f"the input {name!r} must have the shape {list(shape)}"
                + ("" if is_number else f", or [{count}, m] for lists of categories")
                + f", got {list(tensor.shape)}",
            )
        if tensor.shape == shape:
            tensor = tensor._replace(shape=(count,))
        else:
            _check_type(tensor, {"BYTES"}, "BYTES, as empty names fill up its lists")
        cells = _cells(tensor)
        if of_events and not isinstance(kept, slice):
            is_array = isinstance(cells, np.ndarray)
            cells = cells[kept] if is_array else [*itertools.compress(cells, kept)]
        found[name] = cells
    return found


def _indptr(items: Tensor, lengths: Tensor | None, limits: Limits) -> np.ndarray:
    """The offsets of rows in a list of names: row r is `[indptr[r], indptr[r + 1])`."""
    _check_type(items, {"BYTES"}, "BYTES")
    total, name = len(items.data), items.name
    if len(items.shape) == 2:
        if lengths is not None:
            raise RefusedError(
                422,
                f"the input {name!r} is [rows, n], filled up with empty names: leave out "
                f"{lengths.name!r}",
            )
        rows, width = items.shape
        _check_rows(rows, limits)
        _check_names(width, limits)
        return np.arange(rows + 1) * width
    if lengths is None:
        _check_names(total, limits)
        return np.array([0, total])
    _check_type(lengths, _INTEGERS, "INT32")
    if len(lengths.shape) != 1:
        raise RefusedError(422, f"the input {lengths.name!r} must be [rows]")
    counts = lengths.data.tolist()
    _check_rows(len(counts), limits)
    if min(counts, default=0) < 0 or sum(counts) != total:
        raise RefusedError(
            422,
            f"{lengths.name!r} must be 0 or more, with the sum {total}, the number of "
            f"names in {name!r}; the sum is {sum(counts)}, the least {min(counts, default=0)}",
        )
    _check_names(max(counts, default=0), limits)
    return np.cumsum([0, *counts])


def _check_rows(rows: int, limits: Limits) -> None:
    if rows > limits.rows:
        raise RefusedError(
            422, f"{rows} rows in a request, more than the {limits.rows} allowed"
        )


def _check_names(names: int, limits: Limits) -> None:
    if names > limits.names:
        raise RefusedError(
            422, f"{names} names in a row, more than the {limits.names} allowed"
        )


def _cells(tensor: Tensor) -> Any:
    """A tensor as a column of records: numbers, categories, or a list of either for each row."""
    if tensor.datatype != "BYTES":
        return tensor.data
    cells = [*tensor.data]
    if len(tensor.shape) == 1:
        return cells
    rows, width = tensor.shape
    each = (cells[i * width : (i + 1) * width] for i in range(rows))
    return [[cell for cell in row if cell] for row in each]


def _of_all_rows(cells: Any, rows: int) -> Any:
    """Repeats a column's cell for all rows if the column has only one cell."""
    if len(cells) == rows:
        return cells
    return cells.repeat(rows) if isinstance(cells, np.ndarray) else [*cells] * rows


class Records:
    """Predictors of clicks: a tensor for each column. Each label is an output.

    With k in a request, the best k rows are chosen by the first label.
    """

    takes_missing: bool = True

    def __init__(self, predictor: Predictor):
        """Checks that the predictor's file contains its schema.

        Raises:
          ValueError: the schema is missing.
        """
        self._model = predictor.model
        schema: ClickSchema | None = predictor.schema
        if schema is None:
            raise ValueError(
                "this predictor has no schema, so it cannot be asked by columns; export "
                "it with names=train"
            )
        self.inputs = [
            Tensor(name, "FP32" if name in schema.dense else "BYTES", (-1,), None)
            for name in schema.inputs
            if name not in schema.fixed
        ]
        self._categories, self._labels = set(schema.ids), list(schema.several)
        if "rows" in self._labels:
            raise ValueError("a label is called rows, as an output of the service is")
        _ = self._model.reader  # made now, so that the first request is not delayed
        self.outputs = [
            *(
                Tensor(n, "FP32", (-1,), None)
                for n in self._labels or ["probabilities"]
            ),
            Tensor("rows", "INT32", (-1,), None),
        ]

    def question(self, asked: Asked, limits: Limits) -> Question:
        """Converts columns to rows."""
        names = [each.name for each in self.inputs]
        _check_known(asked.tensors, names, "input")
        _check_known(asked.parameters, ["k", "timeout"], "parameter")
        if missing := [name for name in names if name not in asked.tensors]:
            raise RefusedError(422, f"the input {missing[0]!r} is missing: [n]")
        tensors = [self._column(each) for each in asked.tensors.values()]
        several = {each.shape[0] for each in tensors} - {1}
        lists = {each.name for each in tensors if len(each.shape) == 2}
        if len(several) > 1 or not lists <= self._categories:
            shapes = {name: list(each.shape) for name, each in asked.tensors.items()}
            raise RefusedError(
                422,
                "all inputs must be [n] with one n, or [1] if all rows have the same; or lists "
                "of categories [n, m], got "
                f"{shapes!r:.300}",
            )
        for each in tensors:
            if each.name in lists:
                _check_type(each, {"BYTES"}, "BYTES, as empty names fill up its lists")
        count = max(several, default=1)
        _check_rows(count, limits)
        _check_names(max((asked.tensors[n].shape[1] for n in lists), default=0), limits)
        k = asked.parameters.get("k")
        if k is not None and (type(k) is not int or k < 1):
            raise RefusedError(422, f"k must be a whole number from 1, got {k!r:.40}")
        if k and asked.outputs is not None and "rows" not in asked.outputs:
            raise RefusedError(
                422, "with k the best rows come first: ask for the output 'rows', too"
            )
        records = {each.name: _of_all_rows(_cells(each), count) for each in tensors}
        try:
            given = self._model.rows_of_records(records)
        except (DataError, TypeError, ValueError) as error:
            raise RefusedError(422, str(error)[:500]) from None
        return Question(given, count, k=k or 0)

    def _column(self, given: Tensor) -> Tensor:
        """Reshapes numbers from `[n, 1]`, which MLServer's clients write, to `[n]`."""
        if given.name in self._categories or given.shape[1:] != (1,):
            return given
        return given._replace(shape=given.shape[:1])

    def tensors(self, question: Question, answer: Answer) -> dict[str, Tensor]:
        """Converts an answer to outputs by name: for all rows, or the best `k`, best first."""
        (logits,) = answer
        rows = np.arange(len(logits), dtype=np.int32)
        if question.k:
            by = logits[:, 0] if self._labels else logits
            rows = np.argsort(-by, kind="stable")[: question.k].astype(np.int32)
        found = self._model.predictions(logits[rows])
        if not isinstance(found, dict):
            found = {"probabilities": found}
        found = {n: Tensor(n, "FP32", x.shape, x) for n, x in found.items()}
        return {**found, "rows": Tensor("rows", "INT32", rows.shape, rows)}
