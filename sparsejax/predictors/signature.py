"""The signature of programs, stored as JSON in the file of a predictor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp

from sparsejax import codec
from sparsejax.data.reading.histories import HISTORIES
from sparsejax.data.reading.sources import Features, dense_row
from sparsejax.data.sets.click_schema import ClickSchema
from sparsejax.data.sets.event_schema import EventSchema
from sparsejax.ops.precision import Precision

VERSION = 5


class Served(NamedTuple):
    """The class that implements predictors of a kind.

    Attributes:
      module: module in this package that has the class; it is imported when needed.
      name: name of the class.
      ranks_items: whether answers are items, rather than probabilities of a click.
    """

    module: str
    name: str
    ranks_items: bool = True


KINDS = {
    "items": Served("ranking", "Items"),
    "histories": Served("histories", "Ordered"),
    "clicks": Served("clicks", "Clicks", ranks_items=False),
    "stages": Served("stages", "Staged"),
}
LABEL = "the signature"  # name of the signature in messages
Platform = Literal["cpu", "cuda"]
# Platforms for which programs are lowered.
PLATFORMS: tuple[Platform, ...] = ("cpu", "cuda")

_MOST_PROGRAMS = 64  # far above the number in `sizes_of_programs`
_DTYPES = {
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    *(f"float{bits}" for bits in (16, 32, 64)),
    *("bfloat16", "bool", "float8_e4m3fn"),
}
_OF_ENTRIES = "float32", "uint32", None


def _check_sizes(sizes: Sequence[int], least: int) -> None:
    """Raises ValueError if a size is less than `least`, or exceeds int32."""
    if not all(least <= size < 2**31 for size in sizes):
        raise ValueError(f"a size of {[*sizes]}; expected {least} or more, below 2^31")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Array:
    """An input, output or weight of programs.

    Attributes:
      name: for weights of click models, the path in the model; None for other weights, and for the
          single input of a model without input names.
      dtype: dtype of the values; None for a sparse array without values. In a sparse array of
          uint32, an entry is a 64-bit id, not a column: values are its high words, and indices its
          low words.
      shape: shape of a weight; for other arrays the shape of a row. A sparse array has the number
          of columns, preceded by the number of bags if a row of a request is several rows of the
          matrix.
      sparse: whether the array is a CSR.
    """

    dtype: str | None
    shape: tuple[int, ...]
    name: str | None = None
    sparse: bool = False

    def __post_init__(self) -> None:
        _check_sizes(self.shape, int(self.sparse))
        is_known = self.dtype in (_OF_ENTRIES if self.sparse else _DTYPES)
        if not is_known or (self.sparse and not 1 <= len(self.shape) <= 2):
            raise ValueError(f"an array of {self.dtype!r} and the shape {self.shape}")

    @classmethod
    def of(cls, array: jax.ShapeDtypeStruct | jax.Array, name: str | None) -> Array:
        """The description of a dense array."""
        return cls(dtype=jnp.dtype(array.dtype).name, shape=array.shape, name=name)

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        """The `jax.ShapeDtypeStruct` of a dense array."""
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the values."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    @property
    def bags(self) -> int:
        """Number of matrix rows for each row of a request."""
        return self.shape[0] if len(self.shape) == 2 else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputLayer:
    """The output layer, which ranks items, if it is separate from the programs.

    Its arrays are among the weights. The release that reads the file computes scores and ranks
    with its own code: `sparsejax.top_k`, with its GPU programs where they can run.

    Attributes:
      dtype: dtype of the operands of the products, in which the programs return row vectors.
      kernel: position of the item vectors among the weights.
      bias: position among the weights of the numbers added to scores, or None.
      scale: position among the weights of the factors of scores, or None.
      precision: precision of the products, as for `sparsejax.top_k`.
      int8: whether a GPU that supports it also stores the items in int8, and reads these first.
    """

    dtype: Literal["bfloat16", "float16", "float32", "float64"]
    kernel: int
    bias: int | None = None
    scale: int | None = None
    precision: Precision = None
    int8: bool = False

    def check(self, weights: Sequence[Array], num_items: int) -> None:
        """Raises ValueError unless the weights have arrays that match this layer."""
        places = [at for at in (self.kernel, self.bias, self.scale) if at is not None]
        if not all(0 <= at < len(weights) for at in places):
            raise ValueError(f"an output layer of the weights {places}")
        kernel, *others = (weights[at] for at in places)
        rows = kernel.shape[:1]
        fits = len(kernel.shape) == 2 and num_items <= rows[0] and kernel.shape[1]
        if not fits or any(each.shape != rows for each in others):
            shapes = [weights[at].shape for at in places]
            raise ValueError(f"an output layer of the shapes {shapes}")
        if not all(_is_floating(weights[at]) for at in places):
            raise ValueError("an output layer of numbers that are not floating")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewItems:
    """The computation of a new item's vector from its content, see `Predictor.add_items`.

    The kernels are float32 arrays `[rows, width]`, stored after the weights in a file.

    Attributes:
      tag_kernel: kernel with a row for each tag, or None.
      vector_kernel: kernel that content vectors are multiplied with, or None.
      vectors: dtype of the item vectors.
      numbers: mean and standard deviation of numbers, as in `ItemFeatures.numbers`.
      temperature: number by which cosines are divided to give scores; None if scores are dot
          products.
    """

    tag_kernel: Array | None = None
    vector_kernel: Array | None = None
    vectors: Literal["float16", "float32"] = "float32"
    numbers: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    temperature: float | None = None

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The kernels, in the order of the file."""
        both = self.tag_kernel, self.vector_kernel
        return tuple(each for each in both if each is not None)

    def check(self, width: int) -> None:
        """Raises ValueError unless it computes vectors for an output layer of this width."""
        widths = {each.shape[1:] for each in self.arrays}
        if len(widths) != 1 or not all(
            each.dtype == "float32" and len(each.shape) == 2 for each in self.arrays
        ):
            raise ValueError(f"content of the kernels {self.arrays}")
        if max(widths)[0] > width:
            raise ValueError("content that is wider than the output layer")
        if self.temperature is not None and not self.temperature > 0:
            raise ValueError(f"a temperature of {self.temperature}")


def _is_floating(array: Array) -> bool:
    return array.dtype in ("bfloat16", "float16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class ClickFeature:
    """A feature whose ids select rows in a stack of tables.

    Attributes:
      name: name of the feature.
      num_ids: number of ids in its table; for a dynamic table the number of rows.
      first: row number of id 0 in the stack, or the first row of a dynamic table.
      bag: number of its first bag in an example.
      length: number of its bags if the order of its ids is kept; 0 for a single bag.
      drop: whether ids outside the table are ignored; otherwise they are an error.
      last: whether only the last `length` ids of a longer list are read; otherwise it is an error.
      beside: name of another feature whose lists must have equal lengths, or empty.
    """

    name: str
    num_ids: int
    first: int
    bag: int
    length: int
    drop: bool
    last: bool = False
    beside: str = ""

    def __post_init__(self) -> None:
        _check_sizes([self.num_ids], 1)
        _check_sizes([self.first, self.bag, self.length, self.first + self.num_ids], 0)
        _check_sizes([self.length], int(self.last))


@dataclasses.dataclass(frozen=True)
class ClickTable:
    """A table in a stack.

    Attributes:
      name: name of the table after the path of its collection in the model, as in changes.
      first: row number of id 0 in the stack, or the first row of a dynamic table.
      num_rows: number of rows of the table.
    """

    name: str
    first: int
    num_rows: int

    def __post_init__(self) -> None:
        _check_sizes([self.num_rows], 1)
        _check_sizes([self.first, self.first + self.num_rows], 0)


@dataclasses.dataclass(frozen=True)
class ClickStack:
    """Tables whose rows are concatenated in one kernel.

    Attributes:
      bags: number of bags in each example.
      features: features that read the tables.
      dynamic: whether ids have 64 bits, and the programs look up their rows.
      tables: tables in the order of their rows, to apply changes.
      kernel: name of the weight with the rows.
      index: prefix of the names of the weights with the index of a dynamic table.
    """

    bags: int
    features: tuple[ClickFeature, ...]
    dynamic: bool = False
    tables: tuple[ClickTable, ...] = ()
    kernel: str = ""
    index: str = ""

    def __post_init__(self) -> None:
        last = [f.bag + max(f.length, 1) for f in self.features]
        if not last or max(last) > self.bags:
            raise ValueError("a stack whose features do not fit in it")

    @property
    def num_rows(self) -> int:
        """Number of rows in its tables that ids can refer to."""
        return max(f.first + f.num_ids for f in self.features)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """The conversion of a request to inputs of the second of two stages.

    Attributes:
      history: column of the schema that is filled with the item names of a row, or None.
      lengths: number of ids that are read of each column of categories. Of the history, and
          columns aligned with it, the last ids are read; a longer list in another column is an
          error.
      beside: for each column aligned with a history, the name of that history; the lists have
          equal lengths.
    """

    history: str | None
    lengths: Mapping[str, int]
    beside: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_sizes([*self.lengths.values()], 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """The inputs and outputs of a predictor, and the arguments of its programs.

    Attributes:
      kind: meaning of a row of a request: "items", "histories", "clicks", or "stages": items or a
          history, with columns for the model that ranks the candidates.
      inputs: arrays of a request, the programs' second argument. If there is an output layer, the
          last array, the excluded items, is passed to this layer instead.
      outputs: arrays of an answer, the results of the programs or of the output layer.
      weights: arrays of the programs' first argument.
      rows: number of rows that each program takes.
      platforms: platforms that the programs run on, such as "cpu" and "cuda".
      calling_convention: version of the calling convention of the programs, see
        `jax.export`.
      jax: version of JAX that wrote the programs.
      stacks: for clicks, the stacks of tables with the mapping from ids to rows.
      schema: for clicks and stages, types of the columns of records, or None.
      events: for histories, types of the event columns; None if the model reads none.
      users: for histories, types of the user columns; None if the model reads none.
      stages: for stages, the conversion of columns to inputs; else None.
      layer: the output layer; None if it is part of the programs.
      added: number of items added after export. Only the output layer has them. Its arrays are
          then the last weights, and not arguments of the programs.
      new_items: computation of vectors for new items; None if no items can be added.
    """

    kind: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    weights: tuple[Array, ...]
    rows: tuple[int, ...]
    platforms: tuple[Platform, ...]
    calling_convention: int
    jax: str
    stacks: tuple[ClickStack, ...] = ()
    schema: ClickSchema | None = None
    events: EventSchema | None = None
    users: EventSchema | None = None
    stages: Stages | None = None
    layer: OutputLayer | None = None
    added: int = 0
    new_items: NewItems | None = None

    def __post_init__(self) -> None:
        _check_sizes(self.rows, 1)
        if self.layer is not None:
            excluded = self.inputs[-1] if self.inputs else None
            if excluded is None or not excluded.sparse:
                raise ValueError("an output layer without what is excluded from it")
            self.layer.check(self.weights, excluded.shape[-1])
            _check_sizes([self.added, excluded.shape[-1] - self.added], 0)
            if self.new_items is not None:
                self.new_items.check(self.weights[self.layer.kernel].shape[1])
        elif self.added or self.new_items is not None:
            raise ValueError("new items without an output layer")
        if self.added and not set(self.layer_places) == {
            *range(len(self.program_weights), len(self.weights))
        }:
            raise ValueError("new items, whose output layer is not the last weights")
        if not 1 <= len(self.rows) <= _MOST_PROGRAMS:
            raise ValueError(
                f"{len(self.rows)} programs, expected 1 to {_MOST_PROGRAMS}"
            )
        if not self.platforms or len({*self.platforms}) < len(self.platforms):
            raise ValueError(f"the platforms {self.platforms}")

    @property
    def ranks_items(self) -> bool:
        """Whether answers are items, rather than probabilities of a click."""
        return KINDS[self.kind].ranks_items

    @property
    def beside_items(self) -> Literal["values", "times"]:
        """The kind of numbers that a request may give for its items: "times" if these are
        ordered.
        """
        reads_order = any(each.name == HISTORIES for each in self.inputs)
        return "times" if reads_order else "values"

    @property
    def program_inputs(self) -> tuple[Array, ...]:
        """The inputs that are passed to the programs."""
        return self.inputs if self.layer is None else self.inputs[:-1]

    @property
    def layer_places(self) -> tuple[int, ...]:
        """The positions of the output layer's arrays among the weights."""
        if self.layer is None:
            return ()
        places = self.layer.kernel, self.layer.bias, self.layer.scale
        return tuple(at for at in places if at is not None)

    @property
    def program_weights(self) -> tuple[Array, ...]:
        """The weights that are passed to the programs."""
        if not self.added:
            return self.weights
        return self.weights[: len(self.weights) - len(self.layer_places)]

    @property
    def program_outputs(self) -> tuple[Array, ...]:
        """The results of the programs: the outputs, or row vectors for the output layer."""
        if self.layer is None:
            return self.outputs
        width = self.weights[self.layer.kernel].shape[1:]
        return (Array(name="vectors", dtype=self.layer.dtype, shape=width),)

    def to_json(self) -> dict[str, Any]:
        """The signature as a JSON object, which `from_json` reads."""
        bare = dataclasses.replace(self, schema=None, events=None, users=None)
        document = dataclasses.asdict(bare)
        for name in ("schema", "events", "users"):
            if (schema := getattr(self, name)) is not None:
                document[name] = schema.to_json()
        return {"version": VERSION} | document

    @classmethod
    def from_json(cls, document: codec.Json) -> Signature:
        """Reads a document that `to_json` made.

        Raises:
          ValueError: the document is not a valid signature.
        """
        stated = codec.without_version(document, VERSION, LABEL)
        if stated.get("schema") is not None:
            stated["schema"] = ClickSchema.from_json(stated["schema"])
        for name in ("events", "users"):
            if stated.get(name) is not None:
                stated[name] = EventSchema.from_json(stated[name])
        return codec.read(cls, stated, LABEL)


def of_ranking(
    features: Features, num_items: int, k: int, *, values: bool = False
) -> dict[str, Any]:
    """Inputs and outputs of a ranking signature: ids and scores of `k` items for each row.

    Args:
      features: number of input features, or a dict with the number for each input.
      num_items: number of items.
      k: number of items for each row.
      values: whether items also have values, see `Recommendations`.
    """
    sizes = {None: features} if isinstance(features, int) else features
    inputs = [
        Array(name=name, shape=(size,), dtype="float32", sparse=True)
        if isinstance(size, int)
        else Array.of(dense_row(size), name)
        for name, size in sizes.items()
    ]
    exclude = Array(name="exclude", shape=(num_items,), dtype=None, sparse=True)
    outputs = [("ids", "int32"), ("scores", "float32")]
    outputs += [("values", "float32")] * values
    return {
        "inputs": (*inputs, exclude),
        "outputs": tuple(Array(name=n, dtype=d, shape=(k,)) for n, d in outputs),
    }


def features_of(inputs: Sequence[Array]) -> Features:
    """`num_features` of the model with these inputs. They do not include the excluded items.

    Raises:
      ValueError: no model has such inputs.
    """
    sizes = {each.name: each.shape[0] if each.sparse else each.like for each in inputs}
    if None not in sizes and sizes:
        return cast(Features, sizes)
    if len(inputs) != 1 or not inputs[0].sparse:
        raise ValueError("expected an input, or several with names")
    return cast(int, sizes[None])


def reads_histories(features: Features) -> bool:
    """Whether a model with these features reads the last items of histories."""
    row = features.get(HISTORIES) if isinstance(features, Mapping) else None
    return isinstance(row, jax.ShapeDtypeStruct) and len(row.shape) == 1


def of_clicks(
    num_dense: int, stacks: Sequence[ClickStack], schema: ClickSchema | None = None
) -> dict[str, Any]:
    """Inputs and outputs of a click signature: a logit for each example, or for each of its
    labels.
    """
    labels = (len(schema.several),) if schema is not None and schema.several else ()
    dense = Array(name="dense", shape=(num_dense,), dtype="float32")
    tables = (
        Array(
            name=f"ids {i}",
            shape=(s.bags, s.num_rows),
            dtype="uint32" if s.dynamic else None,
            sparse=True,
        )
        for i, s in enumerate(stacks)
    )
    return {
        "inputs": (dense, *tables),
        "outputs": (Array(name="logits", dtype="float32", shape=labels),),
    }
