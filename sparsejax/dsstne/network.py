"""A network of DSSTNE as a Flax module that `fit` and `recommend` take."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from sparsejax import losses
from sparsejax.data.batching import (
    Batch,
    Batches,
    Shown,
    for_batches,
    rows_in_a_batch,
    taken,
)
from sparsejax.data.files import Path
from sparsejax.data.sources import (
    Features,
    Inputs,
    Source,
    Sources,
    check_columns,
    check_inputs,
)
from sparsejax.dsstne.definition import (
    Connection,
    Definition,
    LayerDefinition,
    LocalResponseNormalization,
    weight_shape,
    weights_of,
)
from sparsejax.dsstne.losses import activate, of_output, of_units
from sparsejax.dsstne.network_files import (
    Normalization,
    Parameters,
    load_parameters,
    save_parameters,
)
from sparsejax.mesh.blocks import SparseRows
from sparsejax.mesh.layout import (
    call_with_auto_axes,
    hidden_layout,
    jit_sharded,
    replicated,
    to_host,
    using_auto_axes,
)
from sparsejax.nn.layers import SparseDropout, SparseLinear, SparseOutput
from sparsejax.ops.gather_matmul import combined
from sparsejax.optimizers.gradients import lookup
from sparsejax.prediction.recommender import merged, split

_NORMALIZATION_EPS = 1e-5
# How much of the running mean and variance a batch replaces.
_NORMALIZATION_RATE = 0.1
_NORM_EPS = 1e-8

# How an array with a row for each example is divided over a mesh.
_BATCH = P("data")

# The layers that weights lead from and to, by name.
Pair = tuple[str, str]


class _Held(NamedTuple):
    """What the layers of a network hold for a batch.

    Attributes:
      units: by the name of a layer: an array, or sparse rows. An output may be too large
        to be here, see `_Layer.whole`.
      scores: of the outputs that are in `units`, what they hold before the activation.
      kernels: arrays that several connections share, by the pair of their owner.
    """

    units: dict[str, Any]
    scores: dict[str, jax.Array]
    kernels: dict[Pair, jax.Array]


class Locked(nnx.Variable):
    """Weights or a bias that training leaves as they are."""


class Network(nnx.Module):
    """A network of DSSTNE.

    ::

        z = sum over sources (x W + b) + sum of skips,    a = dropout(f(normalize(z)))

    >>> from sparsejax.dsstne.definition import parse
    >>> text = '{"Layers": [{"N": 5, "Sparse": true}, {"N": 2}, {"N": 5}]}'
    >>> network = Network(Definition.from_json(parse(text)), rngs=nnx.Rngs(0))
    >>> x = CSR.from_scipy(scipy.sparse.csr_array([[0, 1, 0, 2, 0], [0, 0, 0, 0, 0.0]]))
    >>> network(x, deterministic=True).shape
    (2, 5)

    Inputs are known by the names of their data sets, or of their layers if they have none.
    A single sparse input is given without its name. So are targets: several outputs have
    labels by name, and their losses are added. The items of the output called "Output" are
    ranked, else those of the first. Scores are those before the activation; `top_k` gives
    those after it. A network without outputs only has `units`.

    Weights that only sparse inputs and outputs share are one kernel, of which a sparse
    input reads the rows it names. The gradient of shared weights is the mean of those of
    all who share them. On a mesh, large kernels lie as those of `SparseLinear` and
    `SparseOutput` do, and others as `hidden_layout` says.

    Args:
      definition: the layers. `sparse` of an input says which kind of data it takes.
      parameters: the numbers to start with; by default they are drawn.
      row_sparse: whether a training step writes only those rows of an input's weights that
        the batch touches; see `DsstneRule.row_sparse`. With a weight norm it writes all.
      dense_targets: whether the data sets of the targets are dense.
      weighted: whether examples have weights. With SoftMax labels are then 1, not 1 / n.
      ignore_zeros: see `of_output`.
      brake_steps: after so many steps DSSTNE's brake starts anew; see `Brake`. 0 is none.
      rngs: random streams: "params" for the parameters, "dropout" for noise.

    Raises:
      NotImplementedError: dropout after SoftMax in an output, or what `of_output` refuses.
      ValueError: two inputs have the same name, or `parameters` do not fit.
    """

    def __init__(
        self,
        definition: Definition,
        *,
        parameters: Parameters | None = None,
        row_sparse: bool = True,
        dense_targets: bool = False,
        weighted: bool = False,
        ignore_zeros: bool = False,
        brake_steps: int = 0,
        rngs: nnx.Rngs,
    ):
        self.definition, self.weighted = definition, weighted
        _check_supported(definition)
        outputs = definition.of_kind("Output")
        ranked = [layer for layer in outputs if layer.name == "Output"]
        self.output_layer = next(iter([*ranked, *outputs]), None)
        self.corruption = SparseDropout(definition.denoising, rngs=rngs)
        sharing = _Sharing.of(definition, row_sparse=row_sparse, rngs=rngs)
        modules: list[_Layer] = []
        for layer in definition.in_order:
            divided = {module.layer.name for module in modules if module.is_divided}
            module = _Layer(
                definition,
                layer,
                sharing,
                row_sparse=row_sparse,
                divided=divided,
                rngs=rngs,
            )
            if layer.kind == "Output":
                module.set_rule(
                    of_output(
                        definition,
                        layer,
                        sparse=not dense_targets,
                        ignore_zeros=ignore_zeros,
                    )
                )
            modules.append(module)
        self.layers = nnx.List(modules)
        self.brake = nnx.data(Brake(brake_steps) if brake_steps else None)
        if parameters is not None:
            check_parameters(definition, parameters)
            self._set(parameters)

    @property
    def num_features(self) -> Features:
        """The number of input features, or a dict for several inputs; see `Recommender`."""
        inputs = self.definition.of_kind("Input")
        if len(inputs) == 1 and inputs[0].sparse:
            return inputs[0].units
        return {
            name_of(layer): layer.units if layer.sparse else _row_shape(layer)
            for layer in inputs
        }

    @property
    def num_items(self) -> int:
        """Number of items that are scored."""
        output = self._output.output
        return self._output.ranked if output is None else output.num_items

    @property
    def loss_rule(self) -> losses.LossRule | None:
        """The loss of the output whose items are ranked."""
        return None if self.output_layer is None else self._output.rule

    def rank_first(self, items: int) -> None:
        """From now on `top_k` ranks only the first items: the others are padding.

        The network cannot be trained any more.
        """
        if not 1 <= items <= self.num_items:
            raise ValueError(f"{items=} must be from 1 to {self.num_items:,}")
        if self._output.output is None:
            self._output.ranked = items
        else:
            self._output.output.num_items = items

    def units(
        self, inputs: Sources, layer: str, *, batch_size: int = 512
    ) -> np.ndarray:
        """What a layer holds for each row of `inputs`, without noise: `[rows, units]`.

        Args:
          inputs: `[rows, features]`; or several by name, see `fit`.
          layer: its name.
          batch_size: rows at a time.

        Raises:
          KeyError: there is no such layer.
          ValueError: `inputs` does not fit the network.
        """
        self.definition.layer(layer)
        x = Inputs.of(inputs)
        check_inputs(x, self.num_features)
        with using_auto_axes():
            graphdef, state = split(self, None)
            size = rows_in_a_batch(batch_size, x.num_rows)
            batches = x.batches(x.for_batches(), np.arange(x.num_rows), size)
            parts = [np.asarray(_units(graphdef, state, b, layer)) for b in batches]
        return np.concatenate(parts)[: x.num_rows]

    def mean_loss(
        self,
        inputs: Sources,
        targets: Source | Mapping[str, Source],
        *,
        weights: np.ndarray | None = None,
        batch_size: int = 512,
    ) -> float:
        """The mean of `weights_b loss_b` over all rows, without noise.

        Args:
          inputs: as for `fit`.
          targets: as for `fit`.
          weights: `[rows]`; 1 by default.
          batch_size: rows at a time.

        Raises:
          ValueError: they do not fit the network or each other.
        """
        x = Inputs.of(inputs)
        check_inputs(x, self.num_features)
        labels = {
            name_of(module.layer): x.named("targets", source)
            for module, source in self._targets(targets)
        }
        for module, _ in self._targets(targets):
            given = labels[name_of(module.layer)]
            columns = given.matrix.num_cols
            check_columns("targets", columns, module.layer.units, "items")
            if given.num_rows != x.num_rows:
                raise ValueError(
                    f"inputs has {x.num_rows:,} rows, but targets has {given.num_rows:,}"
                )
        total, rows = 0.0, np.arange(x.num_rows)
        with using_auto_axes():
            graphdef, state = split(self, None)
            size = rows_in_a_batch(batch_size, x.num_rows)
            shown = x.batches(x.for_batches(), rows, size)
            wanted = {
                name: Batches.of(for_batches(given.matrix), rows, size)
                for name, given in labels.items()
            }
            whole = np.zeros(-(-x.num_rows // size) * size, np.float32)
            whole[: x.num_rows] = 1 if weights is None else weights
            steps = zip(
                shown,
                zip(*wanted.values(), strict=True),
                whole.reshape(-1, size),
                strict=True,
            )
            for batch, given, shares in steps:
                named = dict(zip(wanted, given, strict=True))
                total += float(_loss(graphdef, state, batch, named, shares))
        return total / x.num_rows

    def values(
        self, x: Any, layer: str, *, deterministic: bool | None = None
    ) -> Float[Array, "batch units"]:
        """What a layer holds for each example of a batch; see `units` for all rows."""
        held = self._run(x, None, deterministic)
        if layer in held.units:
            return _dense(held.units[layer])
        [module] = [found for found in self.layers if found.layer.name == layer]
        return module.activated(module.scores(held))

    def __call__(
        self, x: Any, *, deterministic: bool | None = None
    ) -> Float[Array, "batch items"]:
        """All scores, before the activation."""
        return self._output.scores(self._run(x, None, deterministic))

    def loss(
        self,
        x: Any,
        labels: SparseRows | Mapping[str, SparseRows],
        *,
        weights: Float[Array, "batch"] | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, ""]:
        """`sum_b weights_b loss_b`; weights are 1 by default.

        The sparseness penalty has gradients, but is not part of the value.
        """
        targets = self._targets(labels)
        if weights is None:
            weights = jnp.ones(targets[0][1].num_rows, jnp.float32)
        held = self._run(x, weights, deterministic)
        loss = jnp.zeros((), jnp.float32)
        for module, given in targets:
            activation = module.layer.activation
            plain = given.data is None and not self.weighted
            if plain and activation is not None and activation.name == "SoftMax":
                given = combined(given, "mean")
            loss += module.loss(held, given, weights)
        penalty = self._penalty(held, weights)
        if deterministic or self.brake is None:
            return loss + (penalty - lax.stop_gradient(penalty))
        exists = weights > 0
        mean = loss / jnp.maximum(jnp.sum(weights), 1e-30)
        total = loss + penalty
        share = self.brake(lax.stop_gradient(mean * jnp.sum(exists)))
        return lax.stop_gradient(loss) + share * (total - lax.stop_gradient(total))

    def top_k(
        self, x: Any, k: int, *, exclude: SparseRows | None = None
    ) -> tuple[Int[Array, "batch k"], Float[Array, "batch k"]]:
        """Ids and activations of the `k` best items of each row, without noise."""
        return self._output.top_k(self._run(x, None, True), k, exclude)

    def project(self) -> None:
        """Divides the weights that lead to a unit where their L2 norm is too large.

        `fit` calls it after each step.
        """
        for layer in self.layers:
            for _, source, module in layer.connected():
                if source.weight_norm and source.shared is None and not source.locked:
                    _shorten(module, source.weight_norm)

    def parameters(self) -> Parameters:
        """All numbers, as a network file has them, on the host."""
        weights, biases, normalizations = {}, {}, {}
        for layer in self.layers:
            for pair, source, module in layer.connected():
                bias = to_host(module.bias[...])
                biases[pair] = bias[: _num_biases(layer.layer)]
                if source.shared is None:
                    weights[pair] = _stored(module)
            if layer.normalization is not None:
                normalizations[layer.layer.name] = layer.normalization.numbers()
        return Parameters(weights, biases, normalizations)

    @property
    def _output(self) -> _Layer:
        if self.output_layer is None:
            raise ValueError(
                "the network has no layer of kind Output: it cannot be trained and ranks "
                "nothing; `units` gives what a layer holds"
            )
        found = [layer for layer in self.layers if layer.layer == self.output_layer]
        return found[0]

    def _targets(self, targets: Any) -> list[tuple[_Layer, Any]]:
        """The outputs, with what `targets` has for each.

        Raises:
          ValueError: there are no outputs, or `targets` is not what they need.
        """
        first = self._output
        modules = [module for module in self.layers if module.layer.kind == "Output"]
        names = sorted({name_of(module.layer) for module in modules})
        if len(modules) == 1 and not isinstance(targets, Mapping):
            return [(first, targets)]
        if not isinstance(targets, Mapping) or sorted(targets) != names:
            given = sorted(targets) if isinstance(targets, Mapping) else "one target"
            raise ValueError(
                f"the outputs have the targets {', '.join(names)}: give {{name: source}} "
                f"with these names; got {given}"
            )
        return [(module, targets[name_of(module.layer)]) for module in modules]

    def _set(self, parameters: Parameters) -> None:
        for layer in self.layers:
            for pair, source, module in layer.connected():
                _set(module.bias, parameters.biases[pair])
                if source.shared is None:
                    weights = parameters.weights[pair]
                    is_output = isinstance(module, SparseOutput)
                    _set(module.kernel, weights.T if is_output else weights)
            if layer.normalization is not None:
                layer.normalization.set(parameters.normalizations[layer.layer.name])

    def _run(
        self, x: Any, weights: jax.Array | None, deterministic: bool | None
    ) -> _Held:
        """What the layers hold; without outputs that may be large."""
        inputs = self.definition.of_kind("Input")
        if len(inputs) == 1 and inputs[0].sparse:
            x = {name_of(inputs[0]): x}
        held = _Held({}, {}, {})
        for module in self.layers:
            held.kernels.update(module.shared_kernels())
        for module in self.layers:
            layer = module.layer
            if layer.kind == "Input":
                value = x[name_of(layer)]
                if not layer.sparse:
                    value = value.reshape(value.shape[0], -1)
                    value = module.noise(value, deterministic)
                elif layer.denoising:
                    value = self.corruption(value, deterministic=deterministic)
                held.units[layer.name] = value
            elif layer.kind == "Hidden" or module.whole:
                scores, units = module(held, weights, deterministic=deterministic)
                held.units[layer.name] = units
                if layer.kind == "Output":
                    held.scores[layer.name] = scores
        return held

    def _penalty(self, held: _Held, weights: jax.Array) -> jax.Array:
        """The sparseness penalties, times the sum of the weights."""
        exists = weights > 0
        count = jnp.maximum(jnp.sum(exists), 1)
        total = jnp.zeros((), jnp.float32)
        for layer in self.definition.layers:
            penalty = self.definition.penalty_of(layer)
            if penalty is None:
                continue
            used = jnp.where(exists[:, None], held.units[layer.name], 0)
            mean = jnp.clip(jnp.sum(used, axis=0) / count, 1e-6, 1 - 1e-6)
            p = penalty.p
            divergence = -p * jnp.log(mean) - (1 - p) * jnp.log1p(-mean)
            total += penalty.beta * jnp.sum(divergence)
        return total * jnp.sum(weights)


@functools.partial(jax.jit, static_argnames=("graphdef", "layer"))
def _units(graphdef, state, shown: Shown, layer: str):
    with merged(graphdef, state) as network:
        found = network.values(taken(shown), layer, deterministic=True)
        return replicated(found)


@functools.partial(jax.jit, static_argnames=("graphdef",))
def _loss(
    graphdef, state, shown: Shown, labels: Mapping[str, Batch], weights: jax.Array
):
    with merged(graphdef, state) as network:
        x, given = taken(shown), {name: batch.take() for name, batch in labels.items()}
        found = network.loss(x, given, weights=weights, deterministic=True)
        return replicated(found)


def load_network(path: Path) -> Network:
    """A trained network, from a NetCDF file of DSSTNE.

    >>> network = dsstne.load_network("gl.nc")
    >>> data = dsstne.read_datasets("gl_input.nc", features="features")["gl_input"]
    >>> found = recommend(network, data, k=10)

    Raises:
      DataError: the file is missing, damaged or wrong.
      NotImplementedError: see `Network`.
    """
    definition, parameters = load_parameters(path)
    return Network(definition, parameters=parameters, rngs=nnx.Rngs(0))


def save_network(path: Path, network: Network) -> None:
    """Writes a network as a NetCDF file, whole or not at all, that DSSTNE can load.

    Rows must be up to date, as they are after `fit`.

    Raises:
      OSError: the file cannot be written; nothing is left behind.
    """
    save_parameters(path, network.definition, network.parameters())


def name_of(layer: LayerDefinition) -> str:
    """By what name an input is given."""
    return layer.dataset or layer.name


def regularization(network: Network, *, l2: float, l1: float) -> float:
    """`l2 / 2 sum w^2 + l1 sum |w|` over all weights; biases are none.

    Rows must be up to date; see `Optimizer.flush`.
    """
    kernels = [
        variable[...]
        for _, variable in nnx.to_flat_state(nnx.state(network, nnx.Param))
        if variable[...].ndim >= 2
    ]
    squares = sum(float(jnp.sum(jnp.square(kernel))) for kernel in kernels)
    sizes = sum(float(jnp.sum(jnp.abs(kernel))) for kernel in kernels)
    return l2 / 2 * squares + l1 * sizes


def check_parameters(definition: Definition, parameters: Parameters) -> None:
    """Raises ValueError unless a network has the parameters."""
    wanted = weights_of(definition)
    for layer in definition.layers:
        for source in layer.sources if layer.has_weights else ():
            pair, shape = (source.layer, layer.name), (_num_biases(layer),)
            for what, arrays, expected in (
                ("weights", parameters.weights, wanted.get(pair)),
                ("bias", parameters.biases, shape),
            ):
                found = None if pair not in arrays else np.shape(arrays[pair])
                if expected is not None and found != expected:
                    raise ValueError(
                        f"the {what} from {pair[0]!r} to {pair[1]!r} must have the shape "
                        f"{expected}, got {found or 'none'}"
                    )
        normalized = layer.batch_normalization and layer.has_weights
        if normalized and layer.name not in parameters.normalizations:
            raise ValueError(
                f"layer {layer.name!r}: the numbers of its batch normalization are missing"
            )


def _check_supported(definition: Definition) -> None:
    names = [name_of(layer) for layer in definition.of_kind("Input")]
    if len(set(names)) < len(names):
        raise ValueError(f"two inputs read the same data set: {', '.join(names)}")
    for layer in definition.of_kind("Output"):
        activation = layer.activation
        if layer.dropout and activation is not None and activation.name == "SoftMax":
            raise NotImplementedError(
                f"layer {layer.name!r}: pDropout after SoftMax is not supported: what is "
                "dropped has the probability 0, so its loss is not finite; leave it out"
            )


class Brake(nnx.Module):
    """DSSTNE's brake, which scales the gradients of steps with a large error.

    With E the sum of a batch's losses and m = 0.9 m + 0.1 E, from 0: from step 101 on, a
    step with E > 2 m has no gradient, and those of the 24 steps behind it are divided by
    10. Velocities and penalties of weights are not braked.

    Args:
      steps: after so many steps it starts anew.
    """

    def __init__(self, steps: int):
        self.steps = steps
        self.count = BrakeState(jnp.zeros((), jnp.int32))
        self.mean = BrakeState(jnp.zeros((), jnp.float32))
        self.left = BrakeState(jnp.zeros((), jnp.int32))

    def __call__(self, error: Float[Array, ""]) -> Float[Array, ""]:
        """The share of the gradient that counts in this step."""
        step = self.count[...] % self.steps
        mean = 0.9 * jnp.where(step == 0, 0, self.mean[...]) + 0.1 * error
        left = jnp.where(step == 0, 0, self.left[...])
        bad = (step >= 100) & (error > 2 * mean)
        share = jnp.where(bad, 0, jnp.where(left > 0, 0.1, 1)).astype(jnp.float32)
        left = jnp.where(bad, 25, left)
        self.count[...] = self.count[...] + 1
        self.mean[...] = mean
        self.left[...] = jnp.maximum(left - 1, 0)
        return share


class BrakeState(nnx.Variable):
    """What the brake remembers."""


class _Dense(nnx.Module):
    """Weights from one layer to another: `x W + b`, or a convolution.

    Attributes:
      by_outputs: whether the units of the layer are divided over the mesh.
    """

    def __init__(
        self,
        source: LayerDefinition,
        layer: LayerDefinition,
        *,
        by_inputs: bool,
        rngs: nnx.Rngs,
    ):
        layout = None
        if layer.type == "FullyConnected":
            layout = hidden_layout(source.units, layer.units, by_inputs=by_inputs)
        self.by_outputs = layout is not None and not by_inputs
        shape, init = weight_shape(source, layer), _initializer(layer, source.units)
        key = rngs.params()

        def made(make: Callable[[], jax.Array], spec: P | None) -> nnx.Param:
            placed: dict[str, Any] = {} if spec is None else {"out_sharding": spec}
            return nnx.Param(jit_sharded(make, spec, static=())(), **placed)

        kernel_spec, bias_spec = (None, None) if layout is None else layout
        self.kernel = made(lambda: init(key, shape, jnp.float32), kernel_spec)
        self.bias = made(lambda: _bias(layer), bias_spec)


class _Bias(nnx.Module):
    """A bias beside the weights of another connection."""

    def __init__(self, layer: LayerDefinition):
        self.bias = nnx.Param(_bias(layer))


@dataclasses.dataclass(frozen=True)
class _Sharing:
    """Weights that several connections share.

    Attributes:
      counts: how many connections use the weights of a pair.
      kernels: those whose rows belong to the features of sparse inputs and to the items of
        outputs, by the pair of their owner. They are `[rows, hidden]`.
      locked: in place of those of them that training leaves as they are.
    """

    counts: Mapping[Pair, int]
    kernels: Mapping[Pair, nnx.Param]
    locked: Mapping[Pair, Locked]

    @classmethod
    def of(
        cls, definition: Definition, *, row_sparse: bool, rngs: nnx.Rngs
    ) -> _Sharing:
        groups: dict[Pair, list[tuple[LayerDefinition, Connection]]] = {}
        for layer in definition.layers:
            for source in layer.sources if layer.has_weights else ():
                group = groups.setdefault(_owner_of(layer, source), [])
                group.append((layer, source))
        kernels = {
            pair: _shared_kernel(definition, pair, row_sparse=row_sparse, rngs=rngs)
            for pair, group in groups.items()
            if len(group) > 1 and _shares_rows(definition, pair, group)
        }
        locked = {
            pair: _locked(kernels[pair])
            for pair, group in groups.items()
            for _, source in group
            if pair in kernels and source.shared is None and source.locked
        }
        counts = {pair: len(group) for pair, group in groups.items()}
        return cls(counts, kernels, locked)


def _owner_of(layer: LayerDefinition, source: Connection) -> Pair:
    if source.shared is None:
        return source.layer, layer.name
    return source.shared.source_input, source.shared.source_output


def _is_read(definition: Definition, name: str) -> bool:
    """Whether a layer reads the layer of this name."""
    return any(
        name in (*(source.layer for source in layer.sources), *layer.skips)
        for layer in definition.layers
    )


def _is_whole(definition: Definition, layer: LayerDefinition) -> bool:
    """Whether an output is computed with the hidden layers, `[batch, units]`."""
    weighted = layer.has_weights and (layer.dropout > 0 or layer.batch_normalization)
    return weighted or _is_read(definition, layer.name)


def _rows_are(
    definition: Definition, layer: LayerDefinition, source: Connection
) -> Literal["features", "items"] | None:
    """What has a row each in a kernel of `SparseLinear` or `SparseOutput`.

    None is neither of them.
    """
    if layer.type != "FullyConnected":
        return None
    before = definition.layer(source.layer)
    if before.kind == "Input" and before.sparse:
        return "features"
    alone = len(layer.sources) == 1 and not layer.skips
    if layer.kind == "Output" and alone and not _is_whole(definition, layer):
        return "items"
    return None


def _shares_rows(
    definition: Definition,
    pair: Pair,
    group: list[tuple[LayerDefinition, Connection]],
) -> bool:
    """Whether all who share the weights of a pair can read one kernel by its rows."""
    kinds = {
        (source.layer, layer.name): _rows_are(definition, layer, source)
        for layer, source in group
    }
    return all(
        kind is not None
        and (
            source.shared is None
            or source.shared.transposed == (kind != kinds.get(pair))
        )
        for (layer, source), kind in zip(group, kinds.values(), strict=True)
    )


def _shared_kernel(
    definition: Definition, pair: Pair, *, row_sparse: bool, rngs: nnx.Rngs
) -> nnx.Param:
    before, layer = map(definition.layer, pair)
    [owner] = [source for source in layer.sources if source.layer == before.name]
    of_features = _rows_are(definition, layer, owner) == "features"
    rows, width = layer.units, before.units
    if of_features:
        rows, width = width, rows
    init: dict[str, Any] = {
        "use_bias": False,
        "kernel_init": _initializer(layer, before.units),
        "rngs": rngs,
    }
    members = [
        _rows_are(definition, other, source)
        for other in definition.layers
        for source in other.sources
        if _owner_of(other, source) == pair
    ]
    if "items" in members:
        return SparseOutput(width, rows, **init).kernel
    kernel = SparseLinear(rows, width, **init).kernel
    return kernel if row_sparse and not owner.weight_norm else _whole(kernel)


def _whole(kernel: nnx.Param) -> nnx.Param:
    """A kernel that each step writes as a whole."""
    return nnx.Param(kernel[...], **_placed(kernel))


class _Layer(nnx.Module):
    """A layer with the connections that lead to it.

    Attributes:
      layer: its definition.
      rule: of an output, its loss.
      whole: of an output, whether it is computed with the hidden layers.
      ranked: of an output without a `SparseOutput`, how many of its items are ranked.
      counts: for each connection, how many share its weights.
    """

    def __init__(
        self,
        definition: Definition,
        layer: LayerDefinition,
        sharing: _Sharing,
        *,
        row_sparse: bool,
        divided: set[str],
        rngs: nnx.Rngs,
    ):
        self.layer, self.lrn, self.ranked = layer, definition.lrn, layer.units
        self.rule: losses.LossRule | None = None
        self.whole = layer.kind == "Output" and _is_whole(definition, layer)
        self.noise = _Dropout(layer, rngs=rngs)
        sources = layer.sources if layer.has_weights else ()
        self.source_layers = tuple(
            definition.layer(source.layer) for source in layer.sources
        )
        self.counts = tuple(
            sharing.counts[_owner_of(layer, source)] for source in sources
        )
        self.connections = nnx.List(
            [
                _connection(
                    definition,
                    layer,
                    source,
                    sharing,
                    row_sparse=row_sparse,
                    by_inputs=source.layer in divided,
                    rngs=rngs,
                )
                for source in sources
            ]
        )
        self.normalization = nnx.data(None)
        if layer.batch_normalization and layer.has_weights:
            self.normalization = _Normalization(layer)

    @property
    def is_divided(self) -> bool:
        """Whether its units are divided over the mesh."""
        return len(self.connections) > 0 and all(
            isinstance(module, _Dense) and module.by_outputs
            for module in self.connections
        )

    @property
    def output(self) -> SparseOutput | None:
        """The layer over all items, if that is what this layer is."""
        for module in self.connections:
            if isinstance(module, SparseOutput):
                return module
        return None

    def set_rule(self, rule: losses.LossRule) -> None:
        self.rule = of_units(rule) if self._loss_is_of_units else rule

    @property
    def _loss_is_of_units(self) -> bool:
        # A sigmoid's dropped unit is 0.5, which a score can say; others may not have it.
        activation = self.layer.activation
        return (
            self.layer.dropout > 0
            and activation is not None
            and activation.name != "Sigmoid"
        )

    def connected(self) -> Iterator[tuple[Pair, Connection, Any]]:
        """For each connection its pair, its definition and its module with weights."""
        for source, module in zip(self.layer.sources, self.connections, strict=False):
            yield (source.layer, self.layer.name), source, module

    def shared_kernels(self) -> dict[Pair, jax.Array]:
        """The arrays that other connections multiply with, by their pairs."""
        return {
            pair: _slower(module.kernel[...], 1 / count)
            for (pair, _, module), count in zip(
                self.connected(), self.counts, strict=True
            )
            if isinstance(module, _Dense) and count > 1
        }

    def __call__(
        self,
        held: _Held,
        weights: jax.Array | None,
        *,
        deterministic: bool | None,
    ) -> tuple[jax.Array, jax.Array]:
        """What it holds before its activation, and what it holds."""
        layer = self.layer
        if layer.type == "Pooling":
            units = self._pooled(held)
            return units, units
        z = self.sums(held)
        if self.normalization is not None:
            z = self.normalization(z, weights, deterministic)
        if layer.delta_norm and layer.kind == "Hidden":
            share = 1.0
            if weights is not None:
                count = jnp.maximum(jnp.sum(weights > 0), 1)
                share = jnp.sum(weights) / count
            z = _with_short_slopes(z, layer.delta_norm * share)
        assert layer.activation is not None
        if layer.kind == "Output" and not self._loss_is_of_units:
            dropped = self.noise.drawn(z, deterministic)
            z = z if dropped is None else jnp.where(dropped, 0, z)
            return z, self.activated(z)
        return z, self.noise(self.activated(z), deterministic)

    def sums(self, held: _Held) -> jax.Array:
        """`[batch, units]`, before the activation."""
        layer, total = self.layer, jnp.zeros((), jnp.float32)
        for at, (_, source, module) in enumerate(self.connected()):
            before, x = self.source_layers[at], held.units[source.layer]
            bias = module.bias[...]
            if isinstance(module, SparseLinear):
                y = lookup(module.kernel, x)
                if self.counts[at] > 1:
                    y = _slower(y, 1 / self.counts[at])
                total += y + bias[None, :]
                continue
            if self.counts[at] > 1:
                kernel = held.kernels[_owner_of(layer, source)]
                if source.shared is not None and source.shared.transposed:
                    kernel = kernel.T
            else:
                kernel = module.kernel[...]
            x = _dense(x)
            if layer.type == "Convolutional":
                total += _convolved(layer, before, x, kernel, bias)
            else:
                total += call_with_auto_axes(
                    _product, x, kernel, bias, out_specs=_BATCH
                )
        for skip in layer.skips:
            total += _dense(held.units[skip])
        return total

    def scores(self, held: _Held) -> jax.Array:
        """Of an output: all scores."""
        if self.layer.name in held.scores:
            return held.scores[self.layer.name]
        if self.output is not None:
            return self.output.scores(held.units[self.source_layers[0].name])
        return self._pooled(held) if self.layer.type == "Pooling" else self.sums(held)

    def _pooled(self, held: _Held) -> jax.Array:
        names = [before.name for before in self.source_layers]
        arrays = [_dense(held.units[name]) for name in names]
        pairs = list(zip(self.source_layers, arrays, strict=True))
        return _pooled(self.layer, self.lrn, pairs)

    def activated(self, scores: jax.Array) -> jax.Array:
        activation = self.layer.activation
        return scores if activation is None else activate(activation, scores)

    def loss(self, held: _Held, labels: SparseRows, weights: jax.Array) -> jax.Array:
        """Of an output: `sum_b weights_b loss_b`."""
        rule = self.rule
        assert rule is not None
        if self.output is not None:
            h, module = held.units[self.source_layers[0].name], self.output
            if self.counts[0] > 1:
                module = nnx.clone(module)
                module.kernel[...] = _slower(module.kernel[...], 1 / self.counts[0])
            return module.loss(h, labels, loss=rule, weights=weights)
        check_columns("targets", labels.num_cols, self.layer.units, "items")
        scores = self.scores(held)
        if self._loss_is_of_units:
            scores = held.units[self.layer.name]
        given, listed = _dense(labels), _dense(labels.with_data(None)) > 0
        if isinstance(rule, losses.ElementwiseLoss):
            each = jnp.sum(rule(scores, given, listed), axis=-1)
        else:
            all_items = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
            each = jnp.sum(given * (all_items - scores), axis=-1)
        return jnp.sum(jnp.where(weights == 0, 0, weights * each))

    def top_k(
        self, held: _Held, k: int, exclude: SparseRows | None
    ) -> tuple[jax.Array, jax.Array]:
        """Of an output: ids and activations."""
        if self.output is not None:
            h = held.units[self.source_layers[0].name]
            ids, scores = self.output.top_k(h, k, exclude=exclude)
        else:
            all_scores = self.scores(held)[:, : self.ranked]
            if exclude is not None:
                unwanted = _dense(exclude.with_data(None))[:, : self.ranked] > 0
                all_scores = jnp.where(unwanted, -jnp.inf, all_scores)
            count = min(k, self.ranked)
            scores, ids = lax.top_k(all_scores, count)
            ids = jnp.where(scores == -jnp.inf, -1, ids)
            missing = ((0, 0), (0, k - count))
            ids = jnp.pad(ids, missing, constant_values=-1)
            scores = jnp.pad(scores, missing, constant_values=-jnp.inf)
        activation = self.layer.activation
        if activation is None:
            return ids, scores
        if activation.name == "SoftMax":
            every = jax.nn.logsumexp(self.scores(held), axis=-1, keepdims=True)
            found = jnp.exp(scores - every)
        else:
            found = activate(activation, scores)
        return ids, jnp.where(ids < 0, -jnp.inf, found)


def _connection(
    definition: Definition,
    layer: LayerDefinition,
    source: Connection,
    sharing: _Sharing,
    *,
    row_sparse: bool,
    by_inputs: bool,
    rngs: nnx.Rngs,
) -> Any:
    """The module between a layer and what it reads."""
    before, owner = definition.layer(source.layer), _owner_of(layer, source)
    kernel = sharing.kernels.get(owner)
    options: dict[str, Any] = {
        "kernel_init": _initializer(layer, before.units),
        "bias_init": nnx.initializers.constant(layer.weight_init.bias),
        "kernel": kernel,
        "rngs": rngs,
    }
    rows = _rows_are(definition, layer, source)
    if kernel is None and source.shared is not None:
        module = _Bias(layer)
    elif rows is None or (kernel is None and sharing.counts[owner] > 1):
        module = _Dense(before, layer, by_inputs=by_inputs, rngs=rngs)
    elif rows == "features":
        module = SparseLinear(before.units, layer.units, **options)
        if kernel is None and (source.weight_norm or not row_sparse):
            module.kernel = _whole(module.kernel)
    else:
        module = SparseOutput(before.units, layer.units, **options)
    module = cast(Any, module)
    if source.locked:
        module.bias = _locked(module.bias)
    if owner in sharing.locked:
        module.kernel = sharing.locked[owner]
    elif source.locked and source.shared is None:
        module.kernel = _locked(module.kernel)
    return module


def _product(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    return jnp.dot(x, kernel, precision=lax.Precision.HIGHEST) + bias[None, :]


def _shorten(module: Any, limit: float) -> None:
    """Brings the weights of each unit of the layer to an L2 norm of at most `limit`."""
    kernel = module.kernel[...]
    rows = isinstance(module, SparseOutput) or kernel.ndim > 2  # a row for each unit
    axes = tuple(range(1, kernel.ndim)) if rows else 0
    norm = jnp.sqrt(jnp.sum(jnp.square(kernel), axis=axes, keepdims=True))
    module.kernel[...] = kernel * jnp.minimum(1, limit / jnp.maximum(norm, 1e-30))


def _locked(variable: nnx.Variable) -> Locked:
    return Locked(variable[...], **_placed(variable))


def _placed(variable: nnx.Variable) -> dict[str, Any]:
    spec = variable.get_metadata().get("out_sharding")
    return {} if spec is None else {"out_sharding": spec}


def _initializer(layer: LayerDefinition, inputs: int) -> Callable[..., jax.Array]:
    """How weights start. `inputs` is the number of units of the layer that is read."""
    scheme, scale = layer.weight_init.scheme, layer.weight_init.scale
    outputs = layer.units
    widths = {
        # Half of what Glorot and Bengio have.
        "Xavier": scale / 2 * math.sqrt(6 / (inputs + outputs)),
        "CaffeXavier": scale * math.sqrt(3 / outputs),
        "Uniform": scale,
    }
    deviations = {"Gaussian": scale, "SELU": math.sqrt(1 / inputs)}

    def draw(key, shape, dtype):
        if scheme == "Constant":
            return jnp.full(shape, scale, dtype)
        if scheme in deviations:
            return deviations[scheme] * jax.random.normal(key, shape, dtype)
        low, high = (0, scale)  # UnitBall
        if scheme in widths:
            low, high = -widths[scheme], widths[scheme]
        return jax.random.uniform(key, shape, dtype, low, high)

    return draw


def _num_biases(layer: LayerDefinition) -> int:
    return layer.size[-1] if layer.type == "Convolutional" else layer.units


def _bias(layer: LayerDefinition) -> jax.Array:
    return jnp.full(_num_biases(layer), layer.weight_init.bias, jnp.float32)


def _set(variable: nnx.Variable, array: np.ndarray) -> None:
    """Sets the first rows of a variable; the others, which only pad, are 0."""
    shape = variable[...].shape
    whole = np.zeros(shape, np.float32)
    whole[tuple(slice(size) for size in array.shape)] = array
    variable.set_value(jax.device_put(whole, variable[...].sharding))


def _stored(module: Any) -> np.ndarray:
    kernel = to_host(module.kernel[...])
    if isinstance(module, SparseLinear):
        return kernel[: module.in_features]
    if isinstance(module, SparseOutput):
        return kernel[: module.num_items].T
    return kernel


def _row_shape(layer: LayerDefinition) -> tuple[int, ...]:
    return tuple(reversed(layer.size))


def _dense(x: Any) -> jax.Array:
    return x.todense() if isinstance(x, SparseRows) else x


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _slower(x: jax.Array, factor: float) -> jax.Array:
    """`x`, with `factor` as its slope."""
    return x


@_slower.defjvp
def _slower_jvp(factor, primals, tangents):
    (x,), (dx,) = primals, tangents
    return x, factor * dx


@jax.custom_vjp
def _with_short_slopes(x: jax.Array, limit: Any) -> jax.Array:
    """`x`; the gradient of each row is cut to an L2 norm of at most `limit`."""
    return x


def _short_forward(x, limit):
    return x, limit


def _short_backward(limit, g):
    norm = jnp.sqrt(jnp.sum(jnp.square(g), axis=-1, keepdims=True))
    return g * jnp.minimum(1, limit / jnp.maximum(norm, 1e-30)), None


_with_short_slopes.defvjp(_short_forward, _short_backward)


class _Dropout(nnx.Module):
    """DSSTNE's dropout, of which there are three kinds.

    A unit is dropped with probability p. With q = 1 - p, and alpha what ELU or SELU goes
    to far below 0::

        Sigmoid     dropped: 0.5                kept: a
        ELU, SELU   dropped: A alpha + B        kept: A a + B
                    A = 1 / sqrt(q + alpha^2 p q),  B = -A p alpha
        others      dropped: 0                  kept: a / q
    """

    def __init__(self, layer: LayerDefinition, *, rngs: nnx.Rngs):
        self.rate, self.activation = layer.dropout, layer.activation
        self.deterministic = False
        self.rngs = rngs.dropout.fork()

    def __call__(self, a: jax.Array, deterministic: bool | None) -> jax.Array:
        dropped = self.drawn(a, deterministic)
        if dropped is None:
            return a
        p, q = self.rate, 1 - self.rate
        name = "" if self.activation is None else self.activation.name
        if self.activation is not None and name in ("ELU", "SELU"):
            alpha = -self.activation.elu_alpha
            alpha *= self.activation.selu_lambda if name == "SELU" else 1
            scale = 1 / math.sqrt(q + alpha**2 * p * q)
            shift = -scale * p * alpha
            return jnp.where(dropped, scale * alpha + shift, scale * a + shift)
        if name == "Sigmoid":
            return jnp.where(dropped, 0.5, a)
        return jnp.where(dropped, 0, a / q)

    def drawn(self, a: jax.Array, deterministic: bool | None) -> jax.Array | None:
        """Which units are dropped; None if this is without noise."""
        if deterministic is None:
            deterministic = self.deterministic
        if deterministic or self.rate == 0:
            return None
        return jax.random.bernoulli(self.rngs(), self.rate, a.shape)


class _Normalization(nnx.Module):
    """Batch normalization of sums: over the examples, of a convolution also over places."""

    def __init__(self, layer: LayerDefinition):
        channels = _num_biases(layer)
        self.channels = channels
        self.deterministic = False
        self.scale = nnx.Param(jnp.ones(channels, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(channels, jnp.float32))
        self.mean = nnx.BatchStat(jnp.zeros(channels, jnp.float32))
        self.variance = nnx.BatchStat(jnp.ones(channels, jnp.float32))

    def __call__(
        self, z: jax.Array, weights: jax.Array | None, deterministic: bool | None
    ) -> jax.Array:
        if deterministic is None:
            deterministic = self.deterministic
        x = z.reshape(z.shape[0], self.channels, -1)
        if deterministic:
            mean, variance = self.mean[...], self.variance[...]
        else:
            exists = jnp.ones(z.shape[0], bool) if weights is None else weights > 0
            used = exists[:, None, None]
            count = jnp.maximum(jnp.sum(exists), 1) * x.shape[2]
            mean = jnp.sum(jnp.where(used, x, 0), axis=(0, 2)) / count
            gap = jnp.where(used, x - mean[None, :, None], 0)
            variance = jnp.sum(jnp.square(gap), axis=(0, 2)) / count
            for old, new in ((self.mean, mean), (self.variance, variance)):
                moved = old[...] + _NORMALIZATION_RATE * (new - old[...])
                old[...] = lax.stop_gradient(moved)
        factor = self.scale[...] * lax.rsqrt(variance + _NORMALIZATION_EPS)
        x = (x - mean[None, :, None]) * factor[None, :, None]
        return (x + self.bias[...][None, :, None]).reshape(z.shape)

    def numbers(self) -> Normalization:
        variables = (self.scale, self.bias, self.mean, self.variance)
        return Normalization(*(to_host(v[...]) for v in variables))

    def set(self, normalization: Normalization) -> None:
        variables = (self.scale, self.bias, self.mean, self.variance)
        arrays = dataclasses.astuple(normalization)
        for variable, array in zip(variables, arrays, strict=True):
            variable.set_value(jnp.asarray(array))


# Convolution and pooling. Units are [channel][z][y][x].


def _image(x: jax.Array, size: tuple[int, ...], dimensions: int) -> jax.Array:
    """`[batch, channels, z, y, x]`, with as many of z, y, x as there are dimensions."""
    sizes = (*size, *[1] * (dimensions + 1 - len(size)))
    return x.reshape(x.shape[0], sizes[dimensions], *reversed(sizes[:dimensions]))


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1)


def _padding(layer: LayerDefinition) -> list[tuple[int, int]]:
    return [(padding, padding) for padding in reversed(layer.padding)]


def _convolved(
    layer: LayerDefinition,
    before: LayerDefinition,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
) -> jax.Array:
    dimensions = len(layer.kernel)
    places = "DHW"[-dimensions:]
    found = lax.conv_general_dilated(
        _image(x, before.size, dimensions),
        kernel,
        window_strides=tuple(reversed(layer.stride)),
        padding=_padding(layer),
        dimension_numbers=(f"NC{places}", f"OI{places}", f"NC{places}"),
        precision=lax.Precision.HIGHEST,
    )
    return _flat(found + bias.reshape(1, -1, *[1] * dimensions))


def _pooled(
    layer: LayerDefinition,
    lrn: LocalResponseNormalization,
    sources: list[tuple[LayerDefinition, jax.Array]],
) -> jax.Array:
    arrays = [array for _, array in sources]
    function = layer.function
    if function == "Maxout":
        return functools.reduce(jnp.maximum, arrays)
    if function in ("DotProduct", "Cosine"):
        first, *others = arrays
        products = [jnp.sum(first * other, axis=-1) for other in others]
        if function == "Cosine":
            lengths = [_length(array) + _NORM_EPS for array in arrays]
            products = [
                product / (lengths[0] * length)
                for product, length in zip(products, lengths[1:], strict=True)
            ]
        return jnp.stack(products, axis=-1)
    if function == "LRN":
        return sum(
            (_normalised(before, lrn, array) for before, array in sources),
            start=jnp.zeros((), jnp.float32),
        )
    return sum(
        (_window(layer, before, array) for before, array in sources),
        start=jnp.zeros((), jnp.float32),
    )


def _length(x: jax.Array) -> jax.Array:
    """The L2 norm of each row; its slope is 0 at 0."""
    square = jnp.sum(jnp.square(x), axis=-1)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)


def _normalised(
    before: LayerDefinition, lrn: LocalResponseNormalization, x: jax.Array
) -> jax.Array:
    """Local response normalization over the channels."""
    image = _image(x, before.size, len(before.size) - 1)
    window = (1, lrn.n, *[1] * (image.ndim - 2))
    behind = (lrn.n - 1) // 2
    padding = [(0, 0)] * image.ndim
    padding[1] = (behind, lrn.n - behind - 1)
    squares = lax.reduce_window(
        jnp.square(image), 0.0, lax.add, window, (1,) * image.ndim, padding
    )
    return _flat(image * (lrn.k + lrn.alpha / lrn.n * squares) ** -lrn.beta)


def _window(layer: LayerDefinition, before: LayerDefinition, x: jax.Array) -> jax.Array:
    """The largest or the mean value in each window; padding does not count."""
    image = _image(x, before.size, len(layer.kernel))
    window = (1, 1, *reversed(layer.kernel))
    strides = (1, 1, *reversed(layer.stride))
    padding = [(0, 0), (0, 0), *_padding(layer)]
    if layer.function == "Max":
        return _flat(
            lax.reduce_window(image, -jnp.inf, lax.max, window, strides, padding)
        )

    def add(array):
        return lax.reduce_window(array, 0.0, lax.add, window, strides, padding)

    return _flat(add(image) / add(jnp.ones_like(image)))
