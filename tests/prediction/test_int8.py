"""Predictors that read their items in int8 first give equal answers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.ops import coarse_top_k, implementations
from sparsejax.serving.engine import Engine, Shape
from sparsejax.serving.metrics import Metrics

ITEMS, K = 300, 4
NAMES = [f"item {i}" for i in range(ITEMS)]


@pytest.fixture(scope="module")
def paths(symbolic_sizes, tmp_path_factory):
    """Files of two predictors of one model: without int8, and with it."""
    folder = tmp_path_factory.mktemp("int8")
    config = sj.NetworkConfig.autoencoder((128,), temperature=0.1)
    model = sj.FeedForward(config, inputs=ITEMS, outputs=ITEMS, rngs=nnx.Rngs(0))
    found = folder / "plain.predictor", folder / "int8.predictor"
    model.output.dtype = jnp.dtype(jnp.bfloat16)
    for path in found:
        int8 = path.name.startswith("int8")
        sj.export_predictor(model, path, k=K, names=NAMES, batch_size=8, int8=int8)
    return found


@pytest.fixture
def of_use(monkeypatch):
    """Makes int8 count as useful on this machine, too."""
    monkeypatch.setattr(coarse_top_k, "is_of_use", lambda shape, dtype: True)


HISTORIES = [["item 3", "item 7"], [], ["item 299"]]


def test_the_same_answers(paths, of_use, tmp_path):
    plain, coarse = map(sj.load_predictor, paths)
    assert len(coarse.weights) == len(plain.weights) + 3
    names = plain.recommend_names(HISTORIES)
    assert coarse.recommend_names(HISTORIES) == names
    denied = {"exclude_items": [names[0][0], names[2][1]]}
    want = plain.recommend_names(HISTORIES, **denied)
    assert coarse.recommend_names(HISTORIES, **denied) == want
    # A service denies items of all programs; the items in int8 are not made again.
    again = coarse.model.programs.denying(coarse.signature)
    assert again.weights[-2] is coarse.weights[-1]
    coarse.save(tmp_path / "again.predictor")
    again = sj.load_predictor(tmp_path / "again.predictor")
    assert again.signature == coarse.signature
    assert again.recommend_names(HISTORIES) == names


def test_nothing_is_held_where_it_is_of_no_use(paths):
    plain, coarse = map(sj.load_predictor, paths)
    assert len(coarse.weights) == len(plain.weights)
    assert coarse.recommend_names(HISTORIES) == plain.recommend_names(HISTORIES)


def test_passes_over_all_items_are_counted(paths, of_use):
    metrics = Metrics()
    predictor = sj.load_predictor(paths[1])
    engine = Engine(predictor, [Shape(1, 256)])
    given, _ = predictor.model.rows_of_names([["item 3"]])

    def passes() -> float:
        engine.run(Shape(1, 256), engine.packed(Shape(1, 256), [given]))
        found = re.search(
            r"^sparsejax_whole_passes_total (\S+)",
            metrics.text().decode(),
            re.MULTILINE,
        )
        assert found is not None
        return float(found[1])

    before = passes()
    assert passes() == before
    *rest, limits = predictor.weights
    predictor.weights[:] = [*rest, limits * np.inf]  # nothing is proved any more
    assert passes() == before + 1
    metrics.close()


def test_the_gpu_reads_int8(paths, monkeypatch):
    monkeypatch.setattr(implementations, "gpu_capability", lambda: 9.0)
    jax.clear_caches()
    predictor = sj.load_predictor(paths[1])
    assert predictor.weights[-3].dtype == np.int8
    jax.clear_caches()


@pytest.mark.parametrize(
    ("width", "dtype", "why"),
    [
        (128, "float32", "int8 takes bfloat16 operands, not float32: leave it out"),
        (64, "bfloat16", "int8 takes hidden sizes .* of 128, not 64: leave it out"),
    ],
)
def test_models_that_have_no_use_for_it(width, dtype, why):
    config = sj.NetworkConfig.autoencoder((width,))
    model = sj.FeedForward(config, inputs=9, outputs=9, rngs=nnx.Rngs(0))
    model.output.dtype = jnp.dtype(dtype)
    with pytest.raises(ValueError, match=why):
        sj.export_predictor(model, "unused", int8=True)


def test_models_without_a_layer_of_items():
    class Own(sj.FeedForward):
        def top_k(self, *arguments, **options):
            return super().top_k(*arguments, **options)

    config = sj.NetworkConfig.autoencoder((8,))
    model = Own(config, inputs=9, outputs=9, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="int8.*Own has a top_k of its own: leave it"):
        sj.export_predictor(model, "unused", int8=True)
