"""Click models: trained by `sj.fit` or by a plain Flax loop, with the same losses.

DATA is a folder with files of Criteo's columns, whose names have "train", "dev" and "test".
A tenth of the training data decides when to stop; "dev" and "test" are only measured. Without
DATA, clicks are drawn from a known model, and the AUC is compared with that model's own.

Run: python examples/04_clicks.py [DATA] --model dlrm|dcn|deepfm|wide_deep [--loop]

On a mesh: --mesh 2,4 (try it with JAX_NUM_CPU_DEVICES=8). In two processes, one command each:
--mesh 2,1 --coordinator localhost:1234 --num-processes 2 --process-id 0 (and 1). With
--checkpoints FOLDER a run that was killed goes on where it was, and ends with the same bits.
"""

import argparse
import contextlib
import hashlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import sparsejax as sj

USERS, ITEMS = 40, 60


def read(folder: pathlib.Path) -> dict[str, sj.ClickDataset]:
    """The files of a folder, with the categories of the training data."""
    schema = sj.ClickSchema.criteo(sj.data.VocabularyColumn(min_count=10))

    def path(part):
        return [str(p) for p in sorted(folder.iterdir()) if f".{part}." in p.name]

    train = sj.read_clicks(path("train"), schema)
    others = ("dev", "test")
    parts = {p: sj.read_clicks(path(p), schema, features=train) for p in others}
    return {"train": train, **parts}


def planted(rows: int) -> tuple[dict[str, sj.ClickDataset], np.ndarray]:
    """Clicks that are drawn from a factorization machine, and its logits of the test data."""
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, USERS, rows), rng.integers(0, ITEMS, rows)
    dense = rng.normal(size=(rows, 2)).astype(np.float32)
    of_users, of_items = rng.normal(size=(USERS, 3)), rng.normal(size=(ITEMS, 3))
    logits = -1 + of_users[user, 0] + of_items[item, 0] + dense @ np.array([0.5, -0.5])
    logits += np.sum(of_users[user, 1:] * of_items[item, 1:], axis=1) / 2
    clicks = rng.random(rows) < 1 / (1 + np.exp(-logits))
    columns = {"user": sj.data.HashedColumn(USERS), "item": sj.data.HashedColumn(ITEMS)}
    schema = sj.ClickSchema(
        "click", {"x": sj.data.DenseColumn(), "y": sj.data.DenseColumn()}, columns
    )
    ids = {"user": user.astype(np.int32), "item": item.astype(np.int32)}
    data = sj.ClickDataset(clicks.astype(np.float32), dense, ids, schema, {})
    test = rows // 4
    parts = {"train": data.rows(slice(test, None)), "test": data.rows(slice(test))}
    return parts, logits[:test]


def by_fit(model, optimizer, train, validation, settings, stopping, folder):
    """The loss of each epoch, and the weights of the best one."""
    history = sj.fit(
        model,
        optimizer,
        train,
        **settings,
        validation=validation,
        early_stopping=stopping,
        checkpoint_dir=folder,
        checkpoint_seconds=0.5,
        resume=folder is not None,
    )
    return [(entry["loss"], entry["auc"]) for entry in history]


@sj.jit
def step(model, optimizer, dense, ids, click, weights):
    """A step of a loop of your own."""

    def loss_fn(model):
        losses = optax.sigmoid_binary_cross_entropy(model(dense, ids), click)
        return jnp.sum(weights * losses)

    loss, grads = optimizer.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def by_loop(model, optimizer, train, validation, settings, stopping):
    """The same as `by_fit`, in plain Flax; only the order of the examples is `sj.fit`'s."""
    epochs = sj.training.Epochs(sj.training.place(train), **settings)
    history, best, kept = [], 0, None
    for epoch in range(settings["num_epochs"]):
        total = 0.0
        for dispatch in epochs.dispatches(epoch):
            first = dispatch.first
            for rows in np.asarray(dispatch.rows[first : first + dispatch.count]):
                rows = rows.reshape(-1)  # -1 stands for no example
                used = rows >= 0
                batch = train.rows(np.maximum(rows, 0))
                weights = (used / used.sum()).astype(np.float32)
                arrays = batch.dense, dict(batch.ids), batch.labels, weights
                total += float(step(model, optimizer, *arrays)) * int(used.sum())
        auc = sj.evaluate(model, validation, optimizer=optimizer)["auc"]
        history.append((total / train.num_rows, auc))
        if auc == max(auc for _, auc in history):
            best = epoch
            kept = jax.tree.map(jnp.copy, nnx.state((model, optimizer)))
        elif epoch - best >= stopping.patience:
            break
    nnx.update((model, optimizer), kept)
    optimizer.flush(model)
    return history


def main(
    data: pathlib.Path | None = None,
    kind: str = "dlrm",
    *,
    rows: int = 200_000,
    loop: bool = False,
    mesh: str | None = None,
    batch_size: int | None = None,
    num_epochs: int = 20,
    checkpoints: str | None = None,
) -> dict[str, float]:
    """Trains a model; returns its metrics and the loss of its last epoch."""
    say = print if jax.process_index() == 0 else lambda *text: None
    parts, logits = planted(rows) if data is None else (read(data), None)
    train, validation = parts.pop("train").split_rows(0.9, seed=0)
    say(train, "for training,", validation, "decide when to stop")
    if batch_size is None:  # some fifty steps an epoch at least
        batch_size = 64 * int(np.clip(train.num_rows // (64 * 50), 1, 16))
    settings = {"batch_size": batch_size, "num_epochs": num_epochs, "seed": 0}
    stopping = sj.EarlyStopping(metric="auc", patience=3)

    config = sj.clicks.ClickModelConfig.from_json({"version": 1, "model": kind})
    on = contextlib.nullcontext()
    if mesh is not None:
        axes = [int(size) for size in mesh.split(",")]
        on = jax.set_mesh(sj.make_mesh(data=axes[0], model=axes[1]))
    with on:
        model, optimizer = sj.build(config, train, sj.optimizers.adam(5e-4))
        given = model, optimizer, train, validation, settings, stopping
        history = by_loop(*given) if loop else by_fit(*given, checkpoints)
        for epoch, (loss, auc) in enumerate(history, 1):
            say(f"epoch {epoch}: loss {loss:.6f}, auc {auc:.4f} of validation")
        reached, scores = {}, []
        for part, clicks in parts.items():
            measured = sj.evaluate(model, clicks)
            say(f"{part}:", {name: round(v, 4) for name, v in measured.items()})
            reached[part] = measured["auc"]
            scores.append(sj.predict(model, clicks))
    if len(parts) > 1:
        labels = np.concatenate([clicks.labels for clicks in parts.values()])
        reached["all"] = sj.metrics.auc(np.concatenate(scores), labels)
        say(f"auc of {' and '.join(parts)} together {reached['all']:.4f}")
    if logits is not None:
        reached["planted"] = sj.metrics.auc(logits, parts["test"].labels)
        say(f"auc of the model that drew the clicks {reached['planted']:.4f}")
    # The same bits give the same digest.
    digest = hashlib.sha256(np.concatenate(scores)).hexdigest()[:16]
    say("digest of the predictions", digest)
    return reached | {"loss": history[-1][0]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", nargs="?", type=pathlib.Path)
    parser.add_argument("--model", default="dlrm", dest="kind")
    parser.add_argument("--planted", action="store_true", help="as without DATA")
    parser.add_argument(
        "--rows", type=int, default=200_000, help="examples without DATA"
    )
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--mesh")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--num-epochs", type=int, default=20)
    parser.add_argument("--checkpoints")
    parser.add_argument("--coordinator")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    given = vars(parser.parse_args())
    names = ("coordinator", "num_processes", "process_id")
    cluster = [given.pop(name) for name in names]
    if cluster[0] is not None:
        sj.join_processes(*cluster)
    if given.pop("planted"):
        given["data"] = None
    main(**given)
