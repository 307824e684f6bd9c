"""Reads the files that flags name."""

from __future__ import annotations

from typing import Any

from sparsejax import codec
from sparsejax.cli.flags import Modelled, Plan, Split, Train
from sparsejax.data import (
    EventSchema,
    ItemFeatures,
    UserFeatures,
    read,
    read_item_features,
)
from sparsejax.data.prepared.folder import DataFolder
from sparsejax.data.sets.assemble import Features
from sparsejax.kinds.reading import users_in
from sparsejax.options.reading import Reading


def content_of(command: Modelled) -> ItemFeatures | str | None:
    """The item content for a command: the name of its file, or the content read by its flags.

    Raises:
      ValueError: flags describe content, but no content is given.
    """
    options: dict[str, Any] = {
        "columns": command.content_columns,
        "words": command.words,
    }
    given = {name: value for name, value in options.items() if value}
    if not given:
        return command.item_features
    if command.item_features is None:
        raise ValueError(
            f"--{next(iter(given))} says how --item-features is read; name the file"
        )
    return read_item_features(command.item_features, **given)


def users_of(command: Train | Plan | Split) -> UserFeatures | str | None:
    """The user columns for a command: the name of their file, or the columns read by its
    schema.
    """
    if command.user_schema is None or command.user_features is None:
        return command.user_features
    schema = codec.load(command.user_schema, EventSchema.from_json)
    reading = command if isinstance(command, Reading) else Reading()
    return users_in(command.user_features, schema, reading)


def read_features(path: str) -> Features:
    """Reads the features in a file, to read other files with this vocabulary."""
    folder = DataFolder.find(path)
    return read(path) if folder is None else folder.vocabulary()
