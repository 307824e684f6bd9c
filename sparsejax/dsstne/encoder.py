"""DSSTNE's `encoder`: trains, measures or checks a network by the settings in a CDL file."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from flax import nnx

from sparsejax.data.reading.sources import Inputs
from sparsejax.dsstne import train
from sparsejax.dsstne.examples import as_wide, inputs_of
from sparsejax.dsstne.keys import Keys, parse
from sparsejax.dsstne.layer_definition import SparsenessPenalty
from sparsejax.dsstne.netcdf import load
from sparsejax.dsstne.network import Network
from sparsejax.dsstne.network_files import load_parameters
from sparsejax.engine.batching import batches_of, held_inputs, taken
from sparsejax.mesh import processes
from sparsejax.sparse import CSR
from sparsejax.verbs.evaluate import evaluate

_BATCH_SIZE = 1024
_MOST_RANKED = 10
_STEP = 1e-3  # step of finite differences
_TOLERANCE = 20 * _STEP
_CHECKED = 200  # number of weights of each array that are checked

_KEYS = (*("Version", "Network", "Data", "RandomSeed", "Command"), "TrainingParameters")
_TRAINING_KEYS = (
    *("Epochs", "Alpha", "AlphaInterval", "AlphaMultiplier", "mu", "lambda"),
    *("CheckpointInterval", "CheckpointName", "Optimizer", "Results"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encode:
    """The content of a CDL file.

    Attributes:
      command: "Train", "Predict" or "Validate".
      network: JSON file of a network; for Predict a network file.
      data: a NetCDF file of data sets.
      training: settings of `train`, for Train and Validate.
    """

    command: str
    network: str
    data: str
    training: train.Train


def load_cdl(path: str) -> Encode:
    """Reads a CDL file. Keys are case-insensitive, comments are allowed.

    Raises:
      OSError: the file does not exist.
      ValueError: a key is unknown or missing, or a value is wrong.
    """
    try:
        text = pathlib.Path(path).read_bytes().decode("utf-8-sig")
        return _encode(Keys(parse(text), _KEYS, "the file"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _encode(keys: Keys) -> Encode:
    for key in ("Command", "Network", "Data"):
        if not keys.text(key, ""):
            raise ValueError(f'"{key}" is missing')
    command = keys.choice("Command", ("Train", "Predict", "Validate"), None)
    network, data = keys.text("Network", ""), keys.text("Data", "")
    inner = keys.inner("TrainingParameters", _TRAINING_KEYS)
    if command == "Train" and "Epochs" not in inner.values:
        raise ValueError('"Epochs" of "TrainingParameters" is missing')
    optimizer = inner.choice("Optimizer", ("sgd", "nesterov"), "sgd")
    # DSSTNE reads the seed either as a signed or as an unsigned 32-bit number.
    limits = {"least": -(2**31), "most": 2**32 - 1}
    seed = keys.whole("RandomSeed", time.time_ns(), **limits) % 2**32
    # The default 0 means that the learning rate is constant.
    interval = inner.whole("AlphaInterval", 0, least=0)
    training = train.Train(
        config=network,
        inputs=data,
        outputs=data,
        network=inner.text("Results", "network.nc"),
        overwrite=True,
        initial=None,
        batch_size=_BATCH_SIZE,
        epochs=inner.whole("Epochs", 1),
        alpha=inner.number("Alpha", 0.1),
        l2=inner.number("lambda", 0.001),
        mu=inner.number("mu", 0.9),
        optimizer=optimizer,
        seed=seed,
        # The value 0 becomes the number of epochs: a single interval, so the brake is never reset.
        interval=interval or inner.whole("Epochs", 1),
        multiplier=inner.number("AlphaMultiplier", 0.5),
        kept=inner.text("CheckpointName", "check"),
        kept_epochs=inner.whole("CheckpointInterval", 1, least=0),
    )
    return Encode(command=command, network=network, data=data, training=training)


def encode(cdl: Encode) -> None:
    """Runs the command of a CDL file.

    Raises:
      ArithmeticError: Validate found a wrong gradient.
      ValueError: files do not match each other, or `train` rejects the settings.
    """
    if cdl.command == "Train":
        # The default seed is the time, which differs between processes, so all use that of the
        # first.
        seed = processes.number_of_first(cdl.training.seed)
        train.train(dataclasses.replace(cdl.training, seed=seed))
    elif cdl.command == "Validate":
        training = train.made(cdl.training)
        for name, gap in slope_errors(training).items():
            print(f"{name}: largest error {gap:.6f}")
            if not gap <= _TOLERANCE:
                raise ArithmeticError(
                    f"the gradient of {name} differs by {gap:.6f} from finite "
                    f"differences; the tolerance is {_TOLERANCE:g}"
                )
    else:
        _measure(cdl)


def _measure(cdl: Encode) -> None:
    """Prints precision, recall and nDCG for each k from 1 to 10."""
    definition, parameters = load_parameters(cdl.network)
    data, output = load(cdl.data), definition.ranked
    for name in ("input", "output"):
        if name not in data:
            raise ValueError(f"{cdl.data}: there is no data set {name!r}")
    if output is None or output.name != "Output":
        raise ValueError(f"{cdl.network}: the network has no layer 'Output'")
    inputs = {
        layer.name: as_wide(layer, data["input"])
        for layer in definition.of_kind("Input")
    }
    definition = definition.with_inputs({n: d.is_sparse for n, d in inputs.items()})
    network = Network(definition, parameters=parameters, rngs=nnx.Rngs(0))
    given = inputs_of(definition, inputs)
    target: Any = as_wide(output, data["output"]).examples(target=True)
    most = min(_MOST_RANKED, network.num_items)
    ks = range(1, most + 1)
    found = evaluate(network, given, target, k=list(ks), exclude=None, popularity=None)
    print("k,precision,recall,NDCG")
    for k in ks:
        numbers = (found[f"{name}@{k}"] for name in ("precision", "recall", "ndcg"))
        print(k, *(f"{number:.6f}" for number in numbers), sep=",")


def slope_errors(training: train.Training) -> dict[str, float]:
    """For each array of weights, the largest error of its gradient by finite differences.

    An error is `|difference - slope| / max(1, |slope|)`, computed in float64:
    rounding a large loss to float32 changes it more than a step does.

    The loss is that of the first examples, without noise. Some rules change
    gradients but not the loss, and are turned off: the sparseness penalty, DeltaBoost,
    DeltaNorm, and the mean over connections that share weights, which becomes a sum.
    """
    model, rows = training.model, np.arange(_BATCH_SIZE)
    model.definition = dataclasses.replace(
        model.definition, sparseness_penalty=SparsenessPenalty()
    )
    for layer in model.layers:
        layer.follow_values()
    names = _names_of(model)
    inputs = Inputs.of(training.examples.inputs)
    rows = rows[: inputs.num_rows]
    [x] = [taken(b) for b in batches_of(inputs, held_inputs(inputs), rows, len(rows))]

    def first(target: Any) -> CSR:
        matrix = CSR.from_scipy(target) if scipy.sparse.issparse(target) else target
        return jax.tree.map(jnp.asarray, matrix).take(rows)

    targets = training.examples.targets
    if isinstance(targets, Mapping):
        labels = {name: first(target) for name, target in targets.items()}
    else:
        labels = first(targets)
    share = jnp.full(len(rows), 1 / len(rows))
    model.eval()
    graphdef, params, others = nnx.split(model, nnx.Param, ...)
    paths = [path for path, _ in nnx.to_flat_state(params)]
    arrays, tree = jax.tree.flatten(params)

    def loss_of(arrays: list[jax.Array]):
        model = nnx.merge(graphdef, jax.tree.unflatten(tree, arrays), others)
        return model.loss(x, labels, weights=share, deterministic=True)

    found, rng = {}, np.random.default_rng(0)
    with jax.enable_x64(True):
        x, labels, share, others = jax.tree.map(_double, (x, labels, share, others))
        arrays = [np.asarray(array, np.float64) for array in arrays]
        # The loss is a function of arrays: `nnx.jit` would take longer than a small network.
        loss = jax.jit(loss_of)
        grads = jax.jit(jax.grad(loss_of))(arrays)
        for i, path in enumerate(paths):
            before, slopes = arrays[i], np.asarray(grads[i])
            largest, places = 0.0, rng.permutation(before.size)[:_CHECKED]
            for place in places:
                at = np.unravel_index(place, before.shape)
                values = []
                for step in (_STEP, -_STEP):
                    moved = before.copy()
                    moved[at] += step
                    values.append(float(loss([*arrays[:i], moved, *arrays[i + 1 :]])))
                gap = abs((values[0] - values[1]) / (2 * _STEP) - slopes[at])
                largest = max(largest, float(gap / max(1, abs(slopes[at]))))
            found[names[path]] = largest
    return found


def _double(array: Any) -> Any:
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return jnp.asarray(array, jnp.float64) if is_float else array


def _names_of(model: Network) -> dict[tuple, str]:
    """Names of the trained arrays, by their paths. A name contains the names of the layers."""
    found: dict[tuple, str] = {}
    for i, module in enumerate(model.layers):
        for j, (pair, _, _) in enumerate(module.connected()):
            for key, what in (("kernel", "weights"), ("bias", "biases")):
                path = ("layers", i, "connections", j, key)
                found[path] = f"{what} from {pair[0]!r} to {pair[1]!r}"
        for key in ("scale", "bias"):
            path = ("layers", i, "normalization", key)
            found[path] = f"{key} of the batch normalization of {module.layer.name!r}"
    return found
