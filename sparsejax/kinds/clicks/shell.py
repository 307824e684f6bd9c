"""Converts command-line flags of click models to schemas, and to tables for `plan`."""

from __future__ import annotations

from flax import nnx

from sparsejax import codec
from sparsejax.data.scans.scan_clicks import ScannedClicks, scan_clicks
from sparsejax.data.sets.click_schema import (
    ClickSchema,
    DenseColumn,
    KeyColumn,
    VocabularyColumn,
)
from sparsejax.embeddings.collection import collections_of
from sparsejax.embeddings.config import TableConfig
from sparsejax.kinds.kind import Maker
from sparsejax.kinds.reading import check_columns_of_run, check_counted
from sparsejax.optimizers.rules import Rule
from sparsejax.options.models import Clicks


def schema_of(command: Clicks) -> ClickSchema | None:
    """The schema that the flags describe; None for a saved data set, which contains its schema."""
    delimiter = getattr(command, "delimiter", None)
    others = command.given & {"label", "dense", "categories", "weight"}
    if getattr(command, "origin", None) is not None:
        check_columns_of_run(command, {*Clicks.option_names(), "delimiter"})
        return None
    if command.schema is not None:
        if others or delimiter is not None:
            raise ValueError(
                "--schema says what all columns are, and what separates them: leave out "
                "--label, --dense, --categories, --weight and --delimiter, or --schema"
            )
        return codec.load(command.schema, ClickSchema.from_json)
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
        weight=command.weight,
    )


def data_to_plan(schema: ClickSchema | None, examples: str | None) -> ScannedClicks:
    """Data for `plan`, with the schema and the numbers of ids that the flags give."""
    if examples is not None:
        return scan_clicks(examples, schema)
    if schema is None:
        raise ValueError(
            "name the columns: --schema FILE, or --examples, a saved data set"
        )
    check_counted(schema)
    return ScannedClicks("", schema, {}, 1)


def tables_of(make: Maker, rule: Rule) -> tuple[dict[str, TableConfig], dict[str, str]]:
    """The tables of a model by name, and the table name of each feature."""
    model, _ = nnx.eval_shape(lambda: make(rule=rule, seed=0))
    tables, features = {}, {}
    for node in collections_of(model).values():
        last = "" if not tables else ", linear"
        for stack in node.stacks:
            for feature in stack.features:
                table = f"{feature.table.name}{last}"
                tables[table] = feature.table.config
                features[f"{feature.name}{last}"] = table
    return tables, features
