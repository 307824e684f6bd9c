"""Arguments of which some kinds of data or of models have no use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, cast

from sparsejax.data.clicks import ClickDataset
from sparsejax.data.scan_clicks import ScannedClicks
from sparsejax.data.scan_sequences import ScannedSequences
from sparsejax.data.sequences import SequenceDataset

Kind = Literal["clicks", "histories", "items"]


def kind_of(data: object) -> Kind:
    """What the rows of the data are; anything that is not known is of items."""
    if isinstance(data, ClickDataset | ScannedClicks):
        return "clicks"
    if isinstance(data, SequenceDataset | ScannedSequences):
        return "histories"
    return "items"


def refused[Verb: Callable[..., Any]](
    of: str, kind: Callable[[Any], Kind], no_use: Mapping[Kind, Collection[str]]
) -> Callable[[Verb], Verb]:
    """A decorator: what a kind has no use for is an error, instead of being ignored.

    It sees which arguments a caller gives, so that one that equals its default is an error,
    too. None in place of a default of None is no argument.

    Args:
      of: the name of the argument that has the kind.
      kind: tells the kind of this argument.
      no_use: for each kind the names of the arguments that it has no use for.
    """

    def decorate(verb: Verb) -> Verb:
        signature = inspect.signature(verb)

        @functools.wraps(verb)
        def wrapped(*args, **kwargs):
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return verb(*args, **kwargs)  # which says the same of its arguments
            found = kind(given[of])
            for name in no_use.get(found, ()):
                default = signature.parameters[name].default
                if name in given and not (given[name] is None and default is None):
                    raise ValueError(f"{name} is of no use for {found}: leave it out")
            return verb(*args, **kwargs)

        return cast(Verb, wrapped)

    return decorate
