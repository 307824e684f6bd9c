"""Each entry of the library's registries is compared with an oracle.

A new rule, loss, metric, activation, format, policy or model is red here by its name, until it
has an oracle below, or the test that has one is named.
"""

import ast
import pathlib
import typing

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from rule_steps import numpy_step

from sparsejax import losses, metrics, optimizers
from sparsejax.data.events import sniff
from sparsejax.embeddings import config
from sparsejax.engine.rank import nearest
from sparsejax.kinds.clicks import calibrate
from sparsejax.kinds.models import MODELS
from sparsejax.metrics.ranking import METRICS
from sparsejax.nn.activations import ACTIVATIONS
from sparsejax.ops import (
    gather_matmul,
    history_attention,
    implementations,
    precision,
    row_codes,
)
from sparsejax.optimizers import rules

TESTS = pathlib.Path(__file__).parent
NUMBERS = np.array([-30.0, -6.5, -1.0, -0.25, 0.0, 0.25, 1.0, 2.5, 6.5, 30.0])


def sigmoid(x):
    return scipy.special.expit(x)


def elu(x, alpha=1.0):
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def softplus(x):
    return np.logaddexp(0, x)


# By the formulas of the papers; `gelu` is approximated by tanh, as in jax.nn.
ACTIVATION_ORACLES = {
    "celu": elu,
    "elu": elu,
    "gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "linear": lambda x: x,
    "mish": lambda x: x * np.tanh(softplus(x)),
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "selu": lambda x: 1.0507009873554805 * elu(x, 1.6732632423543772),
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "softplus": softplus,
    "softsign": lambda x: x / (1 + np.abs(x)),
    "tanh": np.tanh,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_its_formula(name):
    assert name in ACTIVATION_ORACLES, f"{name} has no oracle here"
    got = ACTIVATIONS[name](jnp.float32(NUMBERS))
    want = ACTIVATION_ORACLES[name](NUMBERS)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", rules.NAMES)
def test_a_rule_is_its_formula(name):
    """Steps of all rows, one after the other, from random weights."""
    rule = optimizers.get(name, learning_rate=0.1)
    rng = np.random.default_rng(0)
    first = rng.standard_normal((5, 3))
    w = jnp.float32(first)
    state = rule.start(w)
    want = first, {key: np.float64(array) for key, array in state.items()}
    for count in range(1, 6):
        gradient = rng.standard_normal((5, 3))
        w, state = rule.step(
            w, state, jnp.float32(gradient), rule.numbers(jnp.asarray(count))
        )
        want = numpy_step(rule, *want, gradient, count, 0.1)
    assert np.abs(want[0] - first).max() > 1e-3
    # 1 - 0.999 in float32 has an error of 6e-5 of itself, which is half of that in a root.
    np.testing.assert_allclose(w, want[0], rtol=1e-4, atol=1e-5)
    for key, array in state.items():
        np.testing.assert_allclose(array, want[1][key], rtol=1e-4, atol=1e-6)


# By registry and entry a test that compares it with an oracle.
_LOSS = "test_losses.py::test_values_and_derivatives_are_the_formulas"
_RANKING = "metrics/test_ranking.py::test_matches_the_definitions"
_CATALOGUE = "metrics/test_ranking.py::test_catalogue_by_hand"
_CLICKS = "metrics/test_clicks.py::test_log_loss_and_its_normalization"
_SCIPY = "ops/test_gather_matmul.py::test_equals_scipy"
_ATTENTION = "ops/test_history_attention.py::test_equals_float64"
_PLACEMENT = (
    "embeddings/test_placement.py::test_training_does_not_depend_on_the_placement"
)
_SCORES = "clicks/test_models.py::test_scores"
_WEIGHED = "clicks/test_din.py::test_scores_are_those_of_the_formula"
_HISTORIES = "sequence/test_models.py::test_the_formula"
_CODES = "ops/test_row_codes.py::test_codes_are_within_their_bounds"
_FORMAT = "data/test_readers.py::test_every_format_aligns_features"
_DYNAMIC = "embeddings/test_dynamic.py"
TABLE: dict[str, dict[str, str]] = {
    "losses": {
        **dict.fromkeys(
            (
                "sigmoid_binary_cross_entropy",
                "l1_loss",
                "l2_loss",
                "hinge_loss",
                "l2_hinge_loss",
                "scaled_marginal_cross_entropy",
            ),
            _LOSS,
        ),
        "softmax_cross_entropy": "ops/test_output_loss.py::test_equals_the_oracle",
    },
    "metrics": {
        **dict.fromkeys((f.__name__ for f in METRICS.values()), _RANKING),
        "is_label": "metrics/test_ranking.py::test_padding_is_not_a_label",
        "coverage": _CATALOGUE,
        "mean_popularity": _CATALOGUE,
        "gini": "metrics/test_ranking.py::test_gini_is_half_the_relative_mean_difference",
        "recommendation_counts": "metrics/test_ranking.py::test_counts_of_recommendations",
        "auc": "metrics/test_clicks.py::test_auc_counts_pairs",
        "group_auc": "metrics/test_clicks.py::test_auc_of_groups",
        "log_loss": _CLICKS,
        "normalized_entropy": _CLICKS,
        "calibration": _CLICKS,
        "compare": "metrics/test_comparison.py::test_intervals_are_those_of_scipy",
    },
    "combiners": dict.fromkeys(("sum", "mean", "sqrtn"), _SCIPY),
    "activations of attention": dict.fromkeys(("silu", "softmax"), _ATTENTION),
    "implementations": {
        **dict.fromkeys(("xla", "xla_gpu", "cusparse"), _SCIPY),
        "mosaic_gpu": "pallas_kernels/test_gather_matmul.py::test_equals_float64",
    },
    "precisions": dict.fromkeys(
        ("highest", "high", "default"),
        "ops/test_output_loss.py::test_every_precision_equals_the_oracle",
    ),
    "placements": dict.fromkeys(("replicated", "rows", "table", "columns"), _PLACEMENT),
    "ids outside of a table": dict.fromkeys(
        ("error", "drop"),
        "embeddings/test_collection.py::test_large_numbers_are_outside_a_table",
    ),
    "evictions": {
        "lru": f"{_DYNAMIC}::test_lru_equals_a_dictionary",
        "lfu": f"{_DYNAMIC}::test_lfu_with_a_time_to_live_equals_a_dictionary",
    },
    "ids without a row": {
        "init": f"{_DYNAMIC}::test_an_id_without_a_row_has_its_first_vector_and_no_gradient",
        "zeros": "prediction/test_export_dynamic.py::"
        "test_ids_without_a_row_can_read_zeros_and_rows_have_fewer_bits",
    },
    "types of tables": dict.fromkeys(("int8", "float8"), _CODES),
    "corrections": {
        "platt": "prediction/test_calibrate.py::test_platt_is_the_least_log_loss",
        "isotonic": "prediction/test_calibrate.py::test_isotonic_pools_what_falls",
    },
    "nearness": dict.fromkeys(
        ("dot", "cosine"), "prediction/test_nearest.py::test_all_pairs_are_scored"
    ),
    "formats": dict.fromkeys(
        ("text", "pairs", "jsonl", "adjacency", "parquet"), _FORMAT
    ),
    "models": {
        "autoencoder": "nn/test_models.py::test_is_the_network_it_says",
        "sasrec": "sequence/test_sasrec.py::test_the_formula",
        **dict.fromkeys(("hstu", "gru"), _HISTORIES),
        **dict.fromkeys(("dlrm", "dcn", "deepfm", "wide_deep"), _SCORES),
        **dict.fromkeys(("din", "tin"), _WEIGHED),
    },
}


def _words(annotation) -> set[str]:
    """The strings of a `Literal`, which may be one or None."""
    found = set()
    for value in typing.get_args(annotation):
        found |= {value} if isinstance(value, str) else _words(value)
    return found


REGISTRIES = {
    "losses": set(losses.NAMES),
    "metrics": {name for name in dir(metrics) if callable(getattr(metrics, name))}
    - {name for name in dir(metrics) if isinstance(getattr(metrics, name), type)},
    "combiners": _words(gather_matmul.Combiner),
    "activations of attention": _words(history_attention.Activation),
    "implementations": _words(implementations.Implementation),
    "precisions": _words(precision.Word),
    "placements": _words(config.Placement),
    "ids outside of a table": _words(config.Outside),
    "evictions": _words(config.Evict),
    "ids without a row": _words(config.Unknown),
    "types of tables": _words(row_codes.TableDtype),
    "corrections": _words(calibrate.Method),
    "nearness": _words(nearest.Metric),
    "formats": _words(sniff.Format),
    "models": set(MODELS),
}


@pytest.mark.parametrize("registry", REGISTRIES)
def test_each_entry_has_an_oracle(registry):
    entries, named = REGISTRIES[registry], TABLE[registry]
    assert entries, "nothing was read from the library"
    assert not entries - named.keys(), "these have no oracle"
    assert not named.keys() - entries, "these are no entries of the library"


def test_the_oracles_are_tests_that_run_in_ci():
    weekly = (TESTS / "weekly_tests.txt").read_text().splitlines()
    for test in {test for named in TABLE.values() for test in named.values()}:
        file, _, function = test.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        there = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        assert function in there, test
        assert test not in weekly
