"""Times `fit` of models of histories, of a DLRM and of items on one GPU and on two.

    python benchmarks/fit_mesh.py run [--commit NAME]     on two GPUs of one host
    python benchmarks/fit_mesh.py table                   anywhere

HSTU and SASRec have width 256, 4 heads, 2 blocks and 1,024 sampled negatives among 1,000,000
items, or the exact softmax over 200,000. Histories have lognormal lengths with a mean of 70
entries, at most 200 of which are read. The rule is Adam. The DLRM is that of
`workloads.clicks_to_fit`. Layers compute in bfloat16. *Items* is an autoencoder of Gowalla's size
in float32. A part is one process: model, law of the
items, loss, examples of a batch, and the axis over which two GPUs divide. One GPU has no mesh and
is the only one that the process sees; *beside* has no mesh either, and sees two. Half of the batch on one bounds the gain of two. A part
trains twice from the same seed, and says whether both trainings end with the same bits. *Narrow*
sends vectors of items and their gradients as bfloat16; *same* is `fit(deterministic=True)`.
`notes/fit_mesh.md` predicts a step from its bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.sparse
from report import command, wait_for_turn
from workloads import clicks_to_fit, histories_to_fit

_EPOCHS, _USERS = 4, 65_536
_SHAPE, _DENSITY = (29_858, 40_981), 8.4e-4  # Gowalla's users, items and entries
# Loss: the number of items, and of sampled negatives.
_LOSSES = {"sampled": (1_000_000, 1024), "exact": (200_000, None)}
_CASES = (
    ("hstu", "uniform", "sampled", 2048),
    ("sasrec", "uniform", "sampled", 2048),
    ("hstu", "zipf", "sampled", 2048),
    ("sasrec", "zipf", "sampled", 2048),
    ("hstu", "uniform", "exact", 512),
    ("sasrec", "uniform", "exact", 512),
    ("dlrm", "zipf", "clicks", 65_536),
    ("items", "uniform", "entries", 512),
)
# The sizes of the axes "data" and "model", and further arguments of `fit`.
_WAYS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, {}),
    "beside": (1, 1, {}),
    "data": (2, 1, {}),
    "model": (1, 2, {}),
    "data_narrow": (2, 1, {"wire_dtype": "bfloat16"}),
    "model_narrow": (1, 2, {"wire_dtype": "bfloat16"}),
    "data_same": (2, 1, {"deterministic": True}),
}


def _parts() -> Iterator[str]:
    for model, law, loss, batch in _CASES:
        for way in _WAYS:
            if (
                (loss == "exact" and "narrow" in way)
                or (loss == "clicks" and way.startswith("data"))
                or (loss == "entries" and way not in ("one", "beside"))
                or (way == "data_same" and (model, law, loss) != _CASES[0][:3])
            ):
                continue
            sizes = {"one": (batch // 2, batch), "beside": (batch,)}.get(
                way, (batch, 2 * batch)
            )
            yield from (f"{model} {law} {loss} {size} {way}" for size in sizes)


def _measure(part: str) -> Iterator[dict]:
    import jax
    from flax import nnx

    import sparsejax as sj

    name, law, loss, batch, way = part.split()
    data, group, options = _WAYS[way]
    on_gpu = jax.default_backend() == "gpu"
    size, rng = int(batch) if on_gpu else 64, np.random.default_rng(0)
    if name == "dlrm":
        config, examples, rule = clicks_to_fit(rng, tiny=not on_gpu)
    elif name == "items":
        matrix = scipy.sparse.random(*_SHAPE, _DENSITY, "csr", np.float32, rng=rng)
        matrix.data[:] = 1
        examples = sj.SparseDataset.from_scipy(matrix)
        config = sj.NetworkConfig.autoencoder(hidden=(256,))
        rule = sj.optimizers.adam(1e-3)
    else:
        items, negatives = _LOSSES[loss]
        items, users, width = (
            (items, _USERS, 256) if on_gpu else (items // 1000, 256, 16)
        )
        examples = histories_to_fit(rng, items, users, law)
        made = {"hstu": sj.HSTUConfig, "sasrec": sj.SASRecConfig}[name]
        config = made(
            max_length=200, width=width, heads=4, negatives=negatives, dtype="bfloat16"
        )
        rule = sj.optimizers.adam(1e-3)
    mesh = contextlib.nullcontext()
    if data * group > 1:
        mesh = jax.set_mesh(sj.make_mesh(data=data, model=group))

    def trained():
        model, optimizer = sj.build(config, examples, rule)
        # The first epoch compiles.
        found = sj.fit(
            model,
            optimizer,
            examples,
            num_epochs=_EPOCHS,
            batch_size=size,
            seed=0,
            log=lambda *_: wait_for_turn(),
            **options,
        )
        return found, jax.tree.leaves(nnx.state(model, nnx.Param))

    with mesh:
        found, first = trained()
        again, second = trained()
        same = all(bool((a == b).all()) for a, b in zip(first, second, strict=True))
    fastest = max(entry["examples_per_second"] for entry in (*found, *again))
    yield {
        "model": name,
        "law": law,
        "loss": loss,
        "batch": size,
        "way": way,
        "visible": jax.device_count(),
        "milliseconds": round(1e3 * size / fastest, 3),
        "losses": [round(entry["loss"], 5) for entry in found],
        "same_bits_twice": same,
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }


if __name__ == "__main__":
    parts = {
        part: {"CUDA_VISIBLE_DEVICES": "0" if part.endswith(" one") else "0,1"}
        for part in _parts()
    }
    command(__doc__, __file__, parts, _measure, together=True)
