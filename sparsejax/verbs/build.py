"""Builds a model and its optimizer from a configuration and data."""

from __future__ import annotations

import functools
from typing import Any, overload

import jax
import scipy.sparse
from flax import nnx

from sparsejax.codec import ModelConfig
from sparsejax.data import ItemFeatures
from sparsejax.kinds.content import fitting, set_content, sizes_of
from sparsejax.kinds.kind import Maker, kind_of
from sparsejax.mesh.layout import mesh_is_set, put_on_mesh
from sparsejax.mesh.promotion import promoting
from sparsejax.nn.config import NetworkConfig
from sparsejax.nn.models import FeedForward
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.optimizers.rules import Rule
from sparsejax.sequence.config import SequenceConfig
from sparsejax.sequence.model import SequenceModel


@overload
def build(
    config: NetworkConfig,
    data: Any,
    rule: Rule | None = None,
    *,
    targets: Any = None,
    item_features: ItemFeatures | None = None,
    seed: int = 0,
) -> tuple[FeedForward, Optimizer]: ...


@overload
def build(
    config: SequenceConfig,
    data: Any,
    rule: Rule | None = None,
    *,
    item_features: ItemFeatures | None = None,
    seed: int = 0,
) -> tuple[SequenceModel, Optimizer]: ...


@overload
def build(
    config: ModelConfig,
    data: Any,
    rule: Rule | None = None,
    *,
    item_features: ItemFeatures | None = None,
    seed: int = 0,
) -> tuple[Any, Optimizer]: ...


def build(
    config: NetworkConfig | ModelConfig,
    data: Any,
    rule: Rule | None = None,
    *,
    targets: Any = None,
    item_features: ItemFeatures | None = None,
    seed: int = 0,
) -> tuple[Any, Optimizer]:
    """Builds a model that fits the data, and its optimizer.

    >>> model, optimizer = build(NetworkConfig.autoencoder((8,)), train)
    >>> model.num_features == train.num_features
    True

    It is short for::

        model = FeedForward(
            config, inputs=data.num_features, outputs=targets.num_features,
            rngs=nnx.Rngs(seed),
        )
        optimizer = Optimizer(model, rule, seed=seed)

    Under `jax.set_mesh(...)` the parameters are placed on the mesh.

    Args:
      config: configuration of a network, or of a model of histories or clicks.
      data: `[rows, features]`: a `SparseDataset`, a result of `scan_parquet`, a `CSR` or a SciPy
          matrix; or histories, also scanned by `scan_sequences`; or clicks, also scanned by
          `scan_clicks`. Only its number of columns, or the number of ids of each feature, is used,
          unless the network has a linear part, which is computed from the data.
      rule: rule of the optimizer; by default `sparsejax.optimizers.adam(1e-3)`, for clicks
          `adamw(2e-3)` with a weight decay that depends on the number of examples. If the number
          of steps is known, the rule of `sparsejax.training.recipe` is better.
      targets: `[rows, items]`, of the types of `data`; by default `data` itself. Models of
          histories and clicks have no targets.
      item_features: content of the items, as `read_item_features` reads it, matched by item name.
          The vector of an item is then the sum of its own and of its content's vector, and an item
          without entries has only its content's vector: see `sparsejax.nn.ItemContent`.
      seed: seed of the random initial parameters, of the noise in training, and of the
        rounding of parameters in bfloat16.

    Returns:
      The model and the optimizer.

    Raises:
      TypeError: `data` or `targets` has an unsupported type. (For a click model with a custom
          placement of tables, use `sparsejax.clicks.build_click_model`.)
      ValueError: the configuration is invalid for the data. For example, the output is tied and
          the numbers of items and features differ; a network is given histories; a model of
          histories or clicks is given targets; or no item has content.
      NotImplementedError: the data of a linear part is scanned.
    """
    kind, options = kind_of(config), {}
    if item_features is not None and not kind.ranks_items:
        raise ValueError(
            f"item_features is of no use for a model of {kind.name}: leave it out"
        )
    if rule is None:
        rule = kind.defaults_of(config).constant_rule(data)
    if item_features is not None:
        item_features = fitting(item_features, data if targets is None else targets)
        options = {"content": sizes_of(item_features)}
    modules = new_modules(kind.maker(config, data, targets, **options), rule, seed=seed)
    set_linear_part(modules[0], data)
    kind.prepare(modules[0], data)
    if item_features is not None:
        set_content(modules[0], item_features, new=True)
    return modules


def set_linear_part(model: nnx.Module, data: Any) -> None:
    """Computes the linear part of a model from the data, if it has one.

    Raises:
      NotImplementedError: the data is scanned, so that it is not in memory.
    """
    linear = getattr(getattr(model, "output", None), "linear", None)
    if linear is not None:
        linear.set_from(matrix_of(data))


def matrix_of(data: Any) -> Any:
    """Converts data to the SciPy matrix from which a linear part is computed.

    Raises:
      NotImplementedError: the data is scanned, so that it is not in memory.
    """
    if not scipy.sparse.issparse(data) and not hasattr(data, "to_scipy"):
        raise NotImplementedError(
            "the linear part of a network is computed from data in memory, and this is "
            "scanned; leave linear out of the network"
        )
    return data if scipy.sparse.issparse(data) else data.to_scipy()


@promoting()
def new_modules(maker: Maker, rule: Rule, *, seed: int) -> tuple[Any, Optimizer]:
    """A new model and its optimizer, on the mesh if one is set. See `build`."""
    make = functools.partial(maker, rule=rule, seed=seed)
    if not mesh_is_set():
        modules = nnx.jit(make)()  # one program instead of a dozen small ones
        # This wait raises the error if there is too little memory.
        jax.block_until_ready(nnx.state(modules))
        return modules
    modules = make()
    nnx.update(modules, put_on_mesh(nnx.state(modules)))
    return modules
