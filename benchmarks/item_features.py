"""What content of items brings to models over all items, and what it costs.

    python benchmarks/item_features.py quality --data FILE --attributes FILE   on a GPU
    python benchmarks/item_features.py step --content vectors                  on a GPU
    python benchmarks/item_features.py table                                   anywhere

FILE is that of `sequences.py`, and the attributes are a JSON object with a list of tags for
each item; both may be packed (.xz). `quality` predicts the last item of each user, with
vectors by ids alone and with tags, and measures items by the number of their entries. The
last but one is for validation, and not trained on.
`step` times a training step of SASRec over a million items, and says how much memory the process had at most. With
`--forms parts stored` first the vectors of the items are made part by part, and then all are stored.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
import time
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from flax import nnx
from report import print_means, training_command
from sequences import read

import sparsejax as sj

K = 10
MODELS = ("hstu", "sasrec", "autoencoder")
# Of `step`.
WIDTH, BLOCKS, LENGTH, BATCH = 256, 2, 50, 256
_VECTORS, _TAGS, _KINDS = 768, 20, 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attributes", type=pathlib.Path)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--forms", nargs="+", help="of `quality`, or stored, parts")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="by default the recipe's")
    parser.add_argument("--content", choices=("none", "vectors", "tags"))
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--steps", type=int, default=30)
    training_command(
        parser,
        __file__,
        {"quality": _quality, "step": _step},
        {
            "table": lambda report: print_means(
                report, "model", "form", "content", "items"
            )
        },
        data="FILE",
        without_data=("step",),
    )


def _config(name: str, train: sj.SequenceDataset) -> Any:
    if name == "autoencoder":
        return sj.NetworkConfig.autoencoder((256,))
    document: dict[str, Any] = {"version": 1, "model": name}
    if jax.default_backend() == "gpu":
        document["dtype"] = "bfloat16"
    return sj.sequence.SequenceConfig.from_json(document).suited_to(train)


def _fitted(name: str, train, features, seed: int, epochs: int | None) -> Any:
    """A model, trained by the recipe."""
    config = _config(name, train)
    is_matrix = name == "autoencoder" and isinstance(train, sj.SequenceDataset)
    data = train.to_sparse() if is_matrix else train
    recipe = sj.training.recipe(config, data, num_epochs=epochs)
    model, optimizer = sj.build(
        config, data, recipe.rule, item_features=features, seed=seed
    )
    sj.fit(
        model,
        optimizer,
        data,
        batch_size=recipe.batch_size,
        num_epochs=recipe.num_epochs,
        seed=seed,
    )
    return model


def _quality(arguments: argparse.Namespace) -> Iterator[tuple[dict, dict]]:
    data, features = read(arguments.data), sj.read_item_features(arguments.attributes)
    before, test = data.split_last()
    train, validation = before.split_last()
    results: list[dict] = []
    forms = arguments.forms or ("ids", "tags")
    trials = itertools.product(range(arguments.seeds), arguments.models, forms)
    for seed, name, form in trials:
        tagged = form == "tags"
        start = time.perf_counter()
        model = _fitted(
            name, train, features if tagged else None, seed, arguments.epochs
        )
        fitted = time.perf_counter() - start
        parts: Any = before, test, train, validation
        if name == "autoencoder":
            parts = tuple(part.to_sparse() for part in parts)
        result: dict[str, Any] = {"model": name, "form": form, "seed": seed}
        result |= _measured(model, parts)
        result["fit_seconds"] = round(fitted, 1)
        result["seconds"] = round(time.perf_counter() - start, 1)
        if tagged:
            half = model.output.content.log_half[...]
            result["half"] = round(float(jnp.exp(half)), 3)
        results.append(result)
        yield {"results": results}, result
        if tagged and name != "autoencoder":
            ranked = sj.sequence.WithNeighbours(model)
            result = {"model": name, "form": "tags and neighbours", "seed": seed}
            results.append(result | _measured(ranked, parts))
            yield {"results": results}, results[-1]


def _measured(model: Any, parts: tuple) -> dict[str, float]:
    """Figures of the last items by their entries, and of the last but one in all."""
    shown, wanted, known, chosen = parts
    found = sj.evaluate(
        model, shown, wanted, k=K, exclude=shown, popularity=known, by="entries"
    )
    other = sj.evaluate(model, known, chosen, k=K, exclude=known, popularity=None)
    result: dict[str, float] = {}
    for metric in ("recall", "ndcg"):
        result[f"validation {metric}@{K}"] = round(other[f"{metric}@{K}"], 5)
    kept = (f"recall@{K}", f"ndcg@{K}", f"share@{K}", f"coverage@{K}", "entries[")
    return result | {k: round(v, 5) for k, v in found.items() if k.startswith(kept)}


def _step(arguments: argparse.Namespace) -> Iterator[tuple[dict, dict]]:
    if arguments.content is None:
        raise SystemExit(
            "step needs --content none, --content vectors or --content tags"
        )
    items, rng = arguments.items, np.random.default_rng(0)
    tags = vectors = None
    if arguments.content == "vectors":
        some = rng.standard_normal((10_000, _VECTORS)) / _VECTORS**0.5
        vectors = np.resize(some.astype(np.float16), (items, _VECTORS))
    if arguments.content == "tags":
        columns = rng.integers(0, _KINDS, (items, _TAGS), np.int32)
        columns.sort(axis=1)
        ends = np.arange(items + 1, dtype=np.int64) * _TAGS
        ones = np.ones(columns.size, np.float32)
        tags = scipy.sparse.csr_array((ones, columns.ravel(), ends), (items, _KINDS))
    sizes, content = None, None
    if arguments.content != "none":
        sizes = sj.nn.ContentSizes.of(tags, vectors)
    config = sj.SASRecConfig(
        max_length=LENGTH,
        width=arguments.width,
        blocks=BLOCKS,
        dropout=0.2,
        temperature=None,
        dtype="bfloat16",
    )
    model = sj.sequence.SASRec(config, items=items, content=sizes, rngs=nnx.Rngs(0))
    if sizes is not None:
        content = cast(Any, model.output.content)
        content.set_to(tags, vectors)
        content.set_entries(rng.integers(1, 50, items))
    held = sum(v[...].nbytes for _, v in nnx.to_flat_state(nnx.state(model, nnx.Param)))
    optimizer = sj.Optimizer(model, sj.optimizers.adam(1e-3))
    histories = jnp.asarray(rng.integers(0, items, (BATCH, LENGTH + 1)), jnp.int32)

    given = sum(x.nbytes for x in (vectors,) if x is not None)
    if tags is not None:
        given = 8 * tags.nnz
    del tags, vectors
    results: list[dict] = []
    for form in arguments.forms or ("stored",):
        if content is not None:
            content.by_parts = form == "parts"
        result = {
            "content": arguments.content,
            "form": form,
            "items": items,
            "width": arguments.width,
            **_timed(model, optimizer, histories, arguments.steps),
            "content_bytes": given,
            "parameter_bytes": held,
        }
        results.append(result)
        yield {"results": results}, result


def _timed(model: Any, optimizer: Any, histories: jax.Array, steps: int) -> dict:
    """Times of steps, and the most memory that the process has had until then."""

    @sj.jit
    def step(model, optimizer, histories):
        loss, grads = optimizer.value_and_grad(
            lambda m: m.loss(histories, max_targets=BATCH * LENGTH)
        )(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, histories)) for _ in range(3)]
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step(model, optimizer, histories).block_until_ready()
        times.append(time.perf_counter() - start)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "milliseconds": round(1e3 * min(times), 2),
        "median_milliseconds": round(1e3 * statistics.median(times), 2),
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "losses": [round(x, 3) for x in losses],
    }


if __name__ == "__main__":
    main()
