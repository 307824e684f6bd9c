"""Two runs as one model: the first finds candidates, the second ranks them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsejax import metrics
from sparsejax.data.files.names import Names, quoted, to_arrow
from sparsejax.data.reading.by_name import ByName, lists_of
from sparsejax.data.reading.histories import EVENTS
from sparsejax.data.reading.sources import Inputs, NamedArray
from sparsejax.data.sets.click_records import examples_of
from sparsejax.data.sets.click_schema import (
    FIRST_KNOWN,
    ClickSchema,
    KeyColumn,
    VocabularyColumn,
    vocabulary_columns,
    with_columns,
)
from sparsejax.data.sets.event_schema import CONTEXT, USERS
from sparsejax.engine.rank.evaluation import Setup, prepared_evaluation
from sparsejax.engine.rank.recommendations import Recommendations
from sparsejax.kinds.reading import are_baskets, some_rows
from sparsejax.kinds.source import item_names
from sparsejax.kinds.stages import Stages
from sparsejax.options.option import takes
from sparsejax.options.predicting import Rank
from sparsejax.options.staging import (
    EvaluateJoined,
    ExportJoined,
    Join,
    RecommendJoined,
)
from sparsejax.predictors.signature import Stages as StatedStages
from sparsejax.predictors.stages import DENSE, IDS, Requests, padded
from sparsejax.sparse import CSR
from sparsejax.verbs.export import export_with_answer
from sparsejax.verbs.recommend import recommend

_PAIRS = 8192  # pairs of rows and candidates that are scored at a time
_LENGTH = 200  # default length of a history
# Sources of a column's values.
_ITEM, _USER, _HISTORY = "the name of the item", "the name of the user", "the history"
_FIXED = "its fixed value"
_ITEM_COLUMNS, _USER_COLUMNS = "item_columns", "user_columns"
_REQUEST_COLUMNS = "request_columns"
_OF_ITEMS = {_ITEM, _ITEM_COLUMNS, _FIXED}
# Names and prefixes of a service's other inputs, which columns must not have.
_BESIDE = EVENTS, CONTEXT, USERS
_RESERVED = {
    f"{name}{end}"
    for name in ("items", "exclude", "candidates")
    for end in ("", "_lengths")
} | {"lengths", "users", "times", "values"}


@dataclasses.dataclass(frozen=True, eq=False)
class _Shown(Inputs):
    """Inputs with the names of all items."""

    feature_names: Names


class TwoStage:
    """A run that finds candidates, and a run of clicks that ranks them, as one model.

    ::

        both = sj.TwoStage(retrieval, ranking, candidates=500, item_columns="items.csv")
        both.evaluate(heldout)
        both.recommend(["ann"], k=10)
        both.export("shop.predictor")

    The second stage reads the columns of its training data. Each has one source: the name of the
    item, the columns of items, the name of the user, the columns of users, the history, or the
    request. Items are ranked by the probability of a click, or by several labels. Equally good
    items are ordered by the first stage.

    >>> _ = pathlib.Path("shown.csv").write_text("item,click\\nmilk,1\\nrye,0\\ntea,0\\n")
    >>> schema = ClickSchema("click", ids={"item": HashedColumn(8)})
    >>> ranking = Run.train("shown.csv", schema=schema, model="wide_deep")
    >>> TwoStage(Run.load("run"), ranking, candidates=2)
    TwoStage(candidates=2, item: the name of the item)
    """

    @takes(Join)
    def __init__(self, asked: Join) -> None:
        """Combines the two runs to a two-stage model.

        Raises:
          DataError: a table cannot be read.
          TypeError: an argument has the wrong type.
          ValueError: a run is of the wrong kind. A column of the second stage has no source, or
              two.
        """
        _check_types(asked)
        self._first, self._reading = asked.retrieval._kept, asked.retrieval._reading
        self._second, self._asked = asked.ranking._kept, asked
        _check_kinds(self._first.settings, self._second.settings)
        self._schema: ClickSchema = self._second.known.schema
        texts = [*self._schema.ids]
        self._items, self._users = (
            None if source is None else ByName.read(source, key, texts)
            for source, key in (
                (asked.item_columns, asked.item_as),
                (asked.user_columns, asked.user_as),
            )
        )
        _ranks_by(self._schema, asked.rank_by)
        self._places = _places_of(self._schema, asked, self._items, self._users)
        tables = {_ITEM_COLUMNS: self._items, _USER_COLUMNS: self._users}
        for place, table in tables.items():
            if table is not None and place not in self._places.values():
                raise ValueError(
                    f"{place} has {table.columns}, but the ranking model reads none of them; it "
                    f"reads {[*self._places]}"
                )

    def __repr__(self) -> str:
        places = ", ".join(f"{name}: {place}" for name, place in self._places.items())
        return f"TwoStage(candidates={self._asked.candidates:,}, {places})"

    @takes(EvaluateJoined)
    def evaluate(self, asked: EvaluateJoined) -> Mapping[str, float]:
        """Measures both stages together, and each alone, on the same held-out interactions.

        Metrics of the first stage alone begin with `retrieval_`. Its recall at the number of
        candidates is an upper bound for both stages. Metrics of the second stage alone begin with
        `ranking_`.

        Raises:
          ValueError: `inputs` or `requests` are needed; nothing is held out; rows do not match; or
              `k` exceeds the number of candidates.
        """
        kind, data = self._kind, self._data("evaluate", asked.inputs)
        heldout = kind.heldout(asked.heldout, self._reading, data, asked.inputs)
        heldout = kind.with_targets(heldout, self._first.settings)
        if hasattr(heldout, "only_targets"):
            heldout = heldout.only_targets()
            data = data.with_context_of(heldout)
        seen = kind.matrix(data)
        counted = asked.counted() | {"exclude": seen if asked.exclude_seen else None}
        size = self._rows_at_once
        setup = Setup(popularity=seen, batch_size=size, **counted)
        self._check_k(max(setup.ks))
        model, shown = self._staged(data, asked)
        prepared = prepared_evaluation(shown, kind.matrix(heldout), setup)
        most = model.candidates
        found = prepared.run(model, keep_rows=asked.keep_rows)
        ks = tuple(sorted({*setup.ks, most}))
        alone = {
            "retrieval": dataclasses.replace(prepared, ks=ks).run(model.alone("first"))
        }
        if asked.ranking_alone:
            alone["ranking"] = prepared.run(model.alone("second"))
        # Metrics of the popularity baseline are left out: they are equal for all models.
        kept = {f"recall@{most}"} | {
            n for n in found if "@" in n and not n.startswith("popularity_")
        }
        beside = {
            f"{stage}_{name}": value
            for stage, measured in alone.items()
            for name, value in measured.items()
            if name in kept
        }
        rows, joined = getattr(found, "rows", None), {**found, **beside}
        return joined if rows is None else metrics.Measured(joined, rows)

    @takes(RecommendJoined)
    def recommend(self, asked: RecommendJoined) -> Recommendations:
        """Recommends items to rows, with their names; scores are probabilities.

        Raises:
          ValueError: a row name is unknown; `inputs` or `requests` are needed; or `k` exceeds the
              number of candidates.
        """
        self._check_k(asked.k)
        asked.check_kind(self._kind.name)
        kind, data = self._kind, self._data("recommend", asked.inputs)
        if asked.users is not None:
            users = [asked.users] if isinstance(asked.users, str) else asked.users
            data = some_rows(data, users)
        if asked.context is not None:
            data = data.with_context(asked.context)
        exclude = kind.excluded(asked, self._reading, self._first, data)
        model, shown = self._staged(data, asked)
        options = asked.shared_with(Rank) | {
            "inputs": shown,
            "exclude": None if exclude is None else kind.matrix(exclude),
            "batch_size": self._rows_at_once,
            "context": None,  # already part of the data
        }
        return recommend(model, **options).named(data.row_names, self._names)

    @takes(ExportJoined)
    def export(self, asked: ExportJoined) -> None:
        """Writes both stages as one predictor, which `sparsejax.load_predictor` reads.

        The file contains the columns of items. Each request has the other columns, including user
        columns.

        Raises:
          ValueError: a column has the name of an input of a service; or `k` exceeds the number of
              candidates.
        """
        self._check_k(asked.k)
        names = self._requests.columns
        if clash := [n for n in names if n in _RESERVED or n.startswith(_BESIDE)]:
            raise ValueError(
                f"the ranking model has the columns {clash}, whose names are those of other "
                "inputs of a service: call them otherwise, and train it again"
            )
        size = self._rows_at_once if asked.batch_size is None else asked.batch_size
        # Predictor files of a run have no input of times, so a history without times stands for
        # data.
        kind, bare = self._kind, [[str(self._names[0])]]
        data: Any = self._first.known
        if self._names is data:
            data = kind.read_shown(bare, self._reading, self._first)
        elif data.events is not None and data.events.schema.context:
            data = data.with_context({})
        model = self._model(kind.shown(self._first.model(), data, None)[0])
        names = self._requests
        export_with_answer(model, asked.path, names=names, k=asked.k, batch_size=size)

    @functools.cached_property
    def _requests(self) -> Requests:
        """The columns that a request contains, and their conversion to inputs of the model."""
        places, asked = self._places, self._asked
        names = [name for name, place in places.items() if place not in _OF_ITEMS]
        schema, owners = with_columns(self._schema, names)
        ids = {} if schema is None else schema.ids
        history = next((n for n, place in places.items() if place == _HISTORY), None)
        lengths, network = dict.fromkeys(ids, 1), self._second.settings.network
        if history is not None:
            lengths[history] = getattr(network, "length", _LENGTH)
        pairs = getattr(network, "beside", ())
        beside = {name: of for of, name in pairs if {of, name} <= ids.keys()}
        keys = {name for name, column in ids.items() if isinstance(column, KeyColumn)}
        given, free = asked.lengths or {}, lengths.keys() - beside.keys() - keys
        if unknown := sorted(given.keys() - free):
            raise ValueError(
                f"lengths has {unknown}, but the columns of requests that may have lists of "
                f"their own are {sorted(free)}"
            )
        lengths |= given
        lengths = {name: lengths[beside.get(name, name)] for name in lengths}
        known = self._second.known.vocabularies
        return Requests(
            feature_names=self._names,
            stages=StatedStages(history=history, lengths=lengths, beside=beside),
            schema=schema,
            vocabularies={new: known[old] for new, old in owners.items()},
            events=getattr(self._first.known, "events", None),
            users=getattr(self._first.known, "users", None),
        )

    @functools.cached_property
    def _item_arrays(self) -> dict[str, np.ndarray]:
        """Item columns by name, as arrays in the order of the first stage's items."""
        names, places = self._names, self._places
        own = [name for name, place in places.items() if place in _OF_ITEMS]
        is_told = any(places[name] != _FIXED for name in own)
        schema, owners = with_columns(self._schema, own if is_told else [])
        if schema is None:
            raise ValueError(
                f"no column of the ranking model tells the candidates apart: it has "
                f"{[*places]}; name the column of items, item_as=..., or give "
                "item_columns"
            )
        known = self._second.known.vocabularies
        columns = {}
        if self._items is not None:
            chosen = [n for n, place in places.items() if place == _ITEM_COLUMNS]
            columns = dict(self._items.of(names, chosen, some=True))
        if self._asked.item_as in places:
            columns[self._asked.item_as] = to_arrow(names)
        vocabularies = {new: known[old] for new, old in owners.items()}
        dense, ids = examples_of(columns, schema, vocabularies)
        self._check_known(ids)
        found = {DENSE: dense} if schema.dense else {}
        for name, each in ids.items():
            longest = 1
            if isinstance(each, CSR):
                longest = int(np.diff(np.asarray(each.indptr)).max(initial=1))
            found[f"{IDS}{name}"] = padded(name, each, longest)
        return found

    def _check_known(self, ids: Mapping[str, Any]) -> None:
        """Raises ValueError if all item names are unknown to the second stage."""
        name = self._asked.item_as
        is_named = isinstance(self._schema.ids.get(name), VocabularyColumn)
        if name in ids and is_named and (ids[name] < FIRST_KNOWN).all():
            raise ValueError(
                f"the ranking model knows none of the {len(self._names):,} items, such as "
                f"{quoted(self._names)}, in its column {name!r}: do both runs have the same names?"
            )

    def _model(self, first: Any) -> Stages:
        """Combines the models of both stages to a single one.

        Args:
          first: model of the first stage, as a ranker of rows.
        """
        # Columns of requests come before those of items; sorting keeps the order of each.
        order = sorted(self._schema.dense, key=lambda n: self._places[n] in _OF_ITEMS)
        return Stages(
            first,
            self._second.model(),
            candidates=self._asked.candidates,
            items=self._item_arrays,
            requests=self._requests.inputs,
            dense=[order.index(name) for name in self._schema.dense],
            wide=[n for n, c in self._schema.ids.items() if isinstance(c, KeyColumn)],
            ranks_by=_ranks_by(self._schema, self._asked.rank_by),
        )

    def _staged(
        self, data: Any, asked: EvaluateJoined | RecommendJoined
    ) -> tuple[Stages, Inputs]:
        """The combined model, and its inputs for the rows of `data`."""
        kind = self._kind
        first, shown, _ = kind.shown(self._first.model(), data, None)
        names, lists = data.row_names, lists_of(data, self._names)
        arrays = self._requests.arrays(self._columns(names, asked), lists)
        parts = {n: NamedArray("requests", a, names) for n, a in arrays.items()}
        inputs = _Shown({**shown.parts, **parts}, False, self._names)
        return self._model(first), inputs

    def _columns(
        self, rows: Names, given: EvaluateJoined | RecommendJoined
    ) -> dict[str, Any]:
        """The request columns of `rows`, by name."""
        asked, requests, columns = self._asked, given.requests, dict[str, Any]()
        chosen = {
            place: [n for n, its in self._places.items() if its == place]
            for place in self._places.values()
        }
        for name in chosen.get(_USER, []):
            columns[name] = to_arrow(rows)
        if self._users is not None:
            columns |= self._users.of(rows, chosen.get(_USER_COLUMNS, []))
        if are_baskets(given.inputs):  # their numbers may be names of other users
            columns = {name: [None] * len(rows) for name in columns}
        wanted = chosen.get(_REQUEST_COLUMNS, [])
        if bool(wanted) != (requests is not None):
            raise ValueError(
                f"give requests=..., a table with the columns {wanted}"
                if wanted
                else "requests is of no use: request_columns names no column of requests"
            )
        if wanted:
            table = ByName.read(requests, asked.user_as, self._schema.ids, ordered=True)
            if lacks := [name for name in wanted if name not in table.columns]:
                raise ValueError(
                    f"{table.what}: lacks the columns {lacks}; it has {table.columns}"
                )
            columns |= table.of(rows, wanted, some=True)
        return columns

    def _data(self, method: str, inputs: Any) -> Any:
        """The data that the first stage reads, from the `inputs` of a method."""
        inputs = self._first.inputs(method, inputs)
        return self._kind.read_shown(inputs, self._reading, self._first)

    @property
    def _kind(self) -> Any:
        """The kind of the first stage's model, which ranks items."""
        return self._first.settings.kind

    @property
    def _names(self) -> Names:
        """The names of the items of the first stage."""
        return item_names(self._first.known)

    @property
    def _rows_at_once(self) -> int:
        return max(1, _PAIRS // self._asked.candidates)

    def _check_k(self, k: int) -> None:
        """Raises ValueError if `k` exceeds the number of candidates."""
        if k > self._asked.candidates:
            raise ValueError(
                f"k is {k:,}, but the first stage finds {self._asked.candidates:,} candidates"
            )


def _check_types(asked: Join) -> None:
    """Raises TypeError if an argument has the wrong type."""
    number = int, float, np.integer, np.floating
    lengths, labels = asked.lengths, asked.rank_by
    run = "a Run, as sj.Run.load reads it"
    expected = {
        "retrieval": run,
        "ranking": run,
        "request_columns": "a list of names",
        "lengths": "a whole number above 0 for each of some columns, such as {'had': 50}",
        "rank_by": "the name of a label, or a number for each of some, such as {'buy': 20}",
    }
    wrong = {
        "retrieval": not hasattr(asked.retrieval, "_kept"),
        "ranking": not hasattr(asked.ranking, "_kept"),
        "request_columns": isinstance(asked.request_columns, str),
        "lengths": lengths is not None and not _holds(lengths, (int, np.integer), 1),
        "rank_by": not (isinstance(labels, str | None) or _holds(labels, number)),
    }
    for name, text in expected.items():
        if wrong[name]:
            raise TypeError(f"{name} is {text}, got {getattr(asked, name)!r:.80}")


def _holds(given: Any, kinds: tuple[type, ...], least: float = -math.inf) -> bool:
    """Whether `given` is a mapping to values of the types `kinds`, each at least `least`."""
    return isinstance(given, Mapping) and all(
        isinstance(each, kinds) and not each < least for each in given.values()
    )


def _places_of(
    schema: ClickSchema, asked: Join, items: ByName | None, users: ByName | None
) -> dict[str, str]:
    """The source of each column of the second stage.

    Raises:
      ValueError: a column has no source, or two; or a named column does not exist.
    """
    used = [*schema.dense, *schema.ids]
    history = [] if asked.history_as is None else [asked.history_as]
    for what, names, known in (
        (f"{_REQUEST_COLUMNS}: the ranking model has no", asked.request_columns, used),
        ("history_as: among categories, the ranking model has no", history, schema.ids),
    ):
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"{what} column {unknown[0]!r}; it has {[*known]}")
    found: dict[str, list[str]] = {name: [] for name in used}
    for place, names in (
        (_FIXED, schema.fixed),
        (_ITEM, [asked.item_as]),
        (_ITEM_COLUMNS, [] if items is None else items.columns),
        (_USER, [asked.user_as]),
        (_USER_COLUMNS, [] if users is None else users.columns),
        (_REQUEST_COLUMNS, asked.request_columns),
        (_HISTORY, history),
    ):
        for name in found.keys() & {*names}:
            found[name].append(place)
    if asked.history_as is None:
        owners = vocabulary_columns(schema)
        of_item = owners.get(asked.item_as)
        like = [
            name
            for name, places in found.items()
            if not places and of_item is not None and owners.get(name) == of_item
        ]
        if len(like) == 1:
            found[like[0]].append(_HISTORY)
    return _one_each(found)


def _one_each(found: Mapping[str, list[str]]) -> dict[str, str]:
    """The source of each column. Raises ValueError if a column has none or several."""
    for name, places in found.items():
        if len(places) > 1:
            raise ValueError(
                f"the column {name!r} of the ranking model comes from {' and from '.join(places)}: "
                "leave it out of one of them"
            )
    for name, places in found.items():
        if not places:
            raise ValueError(
                f"the column {name!r} of the ranking model comes from nowhere: name it in "
                "request_columns, if it comes with a request, or in history_as, if it is the "
                "list of a user's items; or give a table that has it, item_columns or "
                "user_columns"
            )
    return {name: place for name, (place,) in found.items()}


def _ranks_by(
    schema: ClickSchema, asked: str | Mapping[str, float] | None
) -> list[tuple[int, float, bool]]:
    """Labels to rank by, each as its number, its factor, and whether it predicts a probability.

    Raises:
      ValueError: a label is unknown, or there is only one label.
    """
    labels = schema.several
    if not labels:
        if asked is not None:
            raise ValueError(
                f"rank_by: the ranking run has one label, {schema.label!r}"
            )
        return []
    wanted = schema.label if asked is None else asked
    factors = {wanted: 1.0} if isinstance(wanted, str) else dict(wanted)
    unknown = [name for name in factors if name not in labels]
    if unknown or not factors:
        raise ValueError(f"rank_by has {unknown}; the labels are {[*labels]}")
    if len(factors) == 1 and {*factors.values()} != {1.0}:
        raise ValueError(f"rank_by={asked!r}: give the name of a single label alone")
    if not all(map(math.isfinite, factors.values())) or 0 in factors.values():
        raise ValueError(f"rank_by={asked!r}: factors are finite, and not 0")
    places = [*labels]
    return [
        (places.index(name), float(factor), labels[name].is_probability)
        for name, factor in factors.items()
    ]


def _check_kinds(first: Any, second: Any) -> None:
    """Raises ValueError if the models of the two runs are not of the kinds for two stages."""
    if not first.kind.ranks_items:
        raise ValueError(
            "the first stage is a run that ranks items, such as one of sasrec or an "
            f"autoencoder, got a run of {first.kind.name}"
        )
    if second.kind.ranks_items:
        raise ValueError(
            f"the second stage is a run of clicks, got a run of {second.kind.name}"
        )
