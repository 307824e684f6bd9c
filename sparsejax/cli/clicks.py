"""The commands for click models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from sparsejax import codec
from sparsejax.cli import flags
from sparsejax.cli.kind import Commands, Range
from sparsejax.data.scans.scan_clicks import ScannedClicks, scan_clicks
from sparsejax.data.sets import writers
from sparsejax.data.sets.click_schema import (
    ClickSchema,
    DenseColumn,
    KeyColumn,
    VocabularyColumn,
)
from sparsejax.embeddings.collection import collections_of
from sparsejax.embeddings.planner import plan_embeddings
from sparsejax.mesh import processes
from sparsejax.options.measuring import Evaluate
from sparsejax.runs.folders import Folder


class Clicks(Commands):
    """The commands of a `ClickModelConfig`."""

    name = "clicks"
    tuned: ClassVar[Mapping[str, Range | tuple[int, ...]]] = {"dim": (4, 8, 16, 32, 64)}

    def schema(self, command: flags.Train | flags.Plan) -> ClickSchema | None:
        if getattr(command, "origin", None) is None:
            return schema_of(command)
        assert isinstance(command, flags.Train)
        names = flags.Clicks.option_names()
        if command.given & {*names, "delimiter"}:
            raise ValueError(
                "--from takes the columns of its run: leave out --schema, --label, --dense, "
                "--categories, --dynamic and --delimiter, or --from"
            )
        return None

    def planned(
        self, config: Any, command: flags.Plan, **how: Any
    ) -> tuple[str, bool | None]:
        known = _known_to_plan(command)
        rule = how["rule"]
        make = self.kind.maker(config, known)
        model, _ = nnx.eval_shape(lambda: make(rule=rule, seed=0))
        tables, features = {}, {}
        for node in collections_of(model).values():
            last = "" if not tables else ", linear"
            for stack in node.stacks:
                for feature in stack.features:
                    table = f"{feature.table.name}{last}"
                    tables[table] = feature.table.config
                    features[f"{feature.name}{last}"] = table
        planned = plan_embeddings(tables, features, **how)
        fits = None if planned.memory is None else True  # else it raises
        return str(planned), fits

    def start(self, command: flags.Tune) -> dict[str, Any]:
        return {
            "dim": self.kind.read_config({"version": 1, "model": command.model}).dim
        }

    def measuring(self, command: Evaluate) -> Evaluate:
        if command.heldout is not None:
            same = command.inputs == command.heldout
            raise ValueError(
                "a model of clicks is measured on the examples of one file: leave out "
                f"{'TEST' if same else command.inputs}"
            )
        given = command.given - {"inputs"}
        command = command.replaced(inputs=None, heldout=command.inputs)
        return command.noting(given=given)

    def predict(self, command: flags.Predict, run: Folder) -> None:
        found = self.kind.probabilities(command.inputs, command, run)
        processes.in_first(
            lambda: writers.save_numbers(command.out, "probability", found)
        )


def schema_of(command: flags.Train | flags.Plan | flags.Split) -> ClickSchema | None:
    """The schema that the flags name; None for a saved data set, which knows it."""
    delimiter = getattr(command, "delimiter", None)
    others = command.label is not None or command.dense or command.categories
    if command.schema is not None:
        if others or delimiter is not None:
            raise ValueError(
                "--schema says what all columns are, and what separates them: leave out "
                "--label, --dense, --categories and --delimiter, or --schema"
            )
        document = codec.load(command.schema)
        try:
            return ClickSchema.from_json(document)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{command.schema}: {error}") from error
    if not others and delimiter is None:
        return None
    if command.label is None:
        raise ValueError("name the column of labels, --label, or a --schema")
    return ClickSchema(
        command.label,
        dense={name: DenseColumn() for name in command.dense},
        ids=dict.fromkeys(
            command.categories,
            VocabularyColumn() if command.dynamic is None else KeyColumn(),
        ),
        delimiter=delimiter,
    )


def _known_to_plan(command: flags.Plan) -> Any:
    """Data whose schema and numbers of ids are those that the flags name."""
    schema = schema_of(command)
    if command.examples is not None:
        return scan_clicks(command.examples, schema)
    if schema is None:
        raise ValueError(
            "name the columns: --schema FILE, or --examples, a saved data set"
        )
    learned = [n for n, c in schema.ids.items() if isinstance(c, VocabularyColumn)]
    if learned:
        raise ValueError(
            f"the categories of {', '.join(learned[:3])} are to be counted: name a file of "
            "--examples, or give the columns hashed ids"
        )
    return ScannedClicks("", schema, {}, 1)


COMMANDS: Commands = Clicks()
