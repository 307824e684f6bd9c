"""Rules by which an optimizer updates rows of a kernel, and catches up rows that steps did not
touch.

Each rule has a dense form of optax and a form for single rows. In a step that does
not touch a row, the dense form sees a gradient of zero. A zero gradient::

    sgd, adagrad, rowwise_adagrad,
    ftrl                             changes nothing
    rmsprop, adadelta                shrinks the state
    momentum, nesterov, adam,
    adamax                           shrinks the state and moves the weights
    adamw, and weight_decay          moves all weights, also of rows never touched

`catch_up` does many such steps at once. See docs/optimizers.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sparsejax import codec
from sparsejax.optimizers import schedules
from sparsejax.optimizers.rules.adaptive import (
    adadelta,
    adagrad,
    rmsprop,
    rowwise_adagrad,
)
from sparsejax.optimizers.rules.base import Rule
from sparsejax.optimizers.rules.moments import adam, adamax, adamw, lazy_adam
from sparsejax.optimizers.rules.plain import momentum, nesterov, sgd
from sparsejax.optimizers.rules.proximal import ftrl
from sparsejax.optimizers.schedules import Schedule

_RULES: dict[str, type[Rule]] = {
    rule.__name__: rule
    for rule in (
        sgd,
        momentum,
        nesterov,
        adagrad,
        rowwise_adagrad,
        ftrl,
        rmsprop,
        adadelta,
        adam,
        adamw,
        adamax,
        lazy_adam,
    )
}
NAMES = tuple(_RULES)


def get(name: str, **options: Any) -> Rule:
    """The rule with this name: `get("adam", learning_rate=1e-3)`.

    Raises:
      ValueError: no rule has this name, or the rule has no such option.
    """
    if name not in _RULES:
        known = ", ".join(NAMES)
        raise ValueError(f"unknown optimizer {name!r}; known: {known}")
    options_of = [field.name for field in dataclasses.fields(_RULES[name])]
    unknown = [option for option in options if option not in options_of]
    if unknown or "learning_rate" not in options:
        raise ValueError(
            f"{name} takes the options {', '.join(options_of)}, and learning_rate is "
            f"needed; got {', '.join(options) or 'none'}"
        )
    return _RULES[name](**options)


def to_json(rule: Rule) -> dict[str, Any]:
    """The name and the options of a rule, as a JSON object.

    Raises:
      TypeError: the learning rate is a function that JSON cannot represent.
    """
    options = rule.options()
    rate = options["learning_rate"]
    if isinstance(rate, Schedule):
        options["learning_rate"] = schedules.to_json(rate)
    elif callable(rate):
        raise TypeError(
            f"learning_rate is {rate!r}, which JSON cannot hold; make it with "
            "sparsejax.optimizers.schedule"
        )
    return {"name": rule.name, **options}


def from_json(document: codec.Json) -> Rule:
    """Reads a rule from the document that `to_json` made.

    Raises:
      ValueError: a name or an option is unknown, or an option is not a number.
      NotImplementedError: the rule has no such option.
    """
    if not isinstance(document, Mapping) or not isinstance(document.get("name"), str):
        raise ValueError(f'expected an object with a "name", got {str(document)[:60]}')
    options = codec.value(dict[str, Any], document, "the optimizer")
    if isinstance(rate := options.get("learning_rate"), Mapping):
        options["learning_rate"] = schedules.from_json(rate)
    try:
        return get(**options)
    except TypeError as error:
        raise ValueError(f"the optimizer: {error}") from error
