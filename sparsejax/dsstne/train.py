"""DSSTNE's `train`: trains a network on data sets in NetCDF files."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from sparsejax.dsstne import rules
from sparsejax.dsstne.datasets import FileDataset, check_fits
from sparsejax.dsstne.definition import Definition, weights_of
from sparsejax.dsstne.devices import setting_mesh
from sparsejax.dsstne.examples import Examples, by_layer, data_of, first_of_like
from sparsejax.dsstne.network import Network, check_parameters, name_of, regularization
from sparsejax.dsstne.network_files import load_parameters, save_parameters, training_of
from sparsejax.dsstne.order import balanced_orders, from_file_order, to_file_order
from sparsejax.engine.train.checkpoint import Checkpoints
from sparsejax.mesh import processes
from sparsejax.mesh.layout import put_on_mesh
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.verbs.fit import fit
from sparsejax.whole_files import check_writable, remove_folder

# Seconds between two checkpoints, from which `resume` continues.
CHECKPOINT_SECONDS = 300
OPTIMIZERS = ("sgd", "momentum", "adagrad", "nesterov", "rmsprop", "adadelta", "adam")
# Defaults of `-mu` and `-mu1`. DSSTNE's default for the second decay rate is 0: Adam then divides
# by its last gradient, and diverges.
MU = {"mu": 0.5, "mu1": 0.0}
MU_OF_ADAM = {"mu": 0.9, "mu1": 0.999}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """The command `train`.

    Attributes:
      config: JSON file of the network.
      inputs: NetCDF file with the data sets of the inputs.
      outputs: NetCDF file with the data sets of the outputs.
      network: the network file to write.
      overwrite: whether the network file may exist already.
      initial: the network file to write before training, or None.
      batch_size: number of examples in a step.
      epochs: number of passes over the data.
      alpha: learning rate.
      l2: DSSTNE's lambda, which adds `lambda w` to the gradient of a weight.
      l1: DSSTNE's lambda1, which adds `lambda1 sign(w)`.
      mu: momentum, for optimizers that have one.
      mu1: second momentum, for Adam.
      optimizer: one of `OPTIMIZERS`.
      seed: seed of the initial weights, of noise and of the order of examples.
      resume: whether to continue an interrupted training that had equal flags.
      mesh: text such as "data=1,model=2". By default one device, or with several processes
        all devices along "model".
      validation: two files, like `inputs` and `outputs`, whose error is measured after
        each epoch.
      interval: number of epochs after which alpha is multiplied by `multiplier`, and the brake
        is reset. With 0 alpha is constant, and the brake is reset after each epoch.
      multiplier: factor of alpha after each `interval`.
      kept: start of the names of network files that are written during the
        training, by default the name `network`.
      kept_epochs: number of epochs between two of these files; 0 writes none.
    """

    config: str
    inputs: str
    outputs: str
    network: str
    overwrite: bool = False
    initial: str | None = "initial_network.nc"
    batch_size: int = 1024
    epochs: int = 40
    alpha: float = 0.025
    l2: float = 0.0001
    l1: float = 0.0
    mu: float = MU["mu"]
    mu1: float = MU["mu1"]
    optimizer: str = "sgd"
    seed: int = 12134
    resume: bool = False
    mesh: str | None = None
    validation: tuple[str, str] | None = None
    interval: int = 0
    multiplier: float = 1.0
    kept: str | None = None
    kept_epochs: int = 10


def train(command: Train) -> None:
    """Trains a network and writes it, also before the first and after each tenth epoch.

    Raises:
      DataError: a file is missing or wrong.
      FileExistsError: the network file exists, and must not be overwritten.
      FloatingPointError: the loss is not finite.
      ValueError: data and network do not match each other.
    """
    # If a training was killed just before its end, it may have written its network already.
    is_ending = command.resume and os.path.exists(checkpoints_of(command))
    may_exist = command.overwrite or is_ending
    if os.path.exists(command.network) and not may_exist:
        if command.resume and (ended := training_of(command.network)):
            with setting_mesh(command.mesh):
                if made(command).name() == ended:  # the training was complete
                    return
        raise FileExistsError(
            f"{command.network}: already exists; remove it, or name another file"
        )
    first_kept = None
    if command.kept_epochs and command.epochs >= command.kept_epochs:
        first_kept = _kept(command, command.kept_epochs)
    for path in (command.network, command.initial, first_kept):
        if path is not None:
            check_writable(path)
    with setting_mesh(command.mesh):
        made(command).run()


def _kept(command: Train, epoch: int) -> str:
    """The file name of the network that is kept after an epoch."""
    return f"{command.kept or command.network}{epoch}.nc"


def checkpoints_of(command: Train) -> str:
    """The folder of checkpoints, which is removed when the training ends."""
    return f"{command.network}.checkpoints"


def made(command: Train) -> Training:
    """Makes the network and reads its data, before training."""
    data = data_of(command.inputs, command.outputs)
    sizes = {name: dataset.size for name, dataset in data.items()}
    network = Definition.load(command.config, sizes)
    data = by_layer(network, data)
    network = network.with_inputs({name: d.is_sparse for name, d in data.items()})
    rule = rule_of(command, network.decay)
    sparse = {layer.name for layer in network.of_kind("Input") if layer.sparse}
    needed = sum(
        rule.memory(shape, rows_only=source in sparse)
        for (source, _), shape in weights_of(network).items()
    )
    check_fits(f"{command.config}: the weights", needed // jax.process_count())
    return Training(command, network, data)


class Training:
    """A network and its data. Data are given by the names of layers, as in `by_layer`.

    Attributes:
      model: the network.
      optimizer: its optimizer.
      orders: orders of the columns of some layers; see `order`.
      examples: examples for training.
      validation: examples on which the error is measured after each epoch, or None.
    """

    def __init__(
        self, command: Train, network: Definition, data: Mapping[str, FileDataset]
    ):
        self.command = command
        [examples, *_] = [dataset.num_examples for dataset in data.values()]
        outputs = network.of_kind("Output")
        target = first_of_like({name_of(o): data[o.name] for o in outputs})
        # The orders are equal on all meshes, so a training can be resumed on another mesh.
        self.orders = balanced_orders(network, data)
        parameters = None
        if network.weights_data is not None:
            _, stored = load_parameters(network.weights_data)
            check_parameters(network, stored)
            parameters = from_file_order(stored, self.orders)
        steps = -(-examples // command.batch_size)
        rule = rule_of(command, network.decay, command.interval * steps)
        self.model = Network(
            network,
            row_sparse=rule.row_sparse,
            dense_targets=not target.is_sparse,
            weighted=target.weights is not None,
            ignore_zeros=target.ignore_zeros,
            brake_steps=steps * max(command.interval, 1),
            parameters=parameters,
            rngs=nnx.Rngs(command.seed),
        )
        self.model.check_trainable()
        self.optimizer = Optimizer(self.model, rule)
        modules = (self.model, self.optimizer)
        nnx.update(modules, put_on_mesh(nnx.state(modules)))
        self.examples = Examples.of(network, data, self.orders)
        # The last epoch's error. It is set only in the first process, which prints it.
        self.error = math.nan
        self.validation = None
        if command.validation is not None:
            other = by_layer(network, data_of(*command.validation))
            self.validation = Examples.of(network, other, self.orders)

    def identity(self) -> dict[str, Any]:
        """The settings that must be equal when a training is resumed."""
        may_differ = ("epochs", "resume", "mesh")
        found = {n: v for n, v in vars(self.command).items() if n not in may_differ}
        network = repr(self.model.definition).encode()
        return found | {
            "what the config says": hashlib.sha256(network).hexdigest()[:16]
        }

    def name(self) -> str:
        """A hash of everything that determines the trained network; its file stores the hash."""
        files = ("network", "initial", "kept", "kept_epochs")
        decide = {n: v for n, v in self.identity().items() if n not in files}
        facts = repr([*decide.items(), self.command.epochs])
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    def run(self) -> None:
        """Trains, and writes the network files. All processes must call this."""
        command = self.command
        folder = checkpoints_of(command)
        identity = self.identity()
        if not command.resume:
            _remove(folder)
        is_first = processes.is_true_anywhere(not os.path.exists(folder))
        if command.initial is not None and is_first:
            self.save(command.initial)
        self.began = time.monotonic()
        try:
            fit(
                self.model,
                self.optimizer,
                self.examples.inputs,
                self.examples.targets,
                weights=self.examples.weights,
                batch_size=command.batch_size,
                num_epochs=command.epochs,
                seed=command.seed,
                shuffle=self.model.definition.shuffle_indices,
                checkpoint_dir=Checkpoints(folder, identity=identity),
                checkpoint_seconds=CHECKPOINT_SECONDS,
                resume=command.resume,
                log=self.note,
                after_epoch=self.end_epoch,
            )
            self.save(command.network, self.name())
        except FloatingPointError:  # otherwise the checkpoints stay, for `-resume`
            _remove(folder)
            raise
        _remove(folder)

    def note(self, step: int, entry: Mapping[str, float]) -> None:
        """Stores the error of an epoch."""
        self.error = entry["loss"]

    def end_epoch(self, epoch: int) -> None:
        """Prints an epoch's errors and time; each `kept_epochs` epochs it writes the network."""
        command, measured = self.command, None
        self.optimizer.flush(self.model)
        penalty = regularization(self.model, l2=command.l2, l1=command.l1)
        now = time.monotonic()
        if (found := self.validation) is not None:
            measured = self.model.mean_loss(
                found.inputs,
                found.targets,
                weights=found.weights,
                batch_size=command.batch_size,
            )
        print(
            f"NNNetwork::Train: Epoch {epoch}, average error {self.error + penalty:f}, "
            f"average training error {self.error:f}, average regularization error "
            f"{penalty:f}, elapsed time {now - self.began:f}s",
            flush=True,
        )
        if measured is not None:
            print(
                f"NNNetwork::Validate: Epoch {epoch}, average validation error "
                f"{measured:f}",
                flush=True,
            )
        self.began = time.monotonic()
        if command.kept_epochs and epoch % command.kept_epochs == 0:
            self.save(_kept(command, epoch))

    def save(self, path: str, training: str = "") -> None:
        """Writes the current network; `training` identifies the training that ended with it."""
        definition = self.model.definition
        parameters = to_file_order(self.model.parameters(), self.orders)
        processes.in_first(
            lambda: save_parameters(path, definition, parameters, training=training)
        )


def _remove(folder: str) -> None:
    processes.in_first(lambda: remove_folder(folder))


def rule_of(command: Train, decay: float, steps: int = 0) -> rules.DsstneRule:
    """The update rule that the flags describe.

    Args:
      command: values of the flags.
      decay: the network's `Decay`.
      steps: number of steps of an interval, as in `Decay`.
    """
    rate: Any = command.alpha
    if decay or steps:
        rate = rules.Decay(command.alpha, decay, command.multiplier, steps)
    penalties = {"weight_decay": command.l2, "l1": command.l1}
    mu, mu1 = command.mu, command.mu1
    match command.optimizer:
        case "sgd":
            return rules.SGD(rate, **penalties)
        case "momentum":
            return rules.Momentum(rate, mu=mu, **penalties)
        case "nesterov":
            return rules.Nesterov(rate, mu=mu, **penalties)
        case "adagrad":
            return rules.AdaGrad(rate, **penalties)
        case "rmsprop":
            return rules.RMSProp(rate, mu=mu, **penalties)
        case "adadelta":
            return rules.AdaDelta(mu=mu, **penalties)
        case "adam":
            return rules.Adam(rate, mu=mu, mu1=mu1, **penalties)
    known = ", ".join(OPTIMIZERS)
    raise ValueError(f"-optimizer {command.optimizer} is unknown; known: {known}")
