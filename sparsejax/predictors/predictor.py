"""A model as programs, which predict without Flax and without the model's code."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, overload

import jax
import numpy as np

from sparsejax import change_folders
from sparsejax.change_folders import Changes
from sparsejax.data.files.names import Names
from sparsejax.data.reading.histories import Unordered
from sparsejax.data.reading.sources import Sources
from sparsejax.data.sets.clicks import ClickDataset
from sparsejax.data.sets.item_features import ItemFeatures
from sparsejax.data.sets.sequences import SequenceDataset
from sparsejax.engine.rank.recommendations import Recommendations
from sparsejax.predictors import archive, saving
from sparsejax.predictors.changes import Taken, changed_weights
from sparsejax.predictors.new_items import Content, chosen, extended
from sparsejax.predictors.signature import Signature
from sparsejax.predictors.stored_answer import StoredAnswer
from sparsejax.sparse import CSR
from sparsejax.wide_ids import WideIds

# Attributes that predictors of some kinds have.
_FACTS = {
    *("k", "num_features", "num_items", "items", "events", "users"),
    *("num_dense", "schema", "vocabularies", "requests"),
}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Predictor:
    """A model that `sparsejax.load_predictor` has read, ready to predict.

    Predictors of items and of histories recommend:

    >>> export_predictor(model, "model.predictor", k=2, names=train)
    >>> predictor = load_predictor("model.predictor")
    >>> predictor.recommend(train).ids.shape
    (32711, 2)
    >>> predictor.recommend_names(["/products", "/support"])
    ['/...', '/...']

    Predictors of clicks give probabilities:

    >>> _ = pathlib.Path("clicks.csv").write_text("click,user\\n1,ann\\n0,bob\\n0,ann\\n")
    >>> schema = ClickSchema("click", ids={"user": VocabularyColumn()})
    >>> clicks = read_clicks("clicks.csv", schema)
    >>> config = WideDeepConfig(dim=4, hidden=(8,))
    >>> clicks_model = WideDeep(
    ...     config, num_dense=0, features=clicks.features, rngs=nnx.Rngs(0)
    ... )
    >>> export_predictor(clicks_model, "clicks.predictor", names=clicks)
    >>> predictor = load_predictor("clicks.predictor")
    >>> predictor.predict(clicks).shape
    (3,)
    >>> predictor.predict_records({"user": ["bob", None]}).shape
    (2,)

    Methods, arguments and attributes that the kind of the model does not use raise an
    error: ValueError for a method or an argument, AttributeError for an attribute.

    A program is compiled when it is first needed, which takes a second or more. Call
    `warm_up` before the first request.

    Pickled, it is the path of its file: the other process loads the file itself. It does not
    work in a process that was forked from the one that has loaded it.

    Attributes:
      signature: its `kind` ("items", "histories", "clicks" or "stages"), and the names, dtypes
        and shapes of the inputs and outputs of its programs.
      k: the most items that can be recommended to a row (items and histories).
      num_features: number of input features (items and histories); with several inputs
        a dict, as the model has it.
      num_items: number of items that are scored (items and histories).
      items: names of the items, or None (items and histories).
      events: the columns of events and their categories, to read other data with:
        `read_sequences(path, features=predictor.items, events=predictor.events)` (histories; None
        if the model reads none).
      users: the columns of users and their categories, as `read_user_features` takes them; None if
        the model reads none (histories).
      num_dense: number of dense columns (clicks).
      schema: types of the columns of records; None if the file has none (clicks).
      vocabularies: for each `VocabularyColumn` its categories (clicks).
      requests: the columns of requests (two stages).
      model: implementation of the methods for this kind.
      names_in_file: names of items and of tags, or the categories of each vocabulary.
      content: parts that make the vectors of new items; None if the file does not have
        them.
      again: function that loads the same file again, see `archive.again`; or None.
      taken: changes that it has taken from a folder.
      answer: example with its answer in the file, without changes; or None.
    """

    signature: Signature
    model: Any
    names_in_file: Mapping[str, Names] = dataclasses.field(default_factory=dict)
    content: Content | None = None
    again: Callable[[], Predictor] | None = None
    taken: Taken = dataclasses.field(default_factory=Taken)
    answer: StoredAnswer | None = None

    def __repr__(self) -> str:
        rows = sorted(self.signature.rows)
        return f"Predictor({self.signature.kind}, {self.model}, rows={rows})"

    def __reduce__(self):
        return archive.pickled(self.again)

    def __getattr__(self, name: str) -> Any:
        if name not in _FACTS:
            text = f"'Predictor' object has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=self)
        if name not in vars(self.model):
            raise AttributeError(self._lacks(name), name=name, obj=self)
        return vars(self.model)[name]

    @property
    def weights(self) -> list[jax.Array]:
        """The first argument of the programs, on the device."""
        return self.model.programs.weights

    def recommend(
        self,
        inputs: Sources | SequenceDataset,
        *,
        k: int | None = None,
        exclude: Unordered = None,
        exclude_items: Iterable[str] | np.ndarray = (),
        only_items: Iterable[str] | np.ndarray | None = None,
    ) -> Recommendations:
        """The `k` best of all items for each row, as `sparsejax.recommend` finds them.

        The last bits of the scores may differ from the result of `sparsejax.recommend`.
        They also depend on the number of rows in a call, because each program adds in
        its own order.

        Args:
          inputs: `[rows, num_features]`; or several by name; or histories, for a predictor
            of a model of histories.
          k: items per row. The default, and the most, is the `k` that the predictor was
            exported with.
          exclude: `[rows, num_items]`, items not to recommend to each row, or the name
            of an input; see `recommend`.
          exclude_items: names or ids of items that nobody is recommended.
          only_items: recommend only these.

        Raises:
          FloatingPointError: a score is NaN; the message names the row.
          RuntimeError: this process was forked from one that has loaded a predictor.
          TypeError: `inputs` or `exclude` has a type that is not supported.
          ValueError: `inputs` or `exclude` does not fit the model, or they do not fit
            each other; `k` is too large; the predictor is of clicks.
        """
        which = {"exclude_items": exclude_items, "only_items": only_items}
        return self._method("recommend")(inputs, k=k, exclude=exclude, **which)

    @overload
    def recommend_names(
        self,
        histories: Sequence[str] | Sequence[Mapping[str, Any]],
        *,
        times: Sequence[float] | None = None,
        context: Any = None,
        users: Any = None,
        k: int | None = None,
        exclude_seen: bool = True,
        unknown: Literal["skip", "error"] = "skip",
        exclude_items: Iterable[str] | np.ndarray = (),
        only_items: Iterable[str] | np.ndarray | None = None,
    ) -> list[str]: ...

    @overload
    def recommend_names(
        self,
        histories: Sequence[Sequence[str] | Sequence[Mapping[str, Any]]],
        *,
        times: Sequence[Sequence[float]] | None = None,
        context: Any = None,
        users: Any = None,
        k: int | None = None,
        exclude_seen: bool = True,
        unknown: Literal["skip", "error"] = "skip",
        exclude_items: Iterable[str] | np.ndarray = (),
        only_items: Iterable[str] | np.ndarray | None = None,
    ) -> list[list[str]]: ...

    def recommend_names(
        self,
        histories: Any,
        *,
        times: Sequence[float] | Sequence[Sequence[float]] | None = None,
        context: Any = None,
        users: Any = None,
        k: int | None = None,
        exclude_seen: bool = True,
        unknown: Literal["skip", "error"] = "skip",
        exclude_items: Iterable[str] | np.ndarray = (),
        only_items: Iterable[str] | np.ndarray | None = None,
    ) -> list[str] | list[list[str]]:
        """The names of the `k` best items for a history of names, or for several.

        >>> export_predictor(model, "model.predictor", k=2, names=train)
        >>> predictor = load_predictor("model.predictor")
        >>> predictor.recommend_names(["/products", "/support"], k=1)
        ['/...']
        >>> predictor.recommend_names([["/products"], []])
        [['/...', '/...'], ['/...', '/...']]

        A history is a set: a name that occurs twice counts once, and every entry has the
        value 1. For a model of histories it is a list, the oldest item first, and items may
        come again with `exclude_seen=False`. Names that the predictor does not know are
        skipped. A history without any known name is treated as empty, like a new user.

        If the model reads columns of events, a history is a list of events, each an object with
        its item, its columns and, if the predictor reads times, its time::

            [{"item": "tea", "time": 3, "action": "view", "price": 2.5}, {"item": "rye", ...}]

        A column that an event lacks is missing, and other keys are not read.

        Args:
          histories: names of items, `["a", "b"]`, or events; or a list of such lists. An empty
            list is one history.
          times: time of each name, for a predictor that reads times: numbers in the
            unit of the training data, for dates seconds. Times do not fall within a
            history, and only their differences count. Events have theirs themselves.
          context: columns that are known of the event to come, if the model reads any: a dict of
            values, one for all histories or a list of one for each; or a list of dicts.
          users: columns of the users, if the model reads any, in the same forms. Columns that are
            left out are missing.
          k: number of items for each history; by default as many as the predictor was
            exported with.
          exclude_seen: whether items of the history are not recommended.
          unknown: "skip" skips unknown names; "error" raises.
          exclude_items: names or ids of items that are recommended to nobody.
          only_items: names or ids of the only items that may be recommended; None for all.

        Returns:
          For each history the names of `k` items, best first; fewer if items run out.

        Raises:
          FloatingPointError: a score is NaN; the message names the row.
          RuntimeError: this process was forked from one that has loaded a predictor.
          TypeError: a name is not a string, or a history is a string.
          ValueError: a name is unknown, and `unknown` is "error". The predictor was
            exported without names, its inputs are not its items, or it is of clicks. `k`
            is too large. There are times and it reads none, or the other way round; or
            they do not fit the names, fall, or are not finite.
        """
        options = {"k": k, "exclude_seen": exclude_seen, "times": times}
        options |= {"exclude_items": exclude_items, "only_items": only_items}
        method = self._method("recommend_names")
        for name, what, given in (
            ("context", "events", context),
            ("users", "users", users),
        ):
            if given is None:
                continue
            if getattr(self.model, what, None) is None:
                raise ValueError(
                    f"the predictor reads no columns of {what}: leave out {name}"
                )
            options[name] = given
        return method(histories, unknown=unknown, **options)

    def recommend_records(
        self,
        records: Any,
        *,
        k: int | None = None,
        exclude_seen: bool = True,
        exclude_items: Iterable[str] | np.ndarray = (),
        only_items: Iterable[str] | np.ndarray | None = None,
    ) -> Recommendations:
        """The `k` best items for each record, by a predictor of two stages.

        ::

            predictor = sj.load_predictor("shop.predictor")  # TwoStage.export wrote it
            record = {"items": ["tea", "milk"], "user": "ann", "device": "phone"}
            predictor.names(predictor.recommend_records([record], k=5))

        Args:
          records: a table, or a dict of lists or arrays, by the names of columns; or a list of
            dicts, one a row. The column `items` has the names of the items of each row, as
            `recommend_names` takes them, and for a predictor that reads times `times` has their
            times. The others are the columns in `predictor.requests.columns`.
          k: items per row. The default, and the most, is the `k` that the predictor was
            exported with.
          exclude_seen: whether items of the row are not recommended.
          exclude_items: names or ids of items that nobody is recommended.
          only_items: recommend only these.

        Raises:
          DataError: a column has a value that it may not have.
          FloatingPointError: a score is NaN; the message names the row.
          TypeError: the records are no columns.
          ValueError: a column is missing, a list is too long, `k` is too large, or the predictor
            is of one stage.
        """
        options = {"k": k, "exclude_seen": exclude_seen}
        options |= {"exclude_items": exclude_items, "only_items": only_items}
        return self._method("recommend_records")(records, **options)

    def names(self, found: Recommendations) -> list[list[str]]:
        """The names of the recommended items of each row.

        Raises:
          ValueError: the predictor was exported without names, or is of clicks.
        """
        return self._method("names")(found)

    def predict(
        self,
        clicks: ClickDataset | np.ndarray,
        ids: Mapping[str, np.ndarray | CSR | WideIds] | None = None,
    ) -> Any:
        """The probability of a click of each example, as `sparsejax.predict`; of several labels
        a dict with the predictions of each.

        On a CPU the bits are those of `predict`, if both score as many examples at a
        time. Else the last bits may differ.

        Args:
          clicks: a data set; or dense columns `[n, num_dense]`, with `ids`. A data
            set's ids come from its own vocabulary: read it with the vocabulary of the
            training data.
          ids: for each feature int32 `[n]` or `[n, m]`, where -1 is no id, or a `CSR` without
            values, or `WideIds.ragged` of lists in any order. Of a dynamic table int64,
            uint64 or `WideIds`, without weights.

        Raises:
          FloatingPointError: a probability is NaN; the message names the example.
          RuntimeError: this process was forked from one that has loaded a predictor.
          TypeError: ids are not int32.
          ValueError: features are missing or unknown, shapes do not fit, an id is outside
            its table, or the predictor is not of clicks.
        """
        return self._method("predict")(clicks, ids)

    def predict_records(self, records: Any) -> Any:
        """The probability of a click of each record, from its columns; see `predict`.

        Columns are read as `read_clicks` reads a file, with the vocabularies of the
        training data. A category that was rare there, or did not occur, has the id of
        rare ones.

        Args:
          records: a table, or a dict of lists or arrays, by the names of columns; or a list of
            dicts, one an example. None and NaN are missing. Labels are not needed; other columns
            are not read.

        Raises:
          FloatingPointError: a probability is NaN; the message names the example.
          TypeError: the records are no columns.
          ValueError: a column is missing or has a value that it may not have, or the
            predictor has no schema or is not of clicks.
        """
        return self._method("predict_records")(records)

    def add_items(self, features: ItemFeatures) -> Predictor:
        """The predictor with new items, of which nothing but their content is known.

        ::

            export_predictor(model, path, names=train, item_features=features)
            load_predictor(path).add_items(read_item_features("new.csv")).save(path)

        No training is needed: the vector of a new item is that which the model gives an item
        without entries. So the new items are recommended like the others, which keep their
        scores. In histories they are skipped, but not recommended again if the items of
        a row are excluded. The vectors of the known items are then in memory twice.
        Programs are compiled anew.

        This predictor stays as it is. `save` writes the result.

        Args:
          features: content of items, as `read_item_features` reads it. Known items and
            unknown tags are left out. New items without known content are left out with
            a warning.

        Raises:
          RuntimeError: this process was forked from one that has loaded a predictor.
          TypeError: `features` are something else.
          ValueError: the predictor was exported without `item_features`, or it is of clicks. No
            item is new, or nothing is known of any. The content is another one than the
            model knows.
        """
        archive.check_process()
        if self.content is None:
            raise ValueError(
                "this predictor does not know what items are; export it with "
                "item_features=..., from a model that was built with them"
            )
        known = self.model.items
        some = chosen(self.content, features, known)
        signature, weights, names = extended(
            self.signature, self.weights, self.content, some, known
        )
        stored = {**self.names_in_file, "items": names}
        model = self.model.extended(signature, stored, weights)
        return dataclasses.replace(
            self,
            signature=signature,
            model=model,
            names_in_file=stored,
            again=None,
            answer=None,  # there may be better items now
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the predictor, whole or not at all; `load_predictor` reads it.

        It is of use after `add_items`: services and other processes read files. The file has
        the answer that this predictor gives for an example, which a service compares with its
        own.

        Raises:
          FloatingPointError: a score is NaN or infinite.
          OSError: the file cannot be written.
        """
        kernels = () if self.content is None else self.content.kernels
        own = self.weights[: len(self.signature.weights)]
        saving.save_predictor(
            path,
            self.signature,
            {name: some.tolist() for name, some in self.names_in_file.items()},
            programs=sorted(self.model.programs.code.items()),
            weights=[saving.in_one_piece(each) for each in (*own, *kernels)],
            answer=StoredAnswer.of(self.model),
        )

    def apply_changes(self, folder: str | os.PathLike[str]) -> Changes:
        """Takes the changes of a folder that `sparsejax.export_changes` writes for its model.

        ::

            predictor = sj.load_predictor("clicks.predictor")
            while True:
                predictor.apply_changes("changes")  # what has come since the last call
                time.sleep(5)

        The predictor then answers as the model did at the last export. Other threads may
        predict meanwhile: a call answers with the weights before or after, never with some of
        both. An error leaves the predictor as it was. There must be room for a second copy of
        the weights. A pickled predictor is its file, without changes.

        Args:
          folder: folder of the changes, always the same one.

        Returns:
          The last changes that were taken.

        Raises:
          OSError: a file cannot be read.
          ValueError: the predictor is not of clicks, was exported with `table_dtype`,
            or for another model; or `sparsejax.apply_changes` refuses the changes.
        """
        archive.check_process()
        with self.taken.lock:
            links = change_folders.chain(folder, self.taken.last)
            if links:
                weights = self.weights
                # In one step: a program that starts meanwhile reads the list before or after.
                weights[:] = changed_weights(self.signature, weights, links)
                self.taken.last = links[-1].changes
            assert self.taken.last is not None  # else there would be a base
            return self.taken.last

    def warm_up(self, *, max_items: int | None = None, rows: int = 1) -> None:
        """Compiles and runs all programs that small requests need, before the first one.

        Lists of clicks that are longer than one id on average may need further programs.

        Args:
          max_items: most entries of a row, or of the items excluded for it; 256 by
            default. Not for clicks.
          rows: most rows of a request.

        Raises:
          ValueError: an argument is not positive, or of no use.
        """
        self._method("warm_up")(rows=rows, max_items=max_items)

    def _method(self, name: str) -> Callable[..., Any]:
        """The kind's function for a method."""
        archive.check_process()
        found = getattr(self.model, name, None)
        if found is None:
            raise ValueError(self._lacks(name))
        return found

    def _lacks(self, name: str) -> str:
        kind = self.signature.kind
        return f"a predictor of {kind} has no {name}; it has {self.model.has}"
