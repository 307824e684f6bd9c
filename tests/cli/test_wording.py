"""Converts error messages of the Python interface to the terms of the command line."""

import pytest

import sparsejax as sj
from sparsejax.cli import flags
from sparsejax.cli.wording import in_flags
from sparsejax.data.sets.split import warn_of_repeats

TRAIN, CONVERT, EVALUATE = flags.Train, flags.Convert, flags.Evaluate


@pytest.mark.parametrize(
    ("command", "text", "expected"),
    [
        (TRAIN, "batch_size=0 and num_epochs=20 must", "--batch-size 0 and --epochs 20 must"),
        (TRAIN, "pass resume=True; hidden=(3,)", "pass --resume; --hidden (3,)"),
        (TRAIN, "needs validation=... or learning_rate.", "needs --validation or --learning-rate."),
        (TRAIN, "user='my user', value=COLUMN", "--user 'my user', --value COLUMN"),
        (TRAIN, "delimiter=',', or indicator=True", "--delimiter ',', or --no-value"),
        (CONVERT, "format='text' of features", "--from 'text' of features"),
        (EVALUATE, "fold_in chooses; exclude=None", "--fold-in chooses; --keep-seen"),
    ],
)  # fmt: skip
def test_arguments_are_flags(command, text, expected):
    assert in_flags(text, command) == expected


@pytest.mark.parametrize(
    "text",
    [
        "data/seed=3/batch_size.txt: no such file",
        "no item is called 'the k=3 of batch_size'",
        'expected a size as "batch_size"',
        "the mesh has data=2 and model=4",
        "k must be positive; the time of a user and an item",
        "name it with format= (or so)",
        "sparsejax.optimizers.learning_rate and my_batch_size",
    ],
)
def test_other_words_stay(text):
    assert in_flags(text, TRAIN) == text


def test_advice_is_of_the_command_line():
    """What the library says there, to the letter."""
    schema = sj.ClickSchema("click", dense={"price": sj.data.DenseColumn()})
    rows = [{"click": 1, "price": 2.0}, {"click": 0, "price": None}]
    with pytest.raises(sj.DataError) as error:
        sj.read_clicks(rows, schema)
    assert '"missing": 0.0 of this column, in a file for --sch' in in_flags(
        str(error.value), TRAIN
    )
    with pytest.warns(UserWarning) as warned:
        warn_of_repeats(1, 2)
    said = in_flags(str(warned[0].message), flags.Split)
    assert said.endswith("--by last --histories, whose parts train takes, too")
    # DATA may be a part of such a split. Then it is split once more, and nothing else helps.
    said = in_flags(str(warned[0].message), TRAIN)
    assert said.endswith(
        "split DATA itself once more, split DATA --by time --fraction .9 --out DIR: train on "
        "DIR/train.parquet, and give --validation DIR/heldout.parquet"
    )


def test_without_a_command_nothing_is_a_flag():
    assert in_flags("batch_size=0", None) == "batch_size=0"
