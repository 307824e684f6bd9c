"""Contents of predictors' files that earlier releases wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from sparsejax import codec
from sparsejax.data.reading.sources import Features
from sparsejax.data.sets.click_schema import ClickSchema
from sparsejax.predictors.signature import (
    LABEL,
    PLATFORMS,
    Array,
    ClickStack,
    Signature,
    of_clicks,
    of_ranking,
    reads_histories,
)


def signature_4(document: dict[str, Any]) -> Signature:
    """Reads version 4, whose names are lists of JSON.

    Raises:
      ValueError: it is something else.
    """
    return Signature.from_json(document, version=4)


def signature_3(document: dict[str, Any]) -> Signature:
    """Reads the signature of version 3, whose programs contain the ranking.

    Raises:
      ValueError: the document is no such signature.
    """
    signature = Signature.from_json(document, version=3)
    if signature.layer is not None:
        raise ValueError(f"{LABEL} of version 3 has an output layer")
    return signature


def items_2(document: dict[str, Any]) -> Signature:
    """Reads version 2 of files that recommend.

    Raises:
      ValueError: it is something else.
    """
    features = _features(_entry(document, "inputs", tuple[dict[str, Any], ...]))
    k, num_items = (_entry(document, key, int) for key in ("k", "num_items"))
    kind = "histories" if reads_histories(features) else "items"
    facts = of_ranking(features, num_items, k)
    return Signature(kind=kind, **facts, **_of_programs(document))


def clicks_1(document: dict[str, Any]) -> Signature:
    """Reads version 1 of files of click models.

    Raises:
      ValueError: it is something else.
    """
    stacks = _entry(document, "stacks", tuple[ClickStack, ...])
    facts = of_clicks(_entry(document, "num_dense", int), stacks)
    schema = document.get("schema")
    return Signature(
        kind="clicks",
        stacks=stacks,
        schema=None if schema is None else ClickSchema.from_json(schema),
        **facts,
        **_of_programs(document),
    )


def _entry(document: dict[str, Any], key: str, hint: Any) -> Any:
    return codec.value(hint, document.get(key), LABEL, key)


def _of_programs(document: dict[str, Any]) -> dict[str, Any]:
    return {
        "weights": _entry(document, "weights", tuple[Array, ...]),
        "rows": _entry(document, "programs", tuple[int, ...]),
        "platforms": PLATFORMS,
        "calling_convention": _entry(document, "calling_convention", int),
        "jax": _entry({"jax": "unknown"} | document, "jax", str),
    }


def _features(inputs: Sequence[dict[str, Any]]) -> Features:
    """`num_features` of the model that takes these inputs."""
    if len(inputs) == 1 and "name" not in inputs[0]:
        return _entry(inputs[0], "num_features", int)
    found: dict[str, int | jax.ShapeDtypeStruct] = {}
    for one in inputs:
        rest = {**one}
        name = _entry({"name": rest.pop("name", None)}, "name", str)
        if "num_features" in one:
            found[name] = _entry(one, "num_features", int)
        else:
            found[name] = codec.read(Array, rest, LABEL).like
    if not found or len(found) != len(inputs):
        raise ValueError(f"{LABEL} has inputs without a name of their own")
    return found
