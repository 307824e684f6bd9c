"""Times `fit` of a DLRM in bfloat16 on one GPU and on two.

    python benchmarks/click_mesh.py run [--commit NAME]     on two GPUs of one host
    python benchmarks/click_mesh.py table                   anywhere

The model has 26 tables of 128 columns, an example one id of each (zipf 1.2), and the rule is
row-wise Adagrad. A part is one process: examples of a batch, and the number of GPUs. One GPU has no
mesh and is the only one that the process sees. Two divide all tables by their rows over "model";
*narrow* sends rows and gradients as bfloat16.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from report import command, wait_for_turn
from visible_gpus import clicks

_EPOCHS = 6
# Sizes of "model", and further arguments of `fit`.
_WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "two": (2, {}),
    "narrow": (2, {"wire_dtype": "bfloat16"}),
}
_PARTS = {
    f"{batch} {way}": {"CUDA_VISIBLE_DEVICES": "0" if way == "one" else "0,1"}
    for way in _WAYS
    for batch in ((32_768, 65_536) if way == "one" else (65_536, 131_072))
}


def _measure(part: str) -> Iterator[dict]:
    import jax

    import sparsejax as sj

    batch, way = part.split()
    model, options = _WAYS[way]
    mesh = contextlib.nullcontext()
    if model > 1:
        mesh = jax.set_mesh(sj.make_mesh(model=model))
    config, data, rule, _ = clicks(np.random.default_rng(0))
    with mesh:
        network, optimizer = sj.build(config, data, rule)
        # The first epoch compiles.
        found = sj.fit(
            network,
            optimizer,
            data,
            num_epochs=_EPOCHS,
            batch_size=int(batch),
            seed=0,
            log=lambda *_: wait_for_turn(),
            **options,
        )
    fastest = max(entry["examples_per_second"] for entry in found)
    yield {
        "batch": int(batch),
        "way": way,
        "visible": jax.device_count(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "milliseconds": round(1e3 * int(batch) / fastest, 3),
        "first_loss": round(found[0]["loss"], 5),
        "last_loss": round(found[-1]["loss"], 5),
        "versions": {"jax": jax.__version__, "device": jax.devices()[0].device_kind},
    }


def main() -> None:
    command(__doc__, __file__, _PARTS, _measure, together=True)


if __name__ == "__main__":
    main()
