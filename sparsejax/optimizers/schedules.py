"""Learning-rate schedules that can be stored in a run folder: optax's, by name."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any

import optax

from sparsejax import codec

# The schedules of optax that have only numbers as arguments.
NAMES = (
    "constant_schedule",
    "cosine_decay_schedule",
    "cosine_onecycle_schedule",
    "exponential_decay",
    "linear_onecycle_schedule",
    "linear_schedule",
    "polynomial_schedule",
    "warmup_constant_schedule",
    "warmup_cosine_decay_schedule",
    "warmup_exponential_decay_schedule",
)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule, see `schedule`."""

    name: str
    options: tuple[tuple[str, Any], ...]

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            known = ", ".join(NAMES)
            raise ValueError(f"unknown schedule {self.name!r}; known: {known}")
        for name, value in self.options:
            if not isinstance(value, int | float):
                raise TypeError(f"{self.name}: {name} must be a number, got {value!r}")
            if not math.isfinite(value):
                raise ValueError(f"{self.name}: {name} must be finite, got {value}")
        signature = inspect.signature(getattr(optax.schedules, self.name))
        try:
            signature.bind(**dict(self.options))
        except TypeError as error:
            known = ", ".join(signature.parameters)
            raise ValueError(
                f"{self.name}: {error}; its options are {known}"
            ) from error

    def __call__(self, count: Any) -> Any:
        """The learning rate of the step that follows `count` steps."""
        return getattr(optax.schedules, self.name)(**dict(self.options))(count)


def schedule(name: str, **options: Any) -> Schedule:
    """An optax schedule by name, in a form that JSON can represent.

    >>> falling = schedule("cosine_decay_schedule", init_value=1e-3, decay_steps=1000)

    Raises:
      ValueError: optax has no such schedule, or the schedule has other options.
      TypeError: an option is not a number.
    """
    return Schedule(name, tuple(sorted(options.items())))


def to_json(schedule: Schedule) -> dict[str, Any]:
    """The name and the options of a schedule, as a JSON object."""
    return {"schedule": schedule.name, **dict(schedule.options)}


def from_json(document: Mapping[str, Any]) -> Schedule:
    """Reads a schedule from the document that `to_json` made.

    Raises:
      ValueError: the name is missing or unknown, an option is unknown, or it is not a number.
    """
    name, options = codec.read_named(document, "schedule", "the schedule")
    return Schedule(name, tuple(sorted(options.items())))
