"""Checks the static part of a model (everything but its arrays), which is a key of compiled
programs.
"""

from __future__ import annotations

from typing import Any

from flax import nnx


def check_hashable(graphdef: nnx.GraphDef, *models: Any) -> None:
    """Raises TypeError unless a model's graph is hashable, as a key of compiled programs must be.

    Args:
      graphdef: graph of the model, with or without its optimizer.
      models: models that are searched for the invalid attribute, to name it in the message.
    """
    try:
        hash(graphdef)
    except TypeError as error:
        found = [wrong for model in models if (wrong := _wrong(model))]
        kinds = ", ".join(type(model).__name__ for model in models)
        found.append(f"an attribute of {kinds} cannot be hashed")
        raise TypeError(found[0]) from error


class _Holder(nnx.Module):
    """A module with a single attribute."""

    def __init__(self, value: Any):
        self.value = value


def _wrong(model: nnx.Module) -> str | None:
    """An error message about the first unhashable attribute of a module, or metadata of a
    variable; None if there is none.
    """
    for path, node in nnx.iter_graph(model):
        is_variable = isinstance(node, nnx.Variable)
        if not is_variable and not isinstance(node, nnx.Module):
            continue
        held = node.get_metadata() if is_variable else vars(node)
        for name, value in held.items():
            try:
                hash(value if is_variable else nnx.split(_Holder(value))[0])
            except ValueError:  # a dict of arrays is not part of the module's graph
                continue
            except TypeError:
                where = ".".join(map(str, (*path, name)))
                return (
                    f"'{where}' of the {type(model).__name__} is a {type(value).__name__}, "
                    "which cannot be hashed, and programs are compiled for what it holds: "
                    "make it a frozen dataclass, or a tuple such as (*settings.items(),)"
                )
    return None
