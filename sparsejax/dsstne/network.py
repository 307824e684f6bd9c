"""A network of DSSTNE as a Flax module that `fit` and `recommend` take."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from sparsejax import losses
from sparsejax.data.files.opening import Path
from sparsejax.data.reading.sources import (
    Features,
    Inputs,
    Source,
    Sources,
    check_columns,
    check_inputs,
)
from sparsejax.dsstne.brake import Brake
from sparsejax.dsstne.connections import SharedWeights, set_array, shorten, stored
from sparsejax.dsstne.definition import Definition, weights_of
from sparsejax.dsstne.layer_definition import LayerDefinition, num_biases
from sparsejax.dsstne.layers import Counted, Held, Layer, dense
from sparsejax.dsstne.losses import of_output
from sparsejax.dsstne.network_files import Parameters, load_parameters, save_parameters
from sparsejax.engine.batching import (
    Batch,
    Batches,
    Shown,
    batches_of,
    for_batches,
    held_inputs,
    rows_in_a_batch,
    taken,
)
from sparsejax.engine.rank.recommender import merged, split
from sparsejax.mesh.blocks import SparseRows
from sparsejax.mesh.layout import replicated, to_host, using_auto_axes
from sparsejax.nn.layers import SparseDropout, SparseOutput
from sparsejax.ops.gather_matmul import combined


class Network(nnx.Module):
    """A network of DSSTNE.

    ::

        z = sum over sources (x W + b) + sum of skips,    a = dropout(f(normalize(z)))

    >>> from sparsejax.dsstne.keys import parse
    >>> text = '{"Layers": [{"N": 5, "Sparse": true}, {"N": 2}, {"N": 5}]}'
    >>> network = Network(Definition.from_json(parse(text)), rngs=nnx.Rngs(0))
    >>> x = CSR.from_scipy(scipy.sparse.csr_array([[0, 1, 0, 2, 0], [0, 0, 0, 0, 0.0]]))
    >>> network(x, deterministic=True).shape
    (2, 5)

    Inputs are identified by the names of their data sets, or of their layers if they have none.
    A single sparse input or target is given without a dict. With several outputs, labels
    are given by name, and the losses are added. The items of the output named "Output"
    are ranked, otherwise those of the first output. Scores are values before the
    activation; `top_k` returns values after it. A network without outputs only has
    `units`. A network that `check_trainable` refuses has units, scores and `top_k`.

    Weights that only sparse inputs and outputs share are one kernel, of which a sparse
    input reads the rows of its features. The gradient of shared weights is the mean of the
    gradients of all connections that share them. On a mesh, large kernels are divided
    as in `SparseLinear` and `SparseOutput`, and others by `hidden_layout`.

    Args:
      definition: the layers. `sparse` of an input says which kind of data it takes.
      parameters: initial numbers; by default they are drawn.
      row_sparse: whether a training step writes only those rows of an input's weights that
        the batch touches; see `DsstneRule.row_sparse`. With a weight norm it writes all rows.
      dense_targets: whether the data sets of the targets are dense.
      weighted: whether examples have weights of their own, which are passed to `fit`.
        Then labels with SoftMax are 1, not 1 / n.
      ignore_zeros: whether only items with labels have a loss, as in `of_output`.
      brake_steps: number of steps after which DSSTNE's brake is reset; see `Brake`. With 0
        there is no brake.
      rngs: random streams: "params" for the parameters, "dropout" for noise.

    Raises:
      ValueError: inputs of one data set differ in width or in being sparse, or
        `parameters` do not fit.
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
        self.dense_targets, self.ignore_zeros = dense_targets, ignore_zeros
        _check_inputs(definition)
        self.output_layer = definition.ranked
        denoising = definition.denoising
        # If the number is out of range, `check_trainable` raises an error later.
        denoising = denoising if 0 <= denoising < 1 else 0
        self.corruption = SparseDropout(denoising, rngs=rngs)
        sharing = SharedWeights.of(definition, row_sparse=row_sparse, rngs=rngs)
        modules: list[Layer] = []
        for layer in definition.in_order:
            divided = {module.layer.name for module in modules if module.is_divided}
            module = Layer(
                definition,
                layer,
                sharing,
                row_sparse=row_sparse,
                divided=divided,
                rngs=rngs,
            )
            if layer.kind == "Output":
                # The error is ignored here: `check_trainable` raises it again before a training.
                with contextlib.suppress(NotImplementedError):
                    module.set_rule(self._rule_of(layer))
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
            name_of(layer): layer.units if layer.sparse else layer.size[::-1]
            for layer in inputs
        }

    @property
    def num_items(self) -> int:
        """Number of items that are scored."""
        return self._output.ranked

    @property
    def loss_rule(self) -> losses.LossRule | None:
        """The loss of the output whose items are ranked; None without an output.

        Raises:
          NotImplementedError, ValueError: the loss has no gradient, or its numbers are
            out of range, see `check_trainable`.
        """
        self.check_trainable()
        return None if self.output_layer is None else self._output.rule

    def check_trainable(self) -> None:
        """Raises an error if the network cannot be trained; its units can still be computed.

        Raises:
          NotImplementedError: `of_output` refuses the loss, or two inputs have one data
            set.
          ValueError: a number is out of its range.
        """
        self.definition.check_numbers()
        names = [name_of(layer) for layer in self.definition.of_kind("Input")]
        for name in names:
            if names.count(name) > 1:
                raise NotImplementedError(
                    f"two inputs read the data set {name!r}; to train, give each a data "
                    "set of its own"
                )
        for layer in self.definition.of_kind("Output"):
            self._rule_of(layer)

    def _rule_of(self, layer: LayerDefinition) -> losses.LossRule:
        return of_output(
            self.definition,
            layer,
            sparse=not self.dense_targets,
            ignore_zeros=self.ignore_zeros,
        )

    def rank_first(self, items: int) -> None:
        """Makes `top_k` rank only the first `items` items from now on: the others are padding.

        The probabilities of SoftMax are still over all units.
        """
        if not 1 <= items <= self.num_items:
            raise ValueError(f"{items=} must be from 1 to {self.num_items:,}")
        self._output.ranked = items

    def units(
        self, inputs: Sources, layer: str, *, batch_size: int = 512
    ) -> np.ndarray:
        """The values of a layer for each row of `inputs`, without noise: `[rows, units]`.

        Args:
          inputs: `[rows, features]`; or several inputs by name, see `fit`.
          layer: name of the layer.
          batch_size: number of rows that are computed together.

        Raises:
          KeyError: no layer has this name.
          ValueError: `inputs` does not match the network.
        """
        self.definition.layer(layer)
        x = Inputs.of(inputs)
        check_inputs(x, self.num_features)
        with using_auto_axes():
            graphdef, state = split(self, None)
            size = rows_in_a_batch(batch_size, x.num_rows)
            batches = batches_of(x, held_inputs(x), np.arange(x.num_rows), size)
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
          inputs: data that the network reads, in the forms that `fit` takes.
          targets: data that the network predicts, in the forms that `fit` takes.
          weights: `[rows]`; 1 by default.
          batch_size: number of rows that are computed together.

        Raises:
          NotImplementedError: the network cannot be trained, see `check_trainable`.
          ValueError: data do not match the network or each other.
        """
        self.check_trainable()
        x = Inputs.of(inputs)
        check_inputs(x, self.num_features)
        labels = {}
        for module, source in self._targets(targets):
            given = x.named("targets", source)
            labels[name_of(module.layer)] = given
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
            shown = batches_of(x, held_inputs(x), rows, size)
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
        """The values of a layer for each example of a batch; see `units` for all rows."""
        held = self._run(x, None, deterministic)
        if layer in held.units:
            return dense(held.units[layer])
        [module] = [found for found in self.layers if found.layer.name == layer]
        return module.activated(module.scores(held))

    def __call__(
        self, x: Any, *, deterministic: bool | None = None
    ) -> Float[Array, "batch items"]:
        """The scores of all items, before the output's activation."""
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

        With B examples whose own weights are w, `fit` passes `w_b / B`. The sparseness
        penalty has gradients, as if added to the mean loss, but is not part of the value. An
        example of weight 0 is padding: it is not counted in B, or in a mean over the
        batch. (DSSTNE counts it. The weight alone does not distinguish it from padding.)

        Raises:
          NotImplementedError, ValueError: the network cannot be trained, see
            `check_trainable`.
        """
        self.check_trainable()
        targets = self._targets(labels)
        batch = self._counted(weights, targets[0][1].num_rows)
        if weights is None:
            weights = jnp.ones(targets[0][1].num_rows, jnp.float32)
        held = self._run(x, batch, deterministic)
        loss = jnp.zeros((), jnp.float32)
        for module, given in targets:
            activation = module.layer.activation
            plain = given.data is None and not self.weighted
            if plain and activation is not None and activation.name == "SoftMax":
                given = combined(given, "mean")
            loss += module.loss(held, given, weights)
        penalty = self._penalty(held, batch)
        if deterministic or self.brake is None:
            return loss + penalty
        total = loss + penalty
        error = loss / jnp.maximum(batch.share, 1e-30)
        share = self.brake(lax.stop_gradient(error))
        return lax.stop_gradient(loss) + share * (total - lax.stop_gradient(total))

    def top_k(
        self, x: Any, k: int, *, exclude: SparseRows | None = None
    ) -> tuple[Int[Array, "batch k"], Float[Array, "batch k"]]:
        """Ids and activations of the `k` best items of each row, without noise."""
        return self._output.top_k(self._run(x, None, True), k, exclude)

    def project(self) -> None:
        """Scales down the weights of each unit whose L2 norm is above the layer's limit.

        `fit` calls this method after each step.
        """
        for layer in self.layers:
            for _, source, module in layer.connected():
                if source.weight_norm and source.shared is None and not source.locked:
                    shorten(module, source.weight_norm)

    def parameters(self) -> Parameters:
        """All parameters in the layout of a network file, on the host."""
        weights, biases, normalizations = {}, {}, {}
        for layer in self.layers:
            for pair, source, module in layer.connected():
                bias = to_host(module.bias[...])
                biases[pair] = bias[: num_biases(layer.layer)]
                if source.shared is None:
                    weights[pair] = stored(module)
            if layer.normalization is not None:
                normalizations[layer.layer.name] = layer.normalization.numbers()
        return Parameters(weights, biases, normalizations)

    @property
    def _output(self) -> Layer:
        if self.output_layer is None:
            raise ValueError(
                "the network has no layer of kind Output: it cannot be trained and ranks "
                "nothing; `units` gives what a layer holds"
            )
        found = [layer for layer in self.layers if layer.layer == self.output_layer]
        return found[0]

    def _targets(self, targets: Any) -> list[tuple[Layer, Any]]:
        """Pairs of each output layer and its targets.

        Raises:
          ValueError: there are no outputs, or `targets` do not match them.
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
                set_array(module.bias, parameters.biases[pair])
                if source.shared is None:
                    weights = parameters.weights[pair]
                    is_output = isinstance(module, SparseOutput)
                    set_array(module.kernel, weights.T if is_output else weights)
            if layer.normalization is not None:
                layer.normalization.set(parameters.normalizations[layer.layer.name])

    def _run(self, x: Any, batch: Counted | None, deterministic: bool | None) -> Held:
        """Computes the values of all layers, except for outputs that may be too large."""
        inputs = self.definition.of_kind("Input")
        if len(inputs) == 1 and inputs[0].sparse:
            x = {name_of(inputs[0]): x}
        held = Held({}, {}, {})
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
                scores, units = module(held, batch, deterministic=deterministic)
                held.units[layer.name] = units
                if layer.kind == "Output":
                    held.scores[layer.name] = scores
        return held

    def _counted(self, weights: jax.Array | None, rows: int) -> Counted:
        """Which rows of a batch are examples: those with a positive weight, or all."""
        if weights is None:
            return Counted(jnp.ones(rows, bool), jnp.float32(1))
        exists = weights > 0
        count = jnp.maximum(jnp.sum(exists), 1)
        return Counted(exists, (1 if self.weighted else jnp.sum(weights)) / count)

    def _penalty(self, held: Held, batch: Counted) -> jax.Array:
        """A term that is 0, and whose gradients are those of the sparseness penalties.

        With m the mean of a unit, and pi the mean clipped to 1e-6 .. 1 - 1e-6::

            slope = beta (-p / pi + (1 - p) / (1 - pi))

        The gradient is applied to m even if pi is clipped, so that a dead unit can recover.
        """
        count, total = batch.examples, jnp.zeros((), jnp.float32)
        for layer in self.definition.layers:
            penalty = self.definition.penalty_of(layer)
            if penalty is None:
                continue
            used = jnp.where(batch.exists[:, None], held.units[layer.name], 0)
            mean = jnp.sum(used, axis=0) / count
            fixed, p = lax.stop_gradient(mean), penalty.p
            one, zero = (jnp.clip(m, 1e-6, 1 - 1e-6) for m in (fixed, 1 - fixed))
            slope = penalty.beta * ((1 - p) / zero - p / one)
            total += jnp.sum(slope * (mean - fixed))
        return total * count * batch.share


@functools.partial(jax.jit, static_argnames=("graphdef", "layer"))
def _units(graphdef, state, shown: Shown, layer: str):
    with merged(graphdef, state) as network:
        return replicated(network.values(taken(shown), layer, deterministic=True))


@functools.partial(jax.jit, static_argnames=("graphdef",))
def _loss(
    graphdef, state, shown: Shown, labels: Mapping[str, Batch], weights: jax.Array
):
    with merged(graphdef, state) as network:
        x, given = taken(shown), {name: batch.take() for name, batch in labels.items()}
        found = network.loss(x, given, weights=weights, deterministic=True)
        return replicated(found)


def load_network(path: Path) -> Network:
    """Loads a trained network from one of DSSTNE's NetCDF files.

    >>> network = dsstne.load_network("gl.nc")
    >>> data = dsstne.read_datasets("gl_input.nc", features="features")["gl_input"]
    >>> found = recommend(network, data, k=10, exclude=None)

    Raises:
      DataError: the file is missing, damaged or wrong.
      NotImplementedError: DSSTNE names the function of a layer, but has no formula
        for it.
    """
    definition, parameters = load_parameters(path)
    return Network(definition, parameters=parameters, rngs=nnx.Rngs(0))


def save_network(path: Path, network: Network) -> None:
    """Writes a network as a NetCDF file, whole or not at all, that DSSTNE can load.

    Call it when all rows are up to date, as they are after `fit`.

    Raises:
      OSError: the file cannot be written; no partial file is left.
    """
    save_parameters(path, network.definition, network.parameters())


def name_of(layer: LayerDefinition) -> str:
    """The name by which data for an input is passed."""
    return layer.dataset or layer.name


def regularization(network: Network, *, l2: float, l1: float) -> float:
    """`l2 / 2 sum w^2 + l1 sum |w|` over all weights, without biases.

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
    """Raises ValueError if parameters do not match the definition of a network."""
    wanted = weights_of(definition)
    for layer in definition.layers:
        for source in layer.sources if layer.has_weights else ():
            pair, shape = (source.layer, layer.name), (num_biases(layer),)
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


def _check_inputs(definition: Definition) -> None:
    forms: dict[str, tuple[tuple[int, ...], bool]] = {}
    for layer in definition.of_kind("Input"):
        form, name = (layer.size, layer.sparse), name_of(layer)
        if forms.setdefault(name, form) != form:
            raise ValueError(
                f"the inputs of the data set {name!r} differ in width or in being sparse; "
                "make them alike"
            )
