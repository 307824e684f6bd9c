"""A model and its optimizer from a network's description and data."""

from __future__ import annotations

import functools
from typing import Any, overload

import jax
import scipy.sparse
from flax import nnx

from sparsejax import optimizers
from sparsejax.data import ScannedDataset, SparseDataset
from sparsejax.data.scan_sequences import ScannedSequences
from sparsejax.data.sequences import SequenceDataset
from sparsejax.mesh.layout import mesh_is_set, put_on_mesh
from sparsejax.mesh.promotion import promoting
from sparsejax.nn.config import NetworkConfig
from sparsejax.nn.models import FeedForward
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.optimizers.rules import Rule
from sparsejax.sequence.build import build_sequence_model
from sparsejax.sequence.config import SequenceConfig
from sparsejax.sequence.model import SequenceModel
from sparsejax.sparse import CSR


@overload
def build(
    config: NetworkConfig,
    data: Any,
    rule: Rule | None = None,
    *,
    targets: Any = None,
    seed: int = 0,
) -> tuple[FeedForward, Optimizer]: ...


@overload
def build(
    config: SequenceConfig, data: Any, rule: Rule | None = None, *, seed: int = 0
) -> tuple[SequenceModel, Optimizer]: ...


def build(
    config: NetworkConfig | SequenceConfig,
    data: Any,
    rule: Rule | None = None,
    *,
    targets: Any = None,
    seed: int = 0,
) -> tuple[FeedForward | SequenceModel, Optimizer]:
    """A `FeedForward` or a `SequenceModel` that fits the data, and its optimizer.

    >>> model, optimizer = build(NetworkConfig.autoencoder((8,)), train)
    >>> model.num_features == train.num_features
    True

    It is short for::

        model = FeedForward(
            config, inputs=data.num_features, outputs=targets.num_features,
            rngs=nnx.Rngs(seed),
        )
        optimizer = Optimizer(model, rule, seed=seed)

    Under `jax.set_mesh(...)` the parameters lie on the mesh.

    Args:
      config: the layers and the loss; or that of a model of histories.
      data: `[rows, features]`: a `SparseDataset`, what `scan_parquet` gives, a `CSR` or a
        SciPy matrix; or histories, also of `scan_sequences`. Only its number of columns
        counts, unless the network has a linear part, which is computed from it.
      rule: how parameters move; `sparsejax.optimizers.adam(1e-3)` by default. That of
        `sparsejax.training.recipe` suits a training with a known end better.
      targets: `[rows, items]`, of the same types; `data` itself by default. A model of
        histories has none.
      seed: seed of the random initial parameters, of the noise in training, and of the
        rounding of parameters in bfloat16.

    Returns:
      The model and the optimizer.

    Raises:
      TypeError: `data` or `targets` has another type. (A click model is made by
        `sparsejax.build_click_model`.)
      ValueError: the network cannot be made. For example, a tied output has another
        number of items than features. A network is given histories, or a model of
        histories is given targets.
      NotImplementedError: the data of a linear part is scanned.
    """
    of_histories = isinstance(config, SequenceConfig)
    if of_histories and targets is not None:
        raise ValueError(
            "the targets of histories are their own items; leave out targets"
        )
    if not of_histories and isinstance(data, SequenceDataset | ScannedSequences):
        raise ValueError(
            "a network does not read histories: pass data.to_sparse(), or the "
            "configuration of a model of histories, such as SASRecConfig()"
        )
    features = _num_columns("data", data)
    modules = new_modules(
        config,
        optimizers.adam(1e-3) if rule is None else rule,
        inputs=features,
        outputs=features if targets is None else _num_columns("targets", targets),
        seed=seed,
    )
    set_linear_part(modules[0], data)
    return modules


def set_linear_part(model: FeedForward | SequenceModel, data: Any) -> None:
    """Computes the linear part of a model from the data, if it has one.

    Raises:
      NotImplementedError: the data is scanned, so that it is not in memory.
    """
    linear = model.output.linear if isinstance(model, FeedForward) else None
    if linear is None:
        return
    if isinstance(data, ScannedDataset):
        raise NotImplementedError(
            "the linear part of a network is computed from data in memory, and this is "
            "scanned; leave linear out of the network"
        )
    linear.set_from(data if scipy.sparse.issparse(data) else data.to_scipy())


@promoting
def new_modules(
    config: NetworkConfig | SequenceConfig,
    rule: Rule,
    *,
    inputs: int,
    outputs: int,
    seed: int,
) -> tuple[FeedForward | SequenceModel, Optimizer]:
    """A new model and its optimizer, on the mesh if one is set. See `build`."""
    sizes = {"inputs": inputs, "outputs": outputs, "seed": seed}
    make = functools.partial(make_modules, config, rule, **sizes)
    if not mesh_is_set():
        modules = nnx.jit(make)()  # one program in place of a dozen small ones
        jax.block_until_ready(nnx.state(modules))  # if memory is short, it fails here
        return modules
    modules = make()
    nnx.update(modules, put_on_mesh(nnx.state(modules)))
    return modules


def make_modules(
    config: NetworkConfig | SequenceConfig,
    rule: Rule,
    *,
    inputs: int,
    outputs: int,
    seed: int,
) -> tuple[FeedForward | SequenceModel, Optimizer]:
    """`new_modules`, for `nnx.eval_shape`: on a mesh not every array is placed."""
    rngs = nnx.Rngs(seed)
    if isinstance(config, SequenceConfig):
        model = build_sequence_model(config, items=inputs, rngs=rngs)
    else:
        model = FeedForward(config, inputs=inputs, outputs=outputs, rngs=rngs)
    return model, Optimizer(model, rule, seed=seed)


def _num_columns(what: str, source: Any) -> int:
    match source:
        case SparseDataset() | ScannedDataset():
            return source.num_features
        case SequenceDataset() | ScannedSequences():
            return source.num_features
        case CSR():
            return source.num_cols
        case _ if scipy.sparse.issparse(source):
            return source.shape[1]
    raise TypeError(
        f"{what} must be a SparseDataset, a ScannedDataset, a CSR or a SciPy matrix, got "
        f"{type(source).__name__}"
    )
