"""How annotations are checked at run time, under `--check-annotations`."""

from typing import Self

import beartype
from jax import export

# An exported program has symbols for the sizes that it leaves open.
Symbol = type(export.symbolic_shape("size")[0])

# An int is a float, as it is for the type checker. Functions are checked one by one, and only in
# a class that it checks as a whole does beartype take Self.
check = beartype.beartype(
    conf=beartype.BeartypeConf(
        is_pep484_tower=True,
        hint_overrides=beartype.FrozenDict({Self: object, int: int | Symbol}),
    )
)
