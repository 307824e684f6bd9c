"""The options that describe models, and the columns of clicks and of events."""

from __future__ import annotations

import pathlib
from typing import Any, ClassVar, Literal

from sparsejax.options.option import (
    COLUMN,
    FILE,
    SWITCH,
    Flag,
    KindName,
    Options,
    option,
)

# Equal to the type in `sparsejax.ops`.
Precision = Literal["highest", "high", "default"]
_PATH = Flag(type=pathlib.Path | None, value="FILE")
_WITH_COLUMNS: tuple[KindName, ...] = ("clicks", "histories")


class OfKind(Options):
    """Options that describe models of one kind."""

    describes: ClassVar[KindName]


class Network(OfKind):
    """An autoencoder: its input and its output are all features of the data.

    Attributes:
      hidden: Number of units of each hidden layer, from the first to the last.
      activation: Activation of the hidden layers: linear, or a function of jax.nn, such
        as relu, tanh or gelu.
      loss: One of softmax_cross_entropy, sigmoid_binary_cross_entropy, l2_loss and
        scaled_marginal_cross_entropy.
      normalize: Divide each input row by its L2 norm.
      corruption: Probability of dropping an input entry in training.
      dropout: Probability of dropping a hidden unit in training.
      temperature: Scores are cosines divided by this number. auto chooses it by the number
        of items, and prints it. With None, scores are dot products.
      tied: Use one kernel for both the first and the last layer.
      output_dtype: Type of the operands of the last layer's matrix products. bfloat16 is
        faster on GPUs.
      precision: Precision of products of float32 matrices. highest is float32, high has
        errors of 2^-16. default is the fastest on this device.
      param_dtype: Type in which the first and the last layer are stored. bfloat16 takes half
        the memory. It is rounded at random in training, so that small steps are not lost.
      linear: Rank of a linear part, which is computed from the data and whose scores are
        added. auto chooses it by the number of entries of an item, and prints it.
    """

    describes = "items"
    heading = "network"

    hidden: tuple[int, ...] = (256,)
    activation: str = "tanh"
    loss: str = "softmax_cross_entropy"
    normalize: bool = True
    corruption: float = 0.5
    dropout: float = 0.0
    temperature: float | Literal["auto"] | None = option(
        "auto", Flag(value="{auto,FLOAT,None}", default="auto")
    )
    tied: bool = option(False, SWITCH)
    output_dtype: str | None = option(
        None, Flag(value="{bfloat16,None}", default="None, that of the parameters")
    )
    precision: Precision | None = option(
        None, Flag(value="{highest,high,default}", default="default")
    )
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    linear: int | Literal["auto"] | None = option(
        "auto", Flag(value="{auto,INT,None}", default="auto")
    )


class Histories(OfKind):
    """A model of histories. The file --config can set its further options.

    Attributes:
      width: Numbers in the vector of an item.
      blocks: Number of blocks, one after the other.
      heads: Heads of each attention, of sasrec and hstu. They divide the width.
    """

    describes = "histories"
    heading = "histories"

    width: int | None = option(None, "128")
    blocks: int | None = option(None, "2")
    heads: int | None = option(None, "2")


class Clicks(Options):
    """The columns of a file of clicks, or of the events of histories. None of it is needed for
    saved data sets.

    Attributes:
      schema: JSON file of a ClickSchema or an EventSchema, in place of the flags below: it
        also says how numbers are transformed, and which categories are hashed.
      label: Column with 1 for a click and 0 for none.
      kind: For histories, the column with the kind of each event, such as view or purchase.
      dense: Columns of numbers.
      categories: Columns of categories, or of lists of them.
      weight: Column of the examples' weights, numbers of 0 or more that training multiplies
        the losses by.
      dynamic: Number of rows of the dynamic table of each column of 64-bit ids. An id gets a row
        when it is first seen, and loses it when the table is full. The columns are those of
        the kind "key" in --schema; without a schema, those of --categories. --config can set
        more, such as {"dynamic": {"num_rows": 50000000, "evict": "lfu", "admit": {"count": 2}}}.
      user_schema: JSON file of an EventSchema that describes the columns of --user-features.
        Without one, the types of the columns decide.
    """

    only_with: ClassVar = {"user_schema": ("user_features",)}

    describes: ClassVar[KindName] = "clicks"
    heading = "clicks_and_events"

    schema: Any = option(None, _PATH, kinds=_WITH_COLUMNS)
    label: str | None = option(None, COLUMN, kinds=("clicks",))
    kind: str | None = option(None, COLUMN, kinds=("histories",))
    dense: tuple[str, ...] = option((), COLUMN, kinds=_WITH_COLUMNS)
    categories: tuple[str, ...] = option((), COLUMN, kinds=_WITH_COLUMNS)
    weight: str | None = option(None, COLUMN, kinds=("clicks",))
    dynamic: int | None = option(None, kinds=("clicks",))
    user_schema: pathlib.Path | None = option(None, FILE, kinds=("histories",))


class Described(Network, Histories):
    """Options that describe a model of any kind. A kind reads those that its models have."""


BY_DEFAULT = Described()
