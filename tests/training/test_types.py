"""Every kind of model under JAX's settings of dtypes; a warning is an error."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj

ITEMS = 8
STRICT = ("jax_numpy_dtype_promotion", "strict")
WIDE = ("jax_enable_x64", True)

pytestmark = pytest.mark.usefixtures("symbolic_sizes")


@contextlib.contextmanager
def flag(name, value):
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@pytest.fixture(params=[STRICT, WIDE], ids=["strict", "x64"])
def flagged(request):
    with flag(*request.param):
        yield request.param


def rows(dtype) -> sj.SparseDataset:
    drawn = np.random.default_rng(0).random((16, ITEMS))
    return sj.SparseDataset.from_scipy(
        scipy.sparse.csr_array(np.where(drawn < 0.5, drawn, 0).astype(dtype))
    )


def trained(model, rule, data, **options):
    optimizer = sj.Optimizer(model, rule)
    sj.fit(model, optimizer, data, num_epochs=1, batch_size=8, **options)
    return optimizer


CONFIG = sj.NetworkConfig.autoencoder((4,), dropout=0.1)
SCHEDULE = sj.optimizers.schedules.schedule(
    "warmup_cosine_decay_schedule",
    init_value=0.0,
    peak_value=0.1,
    warmup_steps=1,
    decay_steps=9,
)
RULES = {
    "adam": sj.optimizers.adam(SCHEDULE),
    "adamw": sj.optimizers.adamw(0.01),
    "rmsprop": sj.optimizers.rmsprop(0.01),
    "ftrl": sj.optimizers.ftrl(0.01),
    "nesterov": sj.optimizers.nesterov(0.01),
}


@pytest.mark.parametrize("rule", RULES)
def test_items(rule, flagged, tmp_path):
    train, heldout = rows(np.float64).split(0.7, seed=0)
    model, _ = sj.build(CONFIG, train)
    optimizer = trained(model, RULES[rule], train)
    if rule != "adam":
        return
    sj.evaluate(model, train, heldout, k=2)
    sj.recommend(model, train, 2, exclude=train)
    sj.user_vectors(model, train)
    sj.similar_items(model, [0], 2)
    sj.export_predictor(model, tmp_path / "p", k=2, names=train, batch_size=1)
    predictor = sj.load_predictor(tmp_path / "p")
    predictor.recommend(train, exclude=train)
    model.add_items(1, optimizer=optimizer)


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "l2_loss", "temperature": None},
        {"loss": "sigmoid_binary_cross_entropy", "param_dtype": "bfloat16"},
        {
            "tied": True,
            "linear": sj.nn.LinearConfig(rank=2),
            "output_dtype": "bfloat16",
        },
    ],
    ids=lambda o: "-".join(o),
)
def test_networks(options, flagged):
    data = rows(np.float32)
    model, _ = sj.build(sj.NetworkConfig.autoencoder((4,), **options), data)
    trained(model, sj.optimizers.adagrad(0.01), data, weights=np.ones(16))
    sj.recommend(model, data, 2, exclude=None)


@pytest.mark.parametrize(
    "config",
    [
        sj.SASRecConfig(max_length=4, width=8, blocks=1, heads=1),
        sj.HSTUConfig(max_length=4, width=8, blocks=1, heads=1, negatives=2),
        sj.GRUConfig(max_length=4, width=8, blocks=1),
    ],
    ids=lambda c: c.model,
)
def test_histories(config, flagged, tmp_path):
    names = np.array([str(i) for i in range(ITEMS)])
    data = sj.SequenceDataset(
        np.array([0, 4, 8]),
        np.arange(8),
        np.array(["ann", "bob"]),
        names,
        np.arange(8.0),
    )
    train, heldout = data.split_last()
    model, _ = sj.build(config, train)
    trained(model, sj.optimizers.adagrad(0.01), train, validation=heldout, k=2)
    sj.recommend(model, train, 2, exclude=train)
    sj.export_predictor(model, tmp_path / "p", k=2, names=train, batch_size=1)
    sj.load_predictor(tmp_path / "p").recommend(train)


@pytest.mark.parametrize(
    "config",
    [
        sj.DLRMConfig(dim=4, bottom=(4,), top=(4,)),
        sj.DCNConfig(dim=4, hidden=(4,), cross=1, dtype="bfloat16"),
        sj.DeepFMConfig(dim=4, hidden=(4,)),
        sj.WideDeepConfig(dim=4, hidden=(4,), combiner="mean"),
    ],
    ids=lambda c: c.model,
)
def test_clicks(config, flagged, tmp_path):
    path = tmp_path / "c.csv"
    lines = (f"{n % 2},{n},u{n % 3}\n" for n in range(16))
    path.write_text("click,age,user\n" + "".join(lines))
    schema = sj.ClickSchema(
        "click",
        dense={"age": sj.data.DenseColumn()},
        ids={"user": sj.data.VocabularyColumn()},
    )
    data = sj.read_clicks(path, schema)
    model = sj.clicks.build_click_model(
        config, num_dense=1, features=data.num_ids, rngs=nnx.Rngs(0)
    )
    trained(model, sj.optimizers.rowwise_adagrad(0.1), data, validation=data)
    sj.evaluate(model, data, groups="user")
    sj.predict(model, data)
    sj.export_predictor(model, tmp_path / "p", names=data, batch_size=1)
    sj.load_predictor(tmp_path / "p").predict(data)


def test_a_loop_of_ones_own(flagged):
    data = rows(np.float32)
    model, _ = sj.build(CONFIG, data)
    optimizer = sj.Optimizer(model, sj.optimizers.sgd(0.01))

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = sj.value_and_grad(lambda m: m.loss(x, x))(model)
        optimizer.update(model, grads)
        return loss

    assert np.isfinite(step(model, optimizer, sj.CSR.from_scipy(data.to_scipy())))
    optimizer.flush(model)
    config = sj.GRUConfig(max_length=4, width=8, blocks=1)
    histories = sj.sequence.build_sequence_model(config, items=ITEMS, rngs=nnx.Rngs(0))
    ids = jnp.asarray(np.array([[0, 1, 2, 3], [4, -1, -1, -1]], np.int32))
    nnx.jit(nnx.value_and_grad(lambda m: m.loss(ids)))(histories)


def test_what_a_program_has_chosen_stays(flagged):
    """A mixture in the caller's own code is an error only there, before and after."""
    data = rows(np.float32)
    model, _ = sj.build(CONFIG, data)
    trained(model, sj.optimizers.sgd(0.1), data)
    assert jax.config.values[flagged[0]] == flagged[1]
    if flagged == STRICT:
        with pytest.raises(ValueError, match="promotion"):
            jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.int32)
