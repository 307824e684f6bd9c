"""Exports a click model with its tables as programs that run without sparsejax."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from sparsejax.embeddings.collection import EmbeddingCollection, collections_of
from sparsejax.embeddings.config import Unknown
from sparsejax.embeddings.dynamic.state import IndexState
from sparsejax.embeddings.feature_batch import FeatureBatch
from sparsejax.embeddings.placement import Stack, StackedTable, stack_tables
from sparsejax.kinds.clicks.scores import (
    Clicks,
    check_click_model,
    check_columns,
    check_labels,
    check_shape,
)
from sparsejax.kinds.content import copied
from sparsejax.kinds.portable import Portable, split
from sparsejax.mesh.layout import to_host_in_pieces
from sparsejax.ops import row_codes
from sparsejax.ops.hash_index import Index, TableKeys
from sparsejax.ops.row_codes import RowCodes, TableDtype
from sparsejax.optimizers import gradients
from sparsejax.optimizers.gradients import RowParam
from sparsejax.options.predicting import Write
from sparsejax.predictors.archive import Stored
from sparsejax.predictors.signature import (
    ClickFeature,
    ClickStack,
    ClickTable,
    of_clicks,
)
from sparsejax.sparse import CSR
from sparsejax.wide_ids import NUM_IDS


def portable_clicks(asked: Write) -> Portable:
    """Exports a click model with its tables, for `export_predictor`."""
    model: Any = asked.model
    clicks, table_dtype, unknown_ids = asked.names, asked.table_dtype, asked.unknown_ids
    check_click_model(model)
    if not collections_of(model):
        raise TypeError(
            "a click model reads its ids by an EmbeddingCollection, and "
            f"{type(model).__name__} has none"
        )
    if not isinstance(clicks, Clicks | None):
        raise TypeError(
            "names of a click model are the clicks that it was trained on, got "
            f"{type(clicks).__name__}"
        )
    row_codes.check_table_dtype(table_dtype)
    _check_unknown(unknown_ids, model)
    num_dense = _num_dense(model, clicks)
    labels = {} if clicks is None else clicks.schema.several
    if clicks is not None:
        check_labels(model, clicks)
    elif getattr(model, "labels", ()):
        raise ValueError(
            f"the model has the labels {model.labels}: pass names=train, whose schema says what "
            "they are"
        )
    model = copied(model)
    model.eval()
    tables = [
        (path_of, table)
        for number, (path_of, node) in enumerate(collections_of(model).items())
        for table in _portable(number, node, table_dtype, unknown_ids or "init")
    ]
    stacks = [table.stack for _, table in tables]
    if clicks is not None:
        _check_ids(stacks, clicks)
    merged, state = split(model)
    # The scales and offsets of quantized rows are exported as separate arrays after the state.
    numbers = {
        (*path_of, "kernels", table.stack.name): table.numbers
        for path_of, table in tables
        if table.numbers
    }
    named, structure = jax.tree.flatten_with_path((state, list(numbers.values())))

    def logits(weights, inputs):
        state, scales = jax.tree.unflatten(structure, weights)
        model = merged(state)
        dense, *ids = inputs
        batch = _batch(stacks, ids)
        readers = dict(zip(numbers, map(_reader, scales), strict=True))
        with gradients.reading(model, readers):
            found = model(dense, batch)
        check_shape(found.shape, dense.shape[0], len(labels))
        return [found]

    beside = {column: history for history, column in getattr(model, "beside", ())}
    stated = tuple(_stated(path_of, table.stack, beside) for path_of, table in tables)
    schema = None if clicks is None else clicks.schema
    vocabularies = {} if clicks is None else clicks.vocabularies
    return Portable(
        stated={
            "stacks": stated,
            "schema": schema,
            **of_clicks(num_dense, stated, schema),
        },
        function=logits,
        weights=[
            Stored(
                w,
                w.pieces() if isinstance(w, _Table) else to_host_in_pieces(w),
                None if place.idx else _dotted(path),
            )
            for (place, *path), w in named
        ],
        vocabularies={name: names.tolist() for name, names in vocabularies.items()},
    )


def _dotted(path: Iterable[Any]) -> str:
    """The dotted name of an array in a tree, equal to its name in an export of changes."""
    # The path to a variable's array ends with an attribute's name, which is not written.
    keys = (key for key in path if not isinstance(key, jax.tree_util.GetAttrKey))
    return ".".join(str(getattr(key, "key", key)) for key in keys)


def _check_unknown(unknown: Unknown | None, model: nnx.Module) -> None:
    """Raises ValueError if `unknown` is no valid choice for the model."""
    if unknown not in (None, *get_args(Unknown)):
        raise ValueError(f'unknown_ids is "init" or "zeros", got {unknown!r}')
    if unknown and not any(node.indexes for node in collections_of(model).values()):
        raise ValueError(
            f"unknown_ids={unknown!r} is for ids that dynamic tables have no row of, and this "
            "model has no dynamic tables: leave it out"
        )


def _num_dense(model: nnx.Module, clicks: Clicks | None) -> int:
    stated = getattr(model, "num_dense", None)
    if clicks is None:
        if stated is None:
            raise ValueError(
                "the model has no attribute num_dense, which says how many dense columns it "
                "takes; pass names=train, the clicks that it was trained on"
            )
        return stated
    check_columns(model, clicks)
    return len(clicks.schema.dense)


def _check_ids(stacks: list[Stack], clicks: Clicks) -> None:
    """Raises ValueError if the model's features differ from those of the data."""
    wanted = {
        f.name: NUM_IDS if s.dynamic else f.table.config.num_rows
        for s in stacks
        for f in s.features
    }
    if wanted.keys() != clicks.num_ids.keys():
        raise ValueError(
            f"the model has the features {sorted(wanted)}, but names has "
            f"{sorted(clicks.num_ids)}; pass the clicks that the model was trained on"
        )
    for name, size in clicks.num_ids.items():
        if wanted[name] != size:
            raise ValueError(
                f"names has {size:,} ids of {name!r}, but its table has {wanted[name]:,} "
                "rows; pass the clicks that the model was trained on"
            )


class _Table(jax.ShapeDtypeStruct):
    """Shape and dtype of an exported array that is written in pieces.

    Attributes:
      pieces: function that returns an iterator over the array's rows, in pieces.
    """

    def __init__(self, shape, dtype, pieces):
        super().__init__(shape, dtype)
        self.pieces = pieces


class _Tables(NamedTuple):
    """A stack of tables in an export.

    Attributes:
      stack: the stack; its tables are in the order of their ids.
      numbers: scales of quantized rows, then their offsets if the dtype has offsets.
    """

    stack: Stack
    numbers: list[_Table]


def _portable(
    number: int,
    collection: EmbeddingCollection,
    table_dtype: TableDtype | None,
    unknown: Unknown,
) -> list[_Tables]:
    """Replaces the tables of a copied collection by the tables to export.

    Returns:
      The new stacks. Each name is unique among all collections.
    """
    places: dict[str, tuple[Stack, list[StackedTable]]] = {}
    for stack in collection.stacks:
        for piece in stack.tables:
            places.setdefault(piece.name, (stack, []))[1].append(piece)
    readers = {f.name: f.config for s in collection.stacks for f in s.features}
    features = {name: readers[name] for name in collection.names}
    tables = {
        name: dataclasses.replace(
            pieces[0].config,
            placement="replicated",
            rule=None,
            host=False,
            device_rows=None,
            host_path=None,
        )
        for name, (_, pieces) in places.items()
        if not pieces[0].dynamic
        and any(feature.table == name for feature in features.values())
    }
    features = {
        n: feature for n, feature in features.items() if feature.table in tables
    }
    stores = {store.stack.name: store for store in collection.stores()}

    def rows(stack: Stack) -> Iterator[np.ndarray]:
        for table in stack.tables:
            lies, pieces = places[table.name]
            yield from stores[lies.name].table_rows(tuple(pieces))
        unused = stack.num_rows - sum(t.config.num_rows for t in stack.tables)
        yield np.zeros((unused, stack.dim), stack.dtype)

    found, kernels, indexes = [], {}, {}
    # The rows of a dynamic table keep their order, because its index contains row numbers.
    changing = [
        stack for stack in collection.stacks if stack.dynamic and stack.features
    ]
    for stack in (*stack_tables(tables, features, {}), *changing):
        name = f"{number}_{stack.name}"
        if stack.dynamic:
            known = collection.indexes[stack.name]
            arrays = {each: known[each][...] for each in Index._fields}
            indexes[name] = {n: IndexState(array) for n, array in arrays.items()}
            pieces = stores[stack.name].every_row
            stack = dataclasses.replace(stack, device_rows=None, store="dynamic")
        else:
            pieces = functools.partial(rows, stack)
        stack = dataclasses.replace(stack, name=name)
        kind = table_dtype
        if kind and not row_codes.saves_memory(kind, stack.dim, stack.dtype):
            kind = None
        kernel, *numbers = _arrays(stack, pieces, kind)
        kernels[stack.name] = RowParam(kernel)
        found.append(_Tables(stack, numbers))
    if any(store.stages for store in stores.values()):
        # The exported file contains all rows, so none are copied from the host in a step.
        del collection.first, collection.stage
    collection.stacks = tuple(tables.stack for tables in found)
    collection.kernels, collection.indexes = nnx.data(kernels), nnx.data(indexes)
    collection.unknown = unknown
    return found


def _arrays(
    stack: Stack, rows: Callable[[], Iterator[np.ndarray]], kind: TableDtype | None
) -> list[_Table]:
    """Arrays exported for a stack: its rows, or the quantized codes, scales and offsets."""
    shape = (stack.num_rows, stack.dim)
    if kind is None:
        return [_Table(shape, stack.dtype, rows)]
    dtypes = row_codes.coded_dtypes(kind)
    # The file stores scales and offsets after all codes, so they are collected here while the
    # codes are written.
    kept: list[list[np.ndarray]] = [[] for _ in dtypes[1:]]

    def codes() -> Iterator[np.ndarray]:
        for piece in rows():
            coded = row_codes.coded(piece, kind)
            for numbers, other in zip(kept, coded[1:], strict=False):
                numbers.append(np.asarray(other))
            yield np.asarray(coded.codes)

    per_row = [
        _Table(shape[:1], dtype, functools.partial(iter, numbers))
        for numbers, dtype in zip(kept, dtypes[1:], strict=True)
    ]
    return [_Table(shape, dtypes[0], codes), *per_row]


def _batch(stacks: list[Stack], given: list[Any]) -> FeatureBatch:
    """Converts the inputs of the exported program to a `FeatureBatch`."""
    found, keys = {}, {}
    for stack, entries in zip(stacks, given, strict=True):
        *high, low, indptr = entries
        x = CSR(None, low, indptr, num_cols=stack.num_rows)
        if stack.dynamic:
            tables = [
                stack.tables.index(feature.table)
                for feature in stack.features
                for _ in range(feature.config.bags)
            ]
            table = jnp.asarray(tables, jnp.int32)[x.row_ids() % stack.bags]
            words = (*high, lax.bitcast_convert_type(low, jnp.uint32))
            keys[stack.name] = TableKeys(table, *words)
            x = CSR(None, jnp.zeros_like(low), indptr, num_cols=stack.num_rows)
        found[stack.name] = x
    return FeatureBatch(found, keys)


def _reader(numbers: list[jax.Array]) -> gradients.Reader:
    """Makes a function that sums rows of a quantized stack."""
    scale, *offset = numbers

    def read(x, w, implementation):
        return row_codes.summed_codes(x, RowCodes(w, scale, *(offset or [None])))

    return read


def _stated(path: tuple, stack: Stack, beside: Mapping[str, str]) -> ClickStack:
    features = (
        ClickFeature(
            name=f.name,
            num_ids=f.table.config.num_rows,
            first=f.table.place.first,
            bag=f.first_bag,
            length=f.config.length or 0,
            drop=f.config.outside == "drop",
            last=f.config.longer == "last",
            beside=beside.get(f.name, ""),
        )
        for f in stack.features
    )
    return ClickStack(
        stack.bags,
        tuple(features),
        dynamic=stack.dynamic,
        tables=tuple(
            ClickTable(
                _dotted((*path, table.name)), table.place.first, table.config.num_rows
            )
            for table in stack.tables
        ),
        kernel=_dotted((*path, "kernels", stack.name)),
        index=_dotted((*path, "indexes", stack.name)) if stack.dynamic else "",
    )
