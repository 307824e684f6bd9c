"""How many steps, and how long histories, for which data."""

import numpy as np
import pytest

import sparsejax as sj


def data(*lengths: int) -> sj.SequenceDataset:
    indptr = np.append(0, np.cumsum(lengths))
    users = np.arange(len(lengths)).astype(str)
    return sj.SequenceDataset(indptr, np.zeros(indptr[-1], int), users, np.array(["a"]))


@pytest.mark.parametrize(
    ("rows", "options", "epochs"),
    [
        ([22_363], {}, 40),
        ([6_040], {}, 146),
        ([1_024], {}, 300),
        ([1_024], {"batch_size": 1}, 40),
        ([6_000, 100], {}, 140),
        ([0], {}, 300),
        ([5], {"num_epochs": 7}, 7),
    ],
)
def test_the_rate_falls_to_zero_at_the_last_of_enough_steps(rows, options, epochs):
    recipe = sj.SequenceRecipe.for_rows(rows, learning_rate=0.5, **options)
    assert recipe.num_epochs == epochs
    steps = sum(-(-n // recipe.batch_size) for n in rows) or 1
    rate = sj.optimizers.schedule(
        "cosine_decay_schedule", init_value=0.5, decay_steps=steps * epochs
    )
    assert recipe.rule == sj.optimizers.adamw(rate, b2=0.98, weight_decay=0.1)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([0, 0], 50),
        ([51, 2], 50),
        ([53, 0, 1], 50),
        ([54, 1], 100),
        ([101] * 3, 100),
        ([500, 3], 200),
        ([2] * 5_000 + [500], 50),
    ],
)
def test_histories_are_as_long_as_most_entries_need(lengths, expected):
    recipe = sj.SequenceRecipe.for_data(data(*lengths))
    assert recipe.max_length == expected
    of_rows = sj.SequenceRecipe.for_rows([sum(n > 1 for n in lengths)])
    assert (recipe.rule, recipe.num_epochs) == (of_rows.rule, of_rows.num_epochs)
