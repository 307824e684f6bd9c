"""Trains models of histories by `fit` and by a custom loop, on meshes, from disk, and after a
kill.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax import training

ITEMS, LENGTH = 30, 6


def made(rows=150, *, seed=0) -> sj.SequenceDataset:
    """Draws histories in which the next item usually follows the last one. Some rows are empty."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 10, rows)
    lengths[:4] = 0, 1, 2, 40
    steps = np.where(rng.random(lengths.sum()) < 0.8, 1, rng.integers(0, ITEMS))
    indptr = np.append(0, np.cumsum(lengths))
    starts = np.repeat(rng.integers(0, ITEMS, rows), lengths)
    before = np.append(0, np.cumsum(steps))
    within = before[1:] - np.repeat(before[indptr[:-1]], lengths)
    names = np.arange(rows).astype(str), np.arange(ITEMS).astype(str)
    times = np.arange(lengths.sum())
    return sj.SequenceDataset(indptr, (starts + within) % ITEMS, *names, times)


def histories_of(*rows, items=ITEMS) -> sj.SequenceDataset:
    """Histories without times."""
    indptr = np.append(0, np.cumsum([len(row) for row in rows]))
    indices = np.array([item for row in rows for item in row], np.int32)
    names = np.arange(len(rows)).astype(str), np.arange(items).astype(str)
    return sj.SequenceDataset(indptr, indices, *names)


def build(*, dropout=0.2, rule=None):
    config = sj.SASRecConfig(max_length=LENGTH, width=8, blocks=1, dropout=dropout)
    model = sj.sequence.SASRec(config, items=ITEMS, rngs=nnx.Rngs(0))
    return model, sj.Optimizer(model, rule or sj.optimizers.adam(0.01))


def trained(sequences, **options):
    model, optimizer = build()
    history = sj.fit(model, optimizer, sequences, batch_size=64, **options)
    return model, history


def on(shape):
    if shape is None:
        return contextlib.nullcontext()
    return jax.set_mesh(sj.make_mesh(data=shape[0], model=shape[1]))


def leaves(model):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


def losses(history):
    return [entry["loss"] for entry in history]


def test_fit_is_a_loop_of_ones_own():
    sequences = made()
    model, optimizer = build(dropout=0.0)
    [entry] = sj.fit(
        model, optimizer, sequences, batch_size=64, num_epochs=1, shuffle=False
    )
    kept = np.flatnonzero(np.diff(sequences.indptr) > 1)
    histories = sequences.padded(LENGTH + 1)[kept]
    expected, optimizer = build(dropout=0.0)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, histories):
        loss, grads = optimizer.value_and_grad(lambda m: m.loss(histories))(model)
        optimizer.update(model, grads)
        return loss

    found = 0.0
    for start in range(0, len(kept), 64):
        batch = histories[start : start + 64]
        found += float(step(expected, optimizer, jnp.asarray(batch))) * len(batch)
    np.testing.assert_allclose(found / len(kept), entry["loss"], rtol=1e-5)
    for ours, theirs in zip(*map(leaves, (model, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)

    # The same by dispatches, to the bit.
    model, optimizer = build()
    examples = training.place(sequences, model=model)
    epochs = training.Epochs(examples, batch_size=64, num_epochs=1)
    program = training.Program(model, optimizer)
    parts = [(program.launch(d), d.examples) for d in epochs.dispatches(0)]
    sums = [np.dot(np.asarray(found, np.float64), n) for found, n in parts]
    _, [entry] = trained(sequences, num_epochs=1)
    assert sum(sums) / len(kept) == entry["loss"]


def test_a_mesh_gives_the_same_losses():
    train, heldout = made().split_last()
    found = []
    for shape in (None, (2, 4)):
        with on(shape):
            model, history = trained(train, num_epochs=2, validation=heldout)
            scores = sj.recommend(model, train, k=5, exclude=train).scores
            measured = [entry["ndcg@20"] for entry in history]
            found.append([losses(history), measured, scores])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_rows_of_items_are_divided_over_model_alone():
    sequences, found = made(), []
    for shape in (None, (2, 1), (2, 4)):
        with on(shape):
            config = sj.HSTUConfig(
                max_length=LENGTH, width=8, blocks=1, dropout=0.0, negatives=5
            )
            model, optimizer = sj.build(config, sequences, sj.optimizers.adagrad(0.1))
            if shape != (2, 1):
                history = sj.fit(
                    model, optimizer, sequences, batch_size=64, num_epochs=2, seed=0
                )
                found.append((losses(history), np.asarray(model.output.kernel[...])))
            kernel = model.output.kernel[...]
            if shape is not None:
                assert (
                    kernel.sharding.shard_shape(kernel.shape)[0]
                    == len(kernel) // shape[1]
                )
            if shape == (2, 1):
                # For all items they lie over all devices.
                model.set_negatives(None)
                kernel = model.output.kernel[...]
                assert kernel.sharding.shard_shape(kernel.shape)[0] == len(kernel) // 2
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sampler", ["uniform", "batch"])
def test_negatives_touch_the_same_rows_as_a_dense_gradient(sampler):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 1024, (20, 5))
    train, heldout = histories_of(*rows, [7], items=1024).split_last()
    found = []
    for of_rows in (True, False):
        model = sj.sequence.SASRec(
            sj.SASRecConfig(
                max_length=LENGTH,
                width=8,
                blocks=1,
                dropout=0.0,
                negatives=4,
                sampler=sampler,
            ),
            items=1024,
            rngs=nnx.Rngs(0),
        )
        if not of_rows:
            model.output.kernel = nnx.Param(model.output.kernel[...])
        rule = sj.optimizers.adamw(0.01, weight_decay=0.1)  # it moves untouched rows
        optimizer = sj.Optimizer(model, rule)
        history = sj.fit(
            model,
            optimizer,
            train,
            batch_size=8,
            num_epochs=2,
            validation=heldout,
            k=500,
        )
        found.append(leaves(model) + [losses(history), history[0]["ndcg@500"]])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    # And then of all items.
    model.set_negatives(None)
    expected = model.loss(jnp.asarray(train.padded(LENGTH + 1)))
    [entry] = sj.fit(model, sj.Optimizer(model, rule), train, num_epochs=1)
    np.testing.assert_allclose(entry["loss"], expected, rtol=1e-5)


def test_negatives_of_the_batch_are_the_same_on_a_mesh():
    """Devices deal out the tokens in another order, and the draws depend on none."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 9, 300)
    train = histories_of(*(rng.integers(0, 60, n) for n in lengths), items=60)
    config = sj.SASRecConfig(
        max_length=5, width=8, blocks=1, dropout=0.3, negatives=8, sampler="batch"
    )
    found = []
    for shape, wire in ((None, None), ((2, 2), None), ((2, 2), "bfloat16")):
        with on(shape):
            model, optimizer = sj.build(config, train, sj.optimizers.adam(0.01))
            options: dict[str, Any] = {"batch_size": 128, "wire_dtype": wire}
            history = sj.fit(model, optimizer, train, num_epochs=3, **options)
            found.append(losses(history))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    np.testing.assert_allclose(found[2], found[0], rtol=3e-2)
    assert np.abs(np.subtract(found[2], found[0])).max() > 1e-5


def test_no_wire_dtype_where_no_vectors_cross():
    sequences = made()
    gru = sj.GRUConfig(max_length=LENGTH, width=8, negatives=5)
    for shape, config in (
        (None, sj.SASRecConfig(max_length=LENGTH, width=8)),
        ((2, 1), gru),
    ):
        with on(shape):
            model, optimizer = sj.build(config, sequences, sj.optimizers.adagrad(0.1))
            with pytest.raises(ValueError, match="wire_dtype is of no use here"):
                sj.fit(model, optimizer, sequences, wire_dtype="bfloat16")
    with on((2, 1)):
        model, _ = build()  # with the exact softmax
        shown = jnp.zeros((2, 3), int)
        with pytest.raises(ValueError, match="wire_dtype is of no use here"):
            sj.jit(lambda m: m.loss(shown, wire_dtype="bfloat16"))(model)
        with pytest.raises(TypeError, match="wire_dtype must be floating"):
            sj.jit(lambda m: m.loss(shown, wire_dtype="int8"))(model)


def test_streamed_histories(tmp_path):
    sequences = made()
    # In the same batches as those in memory, which leave out what has no next item.
    kept = np.diff(sequences.indptr) > 1
    sequences = sj.SequenceDataset(
        np.append(0, np.cumsum(np.diff(sequences.indptr)[kept])),
        sequences.indices[np.repeat(kept, np.diff(sequences.indptr))],
        sequences.row_names[kept],
        sequences.feature_names,
    )
    sequences.save(tmp_path / "all.parquet")
    scanned = sj.data.scan_sequences(tmp_path / "all.parquet", chunk_rows=1000)
    options: dict[str, Any] = {"num_epochs": 2, "shuffle": False}
    model, history = trained(scanned, **options)
    same, expected = trained(sequences, **options)
    assert losses(history) == losses(expected)
    for ours, theirs in zip(*map(leaves, (model, same)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with on((2, 4)):
        _, divided = trained(scanned, num_epochs=2)
    _, expected = trained(scanned, num_epochs=2)
    np.testing.assert_allclose(losses(divided), losses(expected), rtol=1e-5)
    with pytest.raises(ValueError, match="validation needs the histories in host mem"):
        trained(scanned, validation=sequences)


def test_a_resume_gives_the_same_bits(tmp_path):
    train, heldout = made().split_last()
    made().save(tmp_path / "all.parquet")
    scanned = sj.data.scan_sequences(tmp_path / "all.parquet", chunk_rows=50)
    options: dict[str, Any] = {"num_epochs": 3}

    class Killed(Exception):
        pass

    def killed(epoch):
        if epoch == 2:
            raise Killed

    for data, validation in ((train, heldout), (scanned, None)):
        options["validation"] = validation
        expected, history = trained(data, **options)
        folder: dict[str, Any] = {"checkpoint_dir": tmp_path / type(data).__name__}
        folder["checkpoint_seconds"] = 0
        with pytest.raises(Killed):
            trained(data, **options, **folder, after_epoch=killed)
        model, resumed = trained(data, **options, **folder, resume=True)
        assert losses(resumed) == losses(history)
        for ours, theirs in zip(*map(leaves, (model, expected)), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ValueError, match="cannot resume with other data"):
        trained(made(seed=5), num_epochs=3, **folder, resume=True)


def test_early_stopping_keeps_the_best_epoch():
    train, heldout = made(60).split_last()
    model, optimizer = build(rule=sj.optimizers.adam(0.1))
    history = sj.fit(
        model,
        optimizer,
        train,
        batch_size=64,
        num_epochs=40,
        validation=heldout,
        k=5,
        early_stopping=sj.EarlyStopping(patience=3),
    )
    values = [entry["ndcg@5"] for entry in history]
    assert len(values) < 40 and max(values) == values[-4]
    found = sj.evaluate(model, train, heldout, k=5, exclude=None)
    assert found["ndcg@5"] == max(values) > found["popularity_ndcg@5"]


def test_validation_leaves_out_what_was_seen_unless_items_repeat():
    rows = np.random.default_rng(0).permuted(np.tile(np.arange(ITEMS), (6, 1)), axis=1)
    rows = rows[:, :12].tolist()
    for last, exclude in ((9, "inputs"), (8, None)):
        train, heldout = histories_of(*rows, [0, 8, last, 7]).split_last()
        model, [entry] = trained(train, num_epochs=1, validation=heldout)
        measured = [
            sj.evaluate(model, train, heldout, exclude=way)["ndcg@20"]
            for way in ("inputs", None)
        ]
        assert measured[0] != measured[1]
        assert entry["ndcg@20"] == measured[exclude is None]


class LastItem(nnx.Module):
    """A custom model: the vector of the last item, which decays with time."""

    uses_times = True

    def __init__(self, items: int):
        self.config, self.num_items = sj.SASRecConfig(max_length=LENGTH), items
        normal = nnx.initializers.normal(1.0)(
            jax.random.key(0), (items, 4), jnp.float32
        )
        self.items = nnx.Param(normal)

    def __call__(self, histories, times):
        known = jnp.where(histories[..., None] >= 0, self.items[histories], 0)
        return known * jnp.exp(times / 10)[..., None]

    def loss(self, histories, times):
        h = self(histories[:, :-1], times[:, :-1] - times[:, 1:])
        return sj.linear_cross_entropy(h, self.items[...], histories[:, 1:])

    def top_k(self, histories, k, *, exclude=None, times):
        last = jnp.maximum(jnp.sum(histories >= 0, axis=1) - 1, 0)[:, None]
        ids = jnp.take_along_axis(histories, last, axis=1)
        h = self(ids, jnp.take_along_axis(times, last, axis=1))[:, 0]
        return sj.top_k(h, self.items[...], k, exclude=exclude)


def test_a_model_of_ones_own_with_times():
    train, heldout = made().split_last()
    model = LastItem(ITEMS)
    histories = jnp.asarray(train.padded(LENGTH + 1))
    times = jnp.asarray(train.padded_times(LENGTH + 1))
    before = float(sj.jit(lambda m: m.loss(histories, times))(model))
    optimizer = sj.Optimizer(model, sj.optimizers.adam(0.05))
    options: dict[str, Any] = {"num_epochs": 20, "validation": heldout, "k": 5}
    history = sj.fit(model, optimizer, train, **options)
    assert history[0]["loss"] == pytest.approx(before, rel=1e-4)  # one batch
    assert history[-1]["recall@5"] > 0.4
    found = sj.recommend(model, train, k=3, exclude=None)
    shown, at = jnp.asarray(train.padded(LENGTH)), jnp.zeros((150, LENGTH))
    expected, _ = sj.jit(lambda m: m.top_k(shown, 3, times=at))(model)
    np.testing.assert_array_equal(found.ids, expected)


def test_the_output_computes_few_rows_that_have_no_target():
    room = []

    class Watched(sj.sequence.SASRec):
        def loss(self, histories, times=None, *, max_targets=None, **more):
            room.append((histories[:, 1:].size, max_targets))
            return super().loss(histories, times, max_targets=max_targets, **more)

    config = sj.SASRecConfig(max_length=LENGTH, width=8, blocks=1)
    model = Watched(config, items=ITEMS, rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(model, sj.optimizers.adam(0.01))
    rows = [[0, 1, 2, 3], *[[4, 5]] * 31]
    [entry] = sj.fit(model, optimizer, histories_of(*rows), batch_size=32, num_epochs=1)
    assert np.isfinite(entry["loss"])
    (places, targets), *_ = room
    assert targets is not None and 3 + 31 <= targets <= 1.25 * (3 + 31) + 16 < places


def test_the_shortest_histories():
    """Only the last item and its next one are seen, and rows of one item are left out."""
    data = histories_of([7, 8, 9], [4, 5], [6], [])
    config = sj.HSTUConfig(max_length=1, width=8, dropout=0.0)
    model, optimizer = sj.build(config, data)
    expected = model.loss(jnp.array([[8, 9], [4, 5]]))
    [entry] = sj.fit(model, optimizer, data, num_epochs=1)
    np.testing.assert_allclose(entry["loss"], expected, rtol=1e-5)
    assert sj.recommend(model, data, k=2, exclude=None).ids.shape == (4, 2)


def test_wrong_arguments():
    model, optimizer = build()
    with pytest.raises(ValueError, match="no row has two entries"):
        sj.fit(model, optimizer, histories_of([3], []))
    with pytest.raises(ValueError, match="inputs has 2 columns but the model has 30"):
        sj.fit(model, optimizer, histories_of([0, 1], items=2))
    data = made(20)
    with pytest.raises(ValueError, match="entries, but weights has the shape"):
        sj.fit(model, optimizer, data, weights=np.ones(20))
    with pytest.raises(ValueError, match="leave out targets"):
        sj.fit(model, optimizer, data, data.to_sparse())
    with pytest.raises(TypeError, match="validated on a SequenceDataset"):
        sj.fit(model, optimizer, data, validation=data.to_sparse())
    with pytest.raises(NotImplementedError, match="fused"):
        sj.fit(model, optimizer, data, fused=True)
    config = sj.NetworkConfig.autoencoder((4,))
    other = sj.FeedForward(config, inputs=ITEMS, outputs=ITEMS, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="needs a model of histories"):
        sj.fit(other, sj.Optimizer(other, sj.optimizers.sgd(0.1)), data)
