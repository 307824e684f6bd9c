"""A model as compiled programs, which predict without Flax and the model's code."""

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

# Attributes that a predictor has only for some kinds of models.
_FACTS = {
    *("k", "num_features", "num_items", "items", "events", "users"),
    *("num_dense", "schema", "vocabularies", "requests"),
}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Predictor:
    """A model loaded by `sparsejax.load_predictor`.

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

    Methods, arguments and attributes that do not apply to the kind of the model raise an error:
    ValueError for a method or an argument, AttributeError for an attribute.

    A program is compiled when it is first needed, which takes a second or more. Call `warm_up`
    before the first request to avoid this delay.

    A pickled predictor only contains the path of its file, which the other process loads itself. A
    predictor cannot be used in a process that was forked after it was loaded.

    Attributes:
      signature: description of the programs: its `kind` ("items", "histories", "clicks" or
          "stages"), and the names, dtypes and shapes of inputs and outputs.
      k: largest number of items that can be recommended to a row (items and histories).
      num_features: number of input features (items and histories); with several inputs
        a dict, as the model has it.
      num_items: number of items that are scored (items and histories).
      items: names of the items, or None (items and histories).
      events: event columns and their categories, to read other data by: `read_sequences(path,
          features=predictor.items, events=predictor.events)` (histories; None if the model reads
          none).
      users: user columns and their categories, as `read_user_features` takes them; None if the
          model reads none (histories).
      num_dense: number of dense columns (clicks).
      schema: types of the columns of records; None if the file has none (clicks).
      vocabularies: categories of each `VocabularyColumn` (clicks).
      requests: columns of a request (two stages).
      model: implementation of the methods for this kind.
      names_in_file: names of items and of tags, or the categories of each vocabulary.
      content: parts to compute vectors of new items; None if the file has none.
      again: function that loads the same file again, see `archive.again`, or None.
      taken: state of `apply_changes`.
      answer: example with its answer, from the file; None if there is none, or after changes.
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
        """The weights on the device, which are the first argument of the programs."""
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
        """Recommends the `k` best of all items to each row, as `sparsejax.recommend` does.

        Scores may differ from those of `sparsejax.recommend` in their last bits. These bits also
        depend on the number of rows in a call: each program sums in its own order.

        Args:
          inputs: `[rows, num_features]` data; several inputs by name; or histories, for a
              predictor from a history model.
          k: number of items for each row. The default and the maximum is the `k` of the export.
          exclude: `[rows, num_items]` items to exclude for each row, or the name of an input; see
              `recommend`.
          exclude_items: names or ids of items to exclude for all rows.
          only_items: names or ids of the only items that may be recommended; None allows all.

        Raises:
          FloatingPointError: a score is NaN; the message names the row.
          RuntimeError: this process was forked from one that has loaded a predictor.
          TypeError: `inputs` or `exclude` has an unsupported type.
          ValueError: `inputs` or `exclude` do not match the model or each other; `k` is too large;
              the predictor is of clicks.
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
        """Recommends the `k` best items for a history of item names, or for several histories.

        >>> export_predictor(model, "model.predictor", k=2, names=train)
        >>> predictor = load_predictor("model.predictor")
        >>> predictor.recommend_names(["/products", "/support"], k=1)
        ['/...']
        >>> predictor.recommend_names([["/products"], []])
        [['/...', '/...'], ['/...', '/...']]

        A history is a set: a name that occurs twice counts once, and every entry has the value 1.
        For a history model it is a list, the oldest item first; with `exclude_seen=False` its
        items can be recommended again. Unknown names are skipped. A history without known names is
        treated as empty, like that of a new user.

        If the model reads columns of events, a history is a list of events, each an object with
        its item, its columns and, if the predictor reads times, its time::

            [{"item": "tea", "time": 3, "action": "view", "price": 2.5}, {"item": "rye", ...}]

        A column that an event lacks counts as missing, and other keys are ignored.

        Args:
          histories: a list of item names, `["a", "b"]`, or of events; or a list of such lists. An
              empty list is a single history.
          times: time of each name, for a predictor that reads times: numbers in the unit of the
              training data, seconds for dates. Times must not decrease in a history, and only
              their differences matter. Events contain their own times.
          context: columns known for the next event, if the model reads any: a dict of values, each
              a single value for all histories or a list with one for each; or a list of dicts.
          users: user columns, if the model reads any, in the same forms as `context`. Columns that
              are not given count as missing.
          k: number of items for each history; by default the `k` of the export.
          exclude_seen: whether items of a history are excluded from its recommendations.
          unknown: "skip" ignores unknown names; "error" raises an error.
          exclude_items: names or ids of items to exclude for all rows.
          only_items: names or ids of the only items that may be recommended; None for all.

        Returns:
          The names of `k` items for each history, best first; fewer if there are too few
          candidates.

        Raises:
          FloatingPointError: a score is NaN; the message names the row.
          RuntimeError: this process was forked from one that has loaded a predictor.
          TypeError: a name is not a string, or a history is a string.
          ValueError: a name is unknown, and `unknown` is "error". The predictor was exported
              without names, its inputs are not its items, or it is of clicks. `k` is too large.
              Times are given but not read, or read but not given; or they do not match the names,
              decrease, or are not finite.
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
        """Recommends the `k` best items for each record, by a two-stage predictor.

        ::

            predictor = sj.load_predictor("shop.predictor")  # TwoStage.export wrote it
            record = {"items": ["tea", "milk"], "user": "ann", "device": "phone"}
            predictor.names(predictor.recommend_records([record], k=5))

        Args:
          records: a table, a dict of lists or arrays by column name, or a list of one dict per
              row. The column `items` has the names of the items of each row, as `recommend_names`
              takes them. For a predictor that reads times, `times` has their times. Columns of
              events are lists, too, `events/NAME`; `context/NAME` and `users/NAME` have a cell for
              each row. The other columns are `predictor.requests.columns`.
          k: number of items for each row. The default and the maximum is the `k` of the export.
          exclude_seen: whether items of a row are excluded from its recommendations.
          exclude_items: names or ids of items to exclude for all rows.
          only_items: names or ids of the only items that may be recommended; None allows all.

        Raises:
          DataError: a column has an invalid value.
          FloatingPointError: a score is NaN; the message names the row.
          TypeError: the records have none of these forms.
          ValueError: a column is missing, a list is too long, `k` is too large, or the predictor
              has a single stage.
        """
        options = {"k": k, "exclude_seen": exclude_seen}
        options |= {"exclude_items": exclude_items, "only_items": only_items}
        return self._method("recommend_records")(records, **options)

    def names(self, found: Recommendations) -> list[list[str]]:
        """The names of the recommended items of each row.

        Raises:
          ValueError: the predictor was exported without names, or its model predicts clicks.
        """
        return self._method("names")(found)

    def predict(
        self,
        clicks: ClickDataset | np.ndarray,
        ids: Mapping[str, np.ndarray | CSR | WideIds] | None = None,
    ) -> Any:
        """Predicts the probability of a click for each example, as `sparsejax.predict`.

        With several labels, returns a dict with the predictions of each label.

        On a CPU the results are bitwise equal to those of `predict`, if both score equally many
        examples at a time. Otherwise the last bits may differ.

        Args:
          clicks: a data set; or dense columns `[n, num_dense]`, together with `ids`. The ids of a
              data set refer to its vocabulary: read it with the vocabulary of the training data.
          ids: ids of each feature: int32 `[n]` or `[n, m]`, where -1 is no id; a `CSR` without
              values; or `WideIds.ragged` of lists in any order. For a dynamic table: int64, uint64
              or `WideIds`, without weights.

        Raises:
          FloatingPointError: a probability is NaN; the message names the example.
          RuntimeError: this process was forked from one that has loaded a predictor.
          TypeError: ids are not int32.
          ValueError: features are missing or unknown, shapes do not match, an id is outside its
              table, or the predictor is not of clicks.
        """
        return self._method("predict")(clicks, ids)

    def predict_records(self, records: Any) -> Any:
        """Predicts the probability of a click for each record, from its columns; see `predict`.

        Columns are read as `read_clicks` reads a file, with the vocabularies of the training data.
        A category that was rare or absent there gets the id of rare categories.

        Args:
          records: a table, a dict of lists or arrays by column name, or a list of one dict per
              example. None and NaN are missing values. Labels are not needed; other columns are
              ignored.

        Raises:
          FloatingPointError: a probability is NaN; the message names the example.
          TypeError: the records have none of these forms.
          ValueError: a column is missing or has an invalid value, or the predictor has no schema
              or is not of clicks.
        """
        return self._method("predict_records")(records)

    def add_items(self, features: ItemFeatures) -> Predictor:
        """Makes a predictor with additional items, of which only the content is known.

        ::

            export_predictor(model, path, names=train, item_features=features)
            load_predictor(path).add_items(read_item_features("new.csv")).save(path)

        No training is needed: a new item gets the vector that the model gives an item without
        entries. New items are recommended like the others, whose scores do not change. In
        histories new items are skipped, but they are not recommended again if the items of a row
        are excluded. The vectors of the known items are then in memory twice. Programs are
        compiled again.

        This predictor is not changed. `save` writes the result.

        Args:
          features: content of items, as `read_item_features` reads it. Known items and unknown
              tags are ignored. New items without known content are skipped with a warning.

        Raises:
          RuntimeError: this process was forked from one that has loaded a predictor.
          TypeError: `features` is not an `ItemFeatures`.
          ValueError: the predictor was exported without `item_features`, or is of clicks. No item
              is new, or no new item has known content. The content has other columns than the
              model's.
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
            answer=None,  # new items may change the answer
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the predictor to a file for `load_predictor`; a partial file is never visible.

        Use it after `add_items`, as services and other processes read files. The file contains
        this predictor's answer to an example, which a service compares with its own.

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
        """Applies new changes in a folder, written by `sparsejax.export_changes` for the same
        model.

        ::

            predictor = sj.load_predictor("clicks.predictor")
            while True:
                predictor.apply_changes("changes")  # what has come since the last call
                time.sleep(5)

        Afterwards the predictor answers as the model did at the last export. Other threads may
        predict meanwhile: each call uses either the weights before or after the changes. After an
        error the predictor is unchanged. Memory must have room for a second copy of the weights. A
        pickled predictor refers to its file, without changes.

        Args:
          folder: folder of the changes, which must be the same in each call.

        Returns:
          The last changes that were applied.

        Raises:
          OSError: a file cannot be read.
          ValueError: the predictor is not of clicks, was exported with `table_dtype`, or is of
              another model; or `sparsejax.apply_changes` rejects the changes.
        """
        archive.check_process()
        with self.taken.lock:
            links = change_folders.chain(folder, self.taken.last)
            if links:
                weights = self.weights
                # The list is assigned in one operation: a program that starts meanwhile reads
                # either all old or all new weights.
                weights[:] = changed_weights(self.signature, weights, links)
                self.taken.last = links[-1].changes
            # `last` is set now: the first change in a folder is a complete base.
            assert self.taken.last is not None
            return self.taken.last

    def warm_up(self, *, max_items: int | None = None, rows: int = 1) -> None:
        """Compiles and runs all programs that small requests need.

        Click requests whose lists have more than one id on average may need further programs.

        Args:
          max_items: largest number of entries in a row, or of items excluded for it; 256 by
              default. It does not apply to clicks.
          rows: largest number of rows in a request.

        Raises:
          ValueError: an argument is not positive, or does not apply to the kind of predictor.
        """
        self._method("warm_up")(rows=rows, max_items=max_items)

    def _method(self, name: str) -> Callable[..., Any]:
        """The implementation of a method for the predictor's kind of model."""
        archive.check_process()
        found = getattr(self.model, name, None)
        if found is None:
            raise ValueError(self._lacks(name))
        return found

    def _lacks(self, name: str) -> str:
        kind = self.signature.kind
        return f"a predictor of {kind} has no {name}; it has {self.model.has}"
