"""The default number of epochs, learning rate and length of histories, for different data."""

import numpy as np
import pytest
import scipy.sparse

import sparsejax as sj

NETWORK, HISTORIES = sj.NetworkConfig.autoencoder((4,)), sj.SASRecConfig()


def histories(*lengths: int) -> sj.SequenceDataset:
    indptr = np.append(0, np.cumsum(lengths))
    users = np.arange(len(lengths)).astype(str)
    return sj.SequenceDataset(indptr, np.zeros(indptr[-1], int), users, np.array(["a"]))


@pytest.mark.parametrize(
    ("config", "data", "options", "epochs"),
    [
        (NETWORK, 0, {}, 200),
        (NETWORK, 512, {}, 200),
        (NETWORK, 513, {}, 100),
        (NETWORK, 513, {"batch_size": 1}, 30),
        (NETWORK, 100_000, {}, 30),
        (NETWORK, sj.SparseDataset.from_scipy(scipy.sparse.eye_array(513)), {}, 100),
        (HISTORIES, 22_363, {}, 40),
        (HISTORIES, 6_040, {}, 146),
        (HISTORIES, histories(*[2] * 257, *[1] * 300), {}, 300),
        (HISTORIES, 5, {"num_epochs": 7}, 7),
    ],
)
def test_the_rate_falls_to_zero_at_the_last_of_enough_steps(
    config, data, options, epochs
):
    recipe = sj.training.recipe(config, data, peak=0.5, **options)
    assert recipe.num_epochs == epochs
    rows = data if isinstance(data, int) else data.num_rows
    if isinstance(data, sj.SequenceDataset):
        rows = 257
    steps = epochs * max(-(-rows // recipe.batch_size), 1)
    rate = sj.optimizers.schedule(
        "cosine_decay_schedule", init_value=0.5, decay_steps=steps
    )
    if config is NETWORK:
        assert recipe.rule == sj.optimizers.adam(rate)
    else:
        assert recipe.rule == sj.optimizers.adamw(rate, b2=0.98, weight_decay=0.1)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([0, 0], 50),
        ([51, 2], 50),
        ([53, 0, 1], 50),
        ([54, 1], 100),
        ([101] * 3, 100),
        ([500, 3], 500),
        ([9_000, 3], 2_000),
        ([2] * 5_000 + [500], 50),
    ],
)
def test_histories_are_as_long_as_most_entries_need(lengths, expected):
    config = sj.SASRecConfig(width=32).suited_to(histories(*lengths))
    assert config == sj.SASRecConfig(width=32, max_length=expected)


def test_few_places_for_many_rows_and_for_models_that_take_one_after_the_other():
    lengths = np.full(1_000_000, 900)
    assert sj.HSTUConfig().suited_to_lengths(lengths).max_length == 200
    assert sj.HSTUConfig().suited_to_lengths(lengths[:1000]).max_length == 1000
    assert sj.HSTUConfig().suited_to_lengths(np.tile(lengths, 9)).max_length == 50
    assert sj.GRUConfig().suited_to_lengths(lengths[:1000]).max_length == 200
