"""The common part of the commands for items and for histories, the acts of users."""

from __future__ import annotations

import abc
import os
import sys
from typing import Any

from sparsejax.cli import flags
from sparsejax.cli.kind import Commands
from sparsejax.cli.reading import content_of
from sparsejax.cli.values import names_of
from sparsejax.data import ItemFeatures, read_item_features
from sparsejax.engine.rank import recommendation_files
from sparsejax.kinds.content import sizes_among
from sparsejax.mesh import processes
from sparsejax.runs import uses
from sparsejax.runs.folders import Folder


class Interactions(Commands):
    """Commands of models that rank items."""

    @abc.abstractmethod
    def plan_config(self, config: Any, command: flags.Plan) -> Any:
        """The configuration as `train` would suit it to data of these sizes."""

    def planned(
        self, config: Any, command: flags.Plan, **how: Any
    ) -> tuple[str, bool | None]:
        from sparsejax.verbs.plan import plan

        for name in ("items", "rows", "entries"):
            if getattr(command, name) is None:
                raise ValueError(f"name the sizes of the data: --{name} is missing")
        assert command.items is not None and command.rows is not None
        assert command.entries is not None
        content = None
        if (features := content_of(command)) is not None:
            if not isinstance(features, ItemFeatures):
                features = read_item_features(features)
            content = sizes_among(features, command.items)
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
            content=content,
            compile=command.compile,
            **how,
        )
        return planned.table(), planned.fits

    def predict(self, command: flags.Predict, run: Folder) -> None:
        users, hint = command.users, ""
        if isinstance(users, str):
            if not os.path.isfile(users):
                hint = f"; there is no file called {users} either"
            users = names_of(users)
        out = command.out
        rows, found = uses.recommended(
            command.replaced(users=users),
            command,
            run,
            lambda rows: recommendation_files.check_recommendation_names(
                out, rows, run.known
            ),
            hint,
        )
        which = "without" if command.exclude_seen else "also"
        print(f"{command.k} items a row, {which} those that it has", file=sys.stderr)
        processes.in_first(
            lambda: recommendation_files.save_recommendations(
                out, rows, found, run.known
            )
        )
