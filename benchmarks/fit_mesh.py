"""Times `fit` on 1, 2, 4 and 8 devices of one host, beside a prediction from bytes.

    python benchmarks/fit_mesh.py run --only 'dlrm* 4 *' '* one 1 *'   on GPUs of one host
    python benchmarks/fit_mesh.py table                                anywhere

A part is a case, a way, a number of devices and a batch. Each part is a process, which sees that
many GPUs (with the way *beside* it sees all GPUs, and sets no mesh). It prints its prediction,
trains, and prints the time of a step and the gain over one device. A run replaces only the results
of its own parts. On a CPU all sizes are tiny, and `JAX_NUM_CPU_DEVICES=8` makes the devices.
Predictions are for H200s.

Items: 8 or 40 million in and out, 256 units, RMSProp, fused, 64 entries a row, zipf .8. *Epoch* is
that of `epoch.py`. *Dlrm* has the 26 tables of `workloads.clicks_to_fit`; *dynamic* has dynamic
ones. HSTU, SASRec and the GRU have width 256, 4 heads, 2 blocks and 1,024 sampled negatives among
1,000,000 items, or the exact softmax over 200,000, as has *own*, a model of `docs/own_models.md`;
lengths are lognormal, 70 entries in the mean. *Big* is a table of 400 M rows of 256 numbers, or of
as many as half of the devices and the disk have room for: its training is killed behind its first
checkpoint and goes on with half of the devices. Ways name the mesh axis; *narrow* sends bfloat16,
*same* is `fit(deterministic=True)`, trained twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import epoch
import numpy as np
from report import RESULTS, command, largest, table, write_section
from timing import time_kernels
from workloads import (
    DLRM_IDS,
    DLRM_LAYERS,
    autoencoder,
    clicks_to_fit,
    histories_to_fit,
    rows_of_items,
)

_DEVICES, _EPOCHS = (1, 2, 4, 8), 4
_HERE = pathlib.Path(__file__).resolve().parent
_BIG, _BIG_DIM = 400_000_000, 256
_USERS, _WIDTH, _NEGATIVES = 65_536, 256, 1024
_CARD = "NVIDIA H200"  # the GPU for which predictions and tables are made
_FEW = 150_000  # number of rows on a CPU: smaller tables are not divided
# For each way, the mesh axis of the devices, and further arguments of `fit`.
_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("model", {}),
    "beside": ("model", {}),
    "data": ("data", {}),
    "model": ("model", {}),
    "data_narrow": ("data", {"wire_dtype": "bfloat16"}),
    "model_narrow": ("model", {"wire_dtype": "bfloat16"}),
    "data_same": ("data", {"deterministic": True}),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A training: kind of model, batch size on all devices, ways, and arguments for the kind."""

    kind: str
    batch: int
    ways: tuple[str, ...] = ("model",)
    given: tuple[Any, ...] = ()
    grows: bool = True


_BOTH = "data", "model", "data_narrow", "model_narrow"
CASES = {
    "items-8M": Case("items", 1024, given=(8_000_000, 64, 32_768), grows=False),
    "items-40M": Case("items", 1024, given=(40_000_000, 64, 32_768), grows=False),
    "epoch": Case("epoch", epoch.BATCH, grows=False),
    "dlrm-float32": Case("clicks", 65_536, ("model", "model_narrow"), ("float32",)),
    "dlrm-bfloat16": Case("clicks", 65_536, ("model", "model_narrow"), ("bfloat16",)),
    "dynamic": Case("clicks", 65_536, ("model",), ("float32", 2**20)),
    "hstu": Case("histories", 2048, (*_BOTH, "data_same"), ("uniform", 1_000_000)),
    "sasrec": Case("histories", 2048, _BOTH, ("uniform", 1_000_000)),
    "hstu-zipf": Case("histories", 2048, ("data", "model"), ("zipf", 1_000_000)),
    "gru": Case("histories", 2048, ("data", "model"), ("uniform", 1_000_000)),
    "own-exact": Case("histories", 512, ("data", "model"), ("uniform", 200_000)),
    "hstu-exact": Case("histories", 512, ("data", "model"), ("uniform", 200_000)),
    "sasrec-exact": Case("histories", 512, ("data", "model"), ("uniform", 200_000)),
    "gowalla": Case("gowalla", 512, (), (40_981, 34, 29_858), grows=False),
    "big": Case("big", 65_536, ("model",), grows=False),
}


def parts() -> dict[str, dict[str, str]]:
    """The environment variables of each part. One device also has parts with smaller batches,
    which bound the possible gain.
    """
    names = []
    for name, case in CASES.items():
        batch, ways = case.batch, case.ways
        sizes = [batch // n for n in _DEVICES] if case.grows else [batch]
        if name not in ("items-40M", "big"):
            names += [f"{name} one 1 {size}" for size in sizes]
            names += [f"{name} beside {n} {batch}" for n in _DEVICES[1:]]
        for way, n in ((way, n) for way in ways for n in _DEVICES[1:]):
            names += [
                f"{name} {way} {n} {b}" for b in (batch, n * batch)[: 1 + case.grows]
            ]
    return {
        name: {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(int(name.split()[2])))),
            "XLA_PYTHON_CLIENT_MEM_FRACTION": ".95",
        }
        for name in names
    }


# --- predictions ---


@dataclasses.dataclass(frozen=True)
class Load:
    """Work of each device in a step: bytes of memory, operations, and bytes sent.

    Rates: a copy moves 4.3 TB/s, matrix products compute 790 (bfloat16) and 400 TFLOP/s (TF32),
    GPUs of a process copy rows to each other at 380 GB/s. A sum over devices takes 21 us, and its
    bytes pass a ring at 262 GB/s (27, 45 and 70 us for 1, 4 and 8 MB on four H200s).
    """

    memory: float
    bfloat16: float
    tf32: float
    copied: float = 0.0
    summed: float = 0.0
    sums: int = 0

    @property
    def work(self) -> float:
        """Milliseconds for memory accesses and matrix products."""
        return 1e3 * (self.memory / 4.3e12 + self.bfloat16 / 7.9e14 + self.tf32 / 4e14)

    @property
    def wire(self) -> float:
        """Milliseconds for data sent between devices."""
        ring = self.summed / 262e9 + 21e-6 * self.sums
        return 1e3 * (self.copied / 380e9 + ring)


@functools.cache
def _distinct(draws: int, rows: int, skew: float) -> float:
    """The expected number of distinct ids among `draws` draws."""
    share = np.arange(1.0, rows + 1) ** -skew if skew else np.ones(1)
    share /= share.sum() if skew else rows
    return float(-np.expm1(draws * np.log1p(-share)).sum() * (1 if skew else rows))


def load(name: str, way: str, devices: int, batch: int) -> Load:
    """The work of a part on each of its devices."""
    case, (axis, options) = CASES[name], _WAYS[way]
    if case.kind in ("items", "epoch", "gowalla"):
        return _load_of_items(name, devices, batch)
    if case.kind == "histories":
        item = 2 if "wire_dtype" in options else 4
        return _load_of_histories(name, axis, devices, batch, item)
    tables, dim = ((_BIG,), _BIG_DIM) if case.kind == "big" else (DLRM_IDS, 128)
    wire = options.get("wire_dtype")
    narrow = "float32" not in case.given
    return _load_of_clicks(tables, dim, devices, batch, wire, narrow)


def _load_of_items(name: str, devices: int, batch: int) -> Load:
    """Counts reads and writes of weights and their state, and of score gradients in bfloat16."""
    items, entries, hidden = 27_278, 144, (1024,) * 3
    if name != "epoch":
        items, entries, _ = CASES[name].given
        hidden = (256,)
    inner = sum(a * b for a, b in itertools.pairwise(hidden))
    drawn, width = batch * entries, hidden[-1]
    rows = 4 * width * drawn + 16 * width * _distinct(drawn, items, 0.8)
    memory = 16 * width * items + 4 * batch * items + rows + 16 * inner
    ring = 2 * (devices - 1) / devices
    sums = (len(hidden) + 1) * (devices > 1)
    return Load(
        memory / devices,
        6 * batch * items * width / devices,
        6 * batch * inner / devices,
        summed=sums * ring * 4 * batch * width,
        sums=sums,
    )


def _load_of_clicks(tables, dim, devices, batch, wire, narrow) -> Load:
    """Counts eight passes over the rows of the bags, and three over activations
    (`notes/dlrm_mesh.md`).
    """
    import sparsejax as sj

    vectors = len(tables) + 1
    bottom = 13, *DLRM_LAYERS["bottom"], dim
    top = dim + vectors * (vectors - 1) // 2, *DLRM_LAYERS["top"], 1
    pairs = [*itertools.pairwise(bottom), *itertools.pairwise(top)]
    weights, sent = sum(a * b for a, b in pairs), 0
    units = sum(b for _, b in pairs) * (2 if narrow else 4)
    if devices > 1:
        features = {f"t{i}": n for i, n in enumerate(tables)}
        made = functools.partial(sj.embeddings.TableConfig, dim=dim, placement="rows")
        planned = sj.plan_embeddings(
            {name: made(rows) for name, rows in features.items()},
            {name: name for name in features},
            batch_size=batch,
            model=devices,
            popularity=dict.fromkeys(features, 1.2),
            rule=sj.optimizers.rowwise_adagrad(0.02),
            memory=10**12,
            wire_dtype=wire,
        )
        sent = planned.devices[0].sent
    flops = 6 * batch / devices * weights
    own = batch / devices * (8 * 4 * dim * len(tables) + 3 * units)
    return Load(
        own + 4 * sent,  # both sides write and read rows and gradients
        flops * narrow,
        flops * (not narrow),
        sent,
        8 * weights * (devices - 1) / devices,
        int(devices > 1),
    )


def _load_of_histories(
    name: str, axis: str, devices: int, batch: int, item: int
) -> Load:
    """Counts tokens and rows. Tokens are divided over all devices, rows are not divided over
    "data".
    """
    law, items = CASES[name].given
    skew = 1.05 if law == "zipf" else 0.0
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(50), 1, _USERS), 2, 200)
    tokens = batch * float(lengths.mean()) / devices
    products = (5 if name.startswith("hstu") else 12) * 2 * _WIDTH**2
    scored = items if name.endswith("exact") else _NEGATIVES
    pairs = batch / devices * float((lengths**2).mean()) / 2
    distinct = _distinct(round(tokens), items, skew)
    all_rows = _distinct(round(tokens * devices), items, skew)
    if name.endswith("exact"):
        distinct = all_rows = items
    held = all_rows if axis == "data" else all_rows / devices
    # With Adam a row has three arrays. Each token reads and writes 20 arrays of a block.
    memory = 6 * 4 * _WIDTH * held + tokens * _WIDTH * (2 * 20 * 2 * 2 + 12)
    crossing = devices - 1 if axis == "data" else 2 * (devices - 1) / devices
    crossing *= distinct * _WIDTH * item
    flops = 6 * tokens * (products + scored * _WIDTH) + 14 * pairs * _WIDTH * 2
    layers = 2 * 4 * products * (devices - 1) / devices
    return Load(memory + 2 * crossing, flops, 0, crossing, layers, int(devices > 1))


def committed() -> list[dict]:
    """The measured results of all parts, which are stored in the repository."""
    path = RESULTS / "fit_mesh.json"
    return json.loads(path.read_text())["results"] if path.exists() else []


def measured(
    results: list[dict], part: str, *, run: str | None = None, device: str = _CARD
) -> dict:
    """The result of a part on a card, from the given run if it has one; an empty dict if there is
    none.
    """
    found = [r for r in results if r["of_part"] == part and r["device"] == device]
    return next((r for r in found if r.get("run") == run), (found or [{}])[0])


def predicted(results, name: str, way: str, devices: int, batch: int) -> float:
    """Predicts milliseconds of a step: one device's time, divided, plus the time of communication.

    If half of the batch was also measured on one device, the prediction includes a time that does
    not depend on the batch. If two devices were measured, communication is scaled by the ratio of
    their measured to their computed time. Without measurements, all is computed from bytes and
    products.
    """
    base = CASES[name].batch
    if way == "beside":
        way, devices = "one", 1

    def known(way, n, size):
        found = measured(results, f"{name} {way} {n} {size}")
        return found.get("milliseconds")

    # The result with the fewest devices that was measured.
    whole, other, n = next(
        ((t, w, n) for n in _DEVICES for w in ("one", way) if (t := known(w, n, base))),
        (None, way, devices),
    )
    fixed, more, wire = 0.0, 1.0, 1.0
    if whole is not None:
        half = known("one", 1, base // 2) if n == 1 else None
        fixed = max(0.0, 2 * half - whole) if half else 0.0
        from_bytes = load(name, other, n, base)
        more = (whole - fixed - from_bytes.wire) / from_bytes.work
    sizes, like = (2 * base, base)[batch <= base :], (way, way.split("_")[0])
    for size, other in itertools.product(sizes, like if n < 2 <= devices else ()):
        if two := known(other, 2, size):
            from_bytes = load(name, other, 2, size)
            rest = two - fixed - more * from_bytes.work
            wire = max(1.0, rest / from_bytes.wire)
            break
    own = load(name, way, devices, batch)
    return fixed + more * own.work + wire * own.wire


# --- measurements ---


def measure(part: str) -> Iterator[dict]:
    """Prints the prediction of a part, then measures the part."""
    import jax

    name, way, *numbers = part.split()
    devices, batch = map(int, numbers)
    results = committed()
    expected = predicted(results, name, way, devices, batch)
    own = load(name, way, devices, batch)
    card, base = jax.devices()[0].device_kind, CASES[name].batch

    def said(kind: str, milliseconds: float, device: str) -> None:
        one = measured(results, f"{name} one 1 {base}", device=device)
        one = one.get("milliseconds", 0.0) * batch / base
        gain = f", {one / milliseconds:.2f}x of one" * bool(one)
        print(f"{part}: {kind} {milliseconds:.3f} ms{gain}", file=sys.stderr)

    sent = own.copied + own.summed
    print(
        f"{part}: {own.memory / 1e9:.2f} GB of memory, {sent / 1e6:.1f} MB sent, "
        f"{own.work:.3f} ms of work and {own.wire:.3f} of wire",
        file=sys.stderr,
    )
    said("predicted", expected, _CARD)
    run = _big if CASES[name].kind == "big" else _fitted
    found = run(name, way, devices, batch)
    said("took", found["milliseconds"], card)
    yield {
        "of_part": part,
        "batch": batch,
        "device": card,
        "visible": jax.device_count(),
        "predicted_milliseconds": round(expected, 3),
        "memory_bytes": round(own.memory),
        "sent_bytes": round(sent),
        **found,
    }


def _made(name: str, batch: int) -> tuple[Callable, Any, dict[str, Any]]:
    """The function that makes model and optimizer, the data, and arguments of `fit`."""
    import jax
    from flax import nnx

    import sparsejax as sj

    case, rng = CASES[name], np.random.default_rng(0)
    on_gpu = jax.default_backend() == "gpu"
    rule: Any = sj.optimizers.adam(1e-3)
    if case.kind == "epoch":
        data = epoch.make_rows(rng, *(() if on_gpu else (256, 512, 4000)))
        sizes: Any = () if on_gpu else (512, (16,) * 3)
        return lambda: epoch.new_modules(*sizes), data, {"fused": True}
    if case.kind in ("items", "gowalla"):
        size, length, rows = case.given
        size, rows = (size, rows) if on_gpu else (2048, 4 * batch)
        data = rows_of_items(rng, rows, length, size)
        network: Any = sj.NetworkConfig.autoencoder(hidden=(256,))
        if case.kind == "items":
            network = autoencoder((256 if on_gpu else 16,))
            rule = sj.optimizers.rmsprop(1e-3)
        named = {"inputs": size, "outputs": size, "rngs": nnx.Rngs(0)}

        def made():
            model = sj.FeedForward(network, **named)
            return model, sj.Optimizer(model, rule)

        return made, data, {"fused": case.kind == "items"}
    if case.kind == "clicks":
        dtype, *rows = case.given
        tables, size = (DLRM_IDS, 2**20) if on_gpu else ((_FEW, *(500,) * 25), 256)
        more = {"dtype": dtype, "examples": size}
        for most in rows:
            most = most if on_gpu else 2**10
            more["dynamic"] = sj.clicks.DynamicTables(num_rows=most)
        config, data, rule = clicks_to_fit(
            rng, tables, dim=128 if on_gpu else 8, **more
        )
    else:
        law, items = case.given
        items, users, width = (items, _USERS, _WIDTH) if on_gpu else (1000, 256, 16)
        data = histories_to_fit(rng, items, users, law)
        length = 200 if on_gpu else 16
        if name.startswith("own"):

            def made():
                rngs = nnx.Rngs(0)
                model = _own(data.num_features, width, places=length, rngs=rngs)
                return model, sj.Optimizer(model, rule)

            return made, data, {}
        kinds = {"hstu": sj.HSTUConfig, "gru": sj.GRUConfig}
        options: dict[str, Any] = (
            {} if name == "gru" else {"heads": 4, "dtype": "bfloat16"}
        )
        made_by: Any = kinds.get(name.split("-")[0], sj.SASRecConfig)
        config = made_by(
            max_length=length,
            width=width,
            negatives=None if name.endswith("exact") else _NEGATIVES,
            **options,
        )
    return lambda: sj.build(config, data, rule), data, {}


def _own(*sizes: int, **options: Any):
    """The model that docs/own_models.md shows."""
    page = (_HERE.parent / "docs/own_models.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    given: dict[str, Any] = {}
    exec("".join((blocks[0], next(b for b in blocks if "class Fading" in b))), given)  # noqa: S102
    return given["Fading"](*sizes, **options)


def _mesh(way: str, devices: int):
    """The context of a mesh over some devices. For one device, and for the way *beside*, no mesh
    is set.
    """
    import jax

    import sparsejax as sj

    if devices == 1 or way == "beside":
        return contextlib.nullcontext()
    along = _WAYS[way][0] == "model"
    data, model = (1, devices) if along else (devices, 1)
    return jax.set_mesh(sj.make_mesh(data=data, model=model))


def _fitted(name: str, way: str, devices: int, batch: int) -> dict:
    import jax
    from flax import nnx

    import sparsejax as sj

    on_gpu = jax.default_backend() == "gpu"
    batch = batch if on_gpu else 64
    made, data, options = _made(name, batch)
    options |= {"batch_size": batch, "seed": 0, **_WAYS[way][1]}

    def trained(pair: tuple[Any, Any], epochs: int = _EPOCHS) -> list[dict]:
        # The first epoch is omitted, because it compiles programs.
        model, optimizer = pair
        return sj.fit(model, optimizer, data, num_epochs=epochs, **options)

    with _mesh(way, devices):
        found = trained(pair := made())
        result: dict[str, Any] = {
            "milliseconds": _fastest(found, batch),
            "losses": [round(entry["loss"], 5) for entry in found],
            "peak_bytes": (jax.devices()[0].memory_stats() or {}).get(
                "peak_bytes_in_use"
            ),
        }
        if way.endswith("same"):
            trained(other := made())
            states = (nnx.state(model, nnx.Param) for model, _ in (pair, other))
            same = jax.tree.map(lambda a, b: bool((a == b).all()), *states)
            result["same_bits_twice"] = all(jax.tree.leaves(same))
        # Kernel times show which part of the measured time the prediction lacks.
        if on_gpu:
            steps = found[-1]["step"] // _EPOCHS * devices
            times = time_kernels(lambda _: trained(pair, 1), 1, warm=1)
            times = {kernel: each / steps for kernel, each in times.items()}
            result["kernel_microseconds"] = round(sum(times.values()), 1)
            result["kernels"] = largest(times, 20)
    return result


# --- a large table ---


def _rows_that_fit(devices: int, folder: str) -> int:
    """Number of rows for which half of the devices have memory, and the disk for two and a half
    checkpoints.
    """
    import jax

    row = 4 * (_BIG_DIM + 1)
    if jax.default_backend() != "gpu":
        return _FEW
    memory = (jax.devices()[0].memory_stats() or {})["bytes_limit"]
    room = 0.8 * memory * max(1, devices // 2), shutil.disk_usage(folder).free / 2.5
    return min(_BIG, int(min(room) / row))


def train_big(
    folder: str, rows: int, devices: int, batch: int, epochs: int, resume: bool = False
) -> list[dict]:
    """Trains the table on some devices, and prints each epoch; returns the epochs of this call."""
    import sparsejax as sj

    dim, size = (8, 256) if batch < 1024 else (_BIG_DIM, 4 * batch)
    rng, found = np.random.default_rng(0), []
    config, data, rule = clicks_to_fit(rng, (rows,), dim=dim, examples=size)

    def log(step: int, entry: Mapping[str, float]) -> None:
        found.append({"step": step, **entry})
        print(json.dumps(found[-1]), flush=True)

    with _mesh("model", devices):
        modules = sj.build(config, data, rule)
        how: dict[str, Any] = {"checkpoint_dir": folder, "resume": resume}
        how |= {"checkpoint_seconds": 1.0, "batch_size": batch, "log": log}
        sj.fit(*modules, data, num_epochs=epochs, **how)
    return found


def _big(name: str, way: str, devices: int, batch: int) -> dict:
    """Kills a training after its first checkpoint, and resumes it on half of the devices."""
    import jax

    from sparsejax.engine.train.checkpoint import Checkpoints

    environment = dict(os.environ)
    if jax.default_backend() != "gpu":
        batch = 64
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    with tempfile.TemporaryDirectory() as folder:
        given = f"{folder}/saved", _rows_that_fit(devices, folder), devices, batch
        program = f"import fit_mesh; fit_mesh.train_big{(*given, 10**6)}"
        command = [sys.executable, "-c", program]
        before, saved = [], Checkpoints(given[0])
        with subprocess.Popen(
            command, cwd=_HERE, env=environment, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                before.append(json.loads(line))
                if len(before) > 1 and saved.steps():
                    child.kill()
        if not before:
            raise RuntimeError("the training ended before its first epoch did")
        resumed, half = saved.steps()[-1], max(1, devices // 2)
        epochs = before[-1]["epoch"] + 3
        after = train_big(given[0], given[1], half, batch, epochs, resume=True)
    of_epoch = {entry["epoch"]: entry["loss"] for entry in (*before, *after)}
    return {
        "milliseconds": _fastest(before[1:], batch),
        "rows": given[1],
        "killed_after_step": before[-1]["step"],
        "resumed_at_step": resumed,
        "devices_afterwards": half,
        "milliseconds_afterwards": _fastest(after[1:], batch),
        "epochs": epochs,
        "losses": [round(each, 5) for each in of_epoch.values()][-5:],
    }


def _fastest(entries: list[dict], batch: int) -> float:
    """Milliseconds of a step in the fastest epoch."""
    return round(1e3 * batch / max(e["examples_per_second"] for e in entries), 3)


def _show(report: dict) -> None:
    """Prints a row for each case, way and growth of the batch. Measured cells are bold."""
    results, rows = report["results"], []
    for name, case in CASES.items():
        if name == "gowalla":
            continue
        for way, grows in itertools.product(case.ways, (False, True)[: 1 + case.grows]):
            cells: list[str] = []
            base = name, "one", 1, case.batch
            for devices in _DEVICES:
                batch = case.batch * (devices if grows else 1)
                own = name, "one" if devices == 1 else way, devices, batch
                row = measured(results, " ".join(map(str, own)))
                one = measured(results, " ".join(map(str, base)), run=row.get("run"))
                one, found = one.get("milliseconds"), row.get("milliseconds")
                bold = "" if found is None else "**"
                if found is None:
                    found, one = (
                        predicted(results, *own),
                        one or predicted(results, *base),
                    )
                times = f", {one * batch / case.batch / found:.2f}x" if one else ""
                cells.append(f"{bold}{found:.3g}{times}{bold}")
            size = f"{case.batch:,}" + " x devices" * grows
            rows.append([name, way, size, *cells])
    columns = ["case", "way", "batch", *map(str, _DEVICES)]
    write_section("milliseconds of a step, gain", table(columns, rows))


if __name__ == "__main__":
    command(__doc__, __file__, parts(), measure, _show)
