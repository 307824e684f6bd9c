"""The static part of a compiled program: a model without its arrays."""

from __future__ import annotations

from typing import Any

from flax import nnx


def check_hashable(graphdef: nnx.GraphDef, model: Any) -> None:
    """Raises TypeError unless programs can be found by a model's graph.

    Args:
      graphdef: of the model, perhaps with its optimizer.
      model: to say which of its attributes is wrong.
    """
    try:
        hash(graphdef)
    except TypeError as error:
        raise TypeError(_wrong(model)) from error


class _Holder(nnx.Module):
    """A module with one attribute."""

    def __init__(self, value: Any):
        self.value = value


def _wrong(model: Any) -> str:
    """The message, which names the attribute."""
    for path, node in nnx.iter_graph(model):
        if not isinstance(node, nnx.Module):
            continue
        for name, value in vars(node).items():
            try:
                hash(nnx.split(_Holder(value))[0])
            except ValueError:  # arrays in a dict, which are no part of the graph
                continue
            except TypeError:
                where = ".".join(map(str, (*path, name)))
                return (
                    f"'{where}' of the {type(model).__name__} is a {type(value).__name__}, "
                    "which cannot be hashed, and programs are compiled for what it holds: "
                    "make it a frozen dataclass, or a tuple such as (*settings.items(),)"
                )
    return f"the {type(model).__name__} has an attribute that cannot be hashed"
