"""Converts a model to a function of arrays, for a predictor's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparsejax.data.files.names import FeatureNames, as_names, check_unique
from sparsejax.data.reading.histories import EVENTS
from sparsejax.data.reading.sources import features_of
from sparsejax.data.sets.event_schema import USERS, EventSchema
from sparsejax.data.sets.item_features import ItemFeatures
from sparsejax.kinds.content import check_same_sizes, content_of, copied, finish_vectors
from sparsejax.mesh.layout import to_host_in_pieces, without_mesh
from sparsejax.nn.layers import SparseOutput
from sparsejax.ops import coarse_top_k
from sparsejax.options.predicting import Write
from sparsejax.predictors.archive import Stored
from sparsejax.predictors.names import ITEMS
from sparsejax.predictors.new_items import TAGS
from sparsejax.predictors.ranking import unflattened
from sparsejax.predictors.signature import Array, NewItems, OutputLayer, of_ranking
from sparsejax.predictors.stablehlo import inputs_like
from sparsejax.predictors.stages import COLUMN, Requests
from sparsejax.sparse import CSR


class Portable(NamedTuple):
    """Parts of a model for a predictor's file.

    Attributes:
      stated: descriptions of inputs and outputs for the signature, by field name.
      function: `(weights, inputs) -> outputs`, see `predictors.stablehlo`.
      weights: first argument of the function.
      vocabularies: lists of names, by what they name.
      beside: arrays that are stored after the weights in the file.
    """

    stated: dict[str, Any]
    function: Callable[[Any, Any], Sequence[jax.Array]]
    weights: Sequence[Stored]
    vocabularies: Mapping[str, Sequence[str]]
    beside: Sequence[Stored] = ()


def split(model: Any) -> tuple[Callable[[Any], Any], Any]:
    """Splits a model into its state and a function that makes a model, on one device, from a
    state.

    This changes the model: pass a copy.
    """
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            node.set_metadata(out_sharding=None)  # the program is for one device
        elif hasattr(node, "implementation"):
            # A GPU program is compiled for one platform, but this program must run on two.
            node.implementation = "xla"
    graphdef, keys, state = nnx.split(model, nnx.RngState, ...)
    with without_mesh():
        keys = jax.tree.map(_on_this_process, keys)
    return lambda state: nnx.merge(graphdef, keys, state), state


def _on_this_process(state: jax.Array) -> jax.Array:
    """Copies a random key or counter, replicated over all processes, to this process's devices."""
    if not jax.dtypes.issubdtype(state.dtype, jax.dtypes.prng_key):
        return jnp.asarray(np.asarray(state))
    words = jnp.asarray(np.asarray(jax.random.key_data(state)))
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(state))


def _ends_in_its_layer(model: nnx.Module) -> bool:
    """Whether `top_k` does nothing but apply the output layer to the result of `queries`.

    A class may state this only about its own methods, because a subclass may override them.
    """
    if getattr(model, "rank_by", None) is not None:
        return False
    kind = type(getattr(model, "trained", model))
    stated, *methods = (
        next((each for each in kind.__mro__ if name in vars(each)), None)
        for name in ("ranks_by_layer", "queries", "top_k")
    )
    return stated is not None and all(method is stated for method in methods)


def _stated_layer(
    layer: SparseOutput, dtype: jnp.dtype, weights: Sequence[jax.Array], *, int8: bool
) -> OutputLayer:
    """Describes an output layer, with batch norm folded in, whose arrays are among the weights."""

    def place(variable: nnx.Variable | None) -> int | None:
        if variable is None:
            return None
        value = variable.get_raw_value()
        return next(i for i, weight in enumerate(weights) if weight is value)

    kernel = place(layer.kernel)
    assert kernel is not None
    return OutputLayer(
        dtype=jnp.dtype(dtype).name,  # pyrefly: ignore[bad-argument-type]
        kernel=kernel,
        bias=place(layer.bias),
        scale=place(layer.folded_scale),
        precision=layer.precision,
        int8=int8,
    )


def _stated_content(model: Any, given: ItemFeatures) -> tuple[NewItems, list[Any]]:
    """Describes how vectors of new items are computed, and returns the kernels that compute them.

    Raises:
      ValueError: the model has no content, or its content has other sizes.
    """
    content = content_of(getattr(model, "trained", model))
    if content is None or not _ends_in_its_layer(model):
        raise ValueError(
            "the model was not built with content of its items; leave out item_features"
        )
    check_same_sizes(given, content.sizes)
    kernels = [
        None if count == 0 or parameter is None else parameter[...][:count]
        for parameter, count in (
            (content.tag_kernel, content.sizes.tags),
            (content.vector_kernel, content.sizes.vectors),
        )
    ]
    of_tags, of_vectors = (
        None if kernel is None else Array.of(kernel, None) for kernel in kernels
    )
    stated = NewItems(
        tag_kernel=of_tags,
        vector_kernel=of_vectors,
        vectors="float16" if content.sizes.dtype == "float16" else "float32",
        numbers=given.numbers,
        temperature=model.output.temperature,
    )
    return stated, [kernel for kernel in kernels if kernel is not None]


def stated_columns(
    known: Any,
) -> tuple[dict[str, EventSchema], dict[str, list[str]]]:
    """The schemas of columns of events and of users, and the names of their categories."""
    stated, named = {}, {}
    for what, begin in (("events", EVENTS), ("users", USERS)):
        if (columns := getattr(known, what)) is not None:
            stated[what] = columns.schema
            categories = columns.vocabularies.items()
            named |= {f"{begin}{name}": some.tolist() for name, some in categories}
    return stated, named


def portable_ranker(model: Any, asked: Write) -> Portable:
    """Exports a `Recommender` that recommends up to `k` items.

    Args:
      model: recommender to export.
      asked: arguments of `export_predictor`.
    """
    names, item_features = cast(Any, asked.names), asked.item_features
    k, int8 = asked.k, asked.int8
    ends = _ends_in_its_layer(model)
    if int8 and not ends:
        raise ValueError(
            "int8 is for models that rank by their output layer, and "
            f"{type(model).__name__} has a top_k of its own: leave it out"
        )
    features = features_of(model)
    vocabularies: dict[str, list[str]] = {}
    kernels: list[Any] = []
    stated_content = None
    if item_features is not None:
        if names is None:
            raise ValueError("item_features needs the names of the items: names=...")
        stated_content, kernels = _stated_content(model, item_features)
        if stated_content.tag_kernel is not None:
            vocabularies[TAGS] = item_features.tag_names.tolist()
    if names is not None:
        has_them = isinstance(names, FeatureNames)
        items = as_names(names.feature_names if has_them else names)
        if len(items) != model.num_items:
            raise ValueError(
                f"{len(items):,} names were given but the model has "
                f"{model.num_items:,} items"
            )
        check_unique(items, "item")
        vocabularies[ITEMS] = items.tolist()
    of_requests: dict[str, Any] = {}
    if isinstance(names, Requests):
        facts = {"stages": names.stages, "schema": names.schema, "kind": "stages"}
        of_requests |= facts
        stated, named = stated_columns(names)
        of_requests |= stated
        vocabularies |= named
        for name, known in names.vocabularies.items():
            vocabularies[f"{COLUMN}{name}"] = known.tolist()
    model = copied(model)
    finish_vectors(model)
    for _, node in list(nnx.iter_graph(model)):
        if isinstance(node, SparseOutput):
            node.fold()
    merged, state = split(model)
    weights, structure = jax.tree.flatten(state)
    has_values = getattr(model, "rank_by", None) is not None
    stated = of_ranking(features, model.num_items, k, values=has_values) | of_requests

    def queries(weights, inputs):
        model = merged(jax.tree.unflatten(structure, weights))
        return [model.queries(unflattened(features, inputs))]

    def top_k(weights, inputs):
        model = merged(jax.tree.unflatten(structure, weights))
        *given, exclude = inputs
        seen = CSR(None, *exclude, num_cols=model.num_items)
        return model.top_k(unflattened(features, given), k, exclude=seen)

    def stored(arrays):
        return [Stored(array, to_host_in_pieces(array)) for array in arrays]

    if ends:
        *given, _ = stated["inputs"]
        with without_mesh():
            like = jax.eval_shape(queries, weights, inputs_like(given, 1))
        dtype = like[0].dtype
        why = coarse_top_k.unsupported(model.output.kernel.shape, dtype)
        if int8 and why:
            raise ValueError(f"int8 {why}: leave it out")
        stated["layer"] = _stated_layer(model.output, dtype, weights, int8=int8)
        stated["new_items"] = stated_content
    return Portable(
        stated=stated,
        function=queries if ends else top_k,
        weights=stored(weights),
        beside=stored(kernels),
        vocabularies=vocabularies,
    )
