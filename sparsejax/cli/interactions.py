"""The common part of the commands for items and for histories, the acts of users."""

from __future__ import annotations

import abc
import pathlib
from typing import Any

import numpy as np

from sparsejax.cli import flags
from sparsejax.cli.flags import Reading
from sparsejax.cli.kind import Commands, Opened
from sparsejax.cli.reading import check_heldout, meanwhile, some_rows
from sparsejax.data import SparseDataset
from sparsejax.data.names import Names
from sparsejax.data.vocabulary import popularity_ranks
from sparsejax.engine.rank import recommendation_files
from sparsejax.engine.train.checkpoint import fingerprint
from sparsejax.mesh import processes
from sparsejax.sparse import CSR
from sparsejax.verbs.evaluate import evaluate
from sparsejax.verbs.recommend import recommend


class Interactions(Commands):
    """Commands of models that rank items."""

    @abc.abstractmethod
    def plan_config(self, config: Any, command: flags.Plan) -> Any:
        """The configuration as `train` would suit it to data of these sizes."""

    @abc.abstractmethod
    def read_shown(self, path: str, command: Reading, run: Opened) -> Any:
        """Reads what a model is shown."""

    @abc.abstractmethod
    def read_heldout(self, path: str, command: Reading, data: Any) -> Any:
        """Reads what was held out of `data`, with its features."""

    def heldout(self, path: str, command: Reading, data: Any, data_path: str) -> Any:
        """`read_heldout`, checked to be of rows of `data`, which `data_path` holds."""
        found = self.read_heldout(path, command, data)
        return check_heldout(path, found, data, data_path)

    @abc.abstractmethod
    def excluded(self, command: flags.Predict, run: Opened, data: Any) -> Any:
        """The items that are not to be recommended."""

    @abc.abstractmethod
    def counts(self, data: Any) -> np.ndarray:
        """`[items]` how often each occurs."""

    def like(self, known: Names) -> SparseDataset:
        none, start = np.zeros(0, np.int32), np.zeros(1, np.int32)
        matrix = CSR(None, none, start, num_cols=len(known))
        return SparseDataset(matrix, known[:0], known)

    def save_known(self, path: pathlib.Path, known: Names) -> None:
        self.like(known).save(path)

    def load_known(self, path: pathlib.Path) -> Names:
        return SparseDataset.load(path).feature_names

    def num_known(self, known: Names) -> int:
        return len(known)

    def fingerprint_of(self, known: Names) -> str:
        return fingerprint(known)

    def account(self, data: Any) -> str:
        return (
            f"{data.num_rows:,} rows, {data.num_features:,} features, "
            f"{data.num_entries:,} entries"
        )

    def planned(
        self, config: Any, command: flags.Plan, **how: Any
    ) -> tuple[str, bool | None]:
        from sparsejax.verbs.plan import plan

        for name in ("items", "rows", "entries"):
            if getattr(command, name) is None:
                raise ValueError(f"name the sizes of the data: --{name} is missing")
        assert command.items is not None and command.rows is not None
        assert command.entries is not None
        planned = plan(
            self.plan_config(config, command),
            inputs=command.items if command.features is None else command.features,
            outputs=None if command.features is None else command.items,
            rows=command.rows,
            entries=command.entries,
            target_entries=command.target_entries,
            values=command.values,
            times=command.times,
            fused=command.fused,
            compile=command.compile,
            **how,
        )
        return planned.table(), planned.fits

    def predict(self, command: flags.Predict, run: Opened) -> None:
        reading = meanwhile(lambda: self.read_shown(command.data, command, run))
        model = run.model()
        data, names = reading(), run.known
        if command.users is not None:
            data = some_rows(data, command.users)
        out = command.out
        recommendation_files.check_recommendation_names(out, data.row_names, names)
        exclude = self.excluded(command, run, data)
        found = recommend(model, data, command.k, exclude=exclude)
        processes.in_first(
            lambda: recommendation_files.save_recommendations(
                out, data.row_names, found, names
            )
        )

    def report(self, command: flags.Report, run: Opened) -> dict[str, Any]:
        from sparsejax.cli import report as reports

        if command.test is not None and command.train is None:
            raise ValueError(
                "--test needs --train, the file of the interactions that the model is "
                "shown"
            )
        model, names = run.model(), run.known
        # Without data: by the order of the vocabulary, which popularity decided.
        counts, measured, examples = -popularity_ranks(len(names)), None, []
        if command.train is not None:
            heldout, keep_seen = None, command.counting.keep_seen
            shown = self.read_shown(command.train, command, run)
            counts = self.counts(shown)
            if command.test is not None:
                heldout = self.heldout(command.test, command, shown, command.train)
                measured = evaluate(
                    model,
                    shown,
                    heldout,
                    **counted(command),
                )
            examples = reports.examples_of(model, shown, heldout, keep_seen=keep_seen)
        return {
            "model": model,
            "measured": measured,
            "examples": examples,
            "similar": reports.similar_to_popular(model, names, counts),
        }


def counted(command: flags.Evaluate | flags.Report) -> dict[str, Any]:
    """Arguments of `evaluate` that say how interactions count."""
    counting = command.counting
    return {
        "k": command.k,
        "exclude": None if counting.keep_seen else "inputs",
        "unknown": counting.unknown,
        "unknown_users": counting.unknown_users,
    }


def check_scanned(command: flags.Train) -> None:
    """Raises ValueError for what needs all of the data."""
    if command.validation is not None:
        raise ValueError("--validation needs all of the data; leave out --chunk-rows")
    if command.origin is not None:
        raise ValueError("--from needs all of the data; leave out --chunk-rows")
