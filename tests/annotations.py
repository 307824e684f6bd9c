"""Checks annotations at run time, under `--check-annotations`."""

from typing import Self

import beartype
from jax import export

# In an exported program, sizes that the export leaves open are symbols.
Symbol = type(export.symbolic_shape("size")[0])

# As for the type checker, an int is a float. Functions are checked one by one; beartype supports
# Self only in a class that it checks as a whole.
check = beartype.beartype(
    conf=beartype.BeartypeConf(
        is_pep484_tower=True,
        hint_overrides=beartype.FrozenDict({Self: object, int: int | Symbol}),
    )
)
