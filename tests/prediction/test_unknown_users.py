"""New users count in metrics for every form of input; their number is reported, and they can be
left out.
"""

import contextlib
import io
import json

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax.cli.main import main

EVENTS = [
    *((user, f"i{(user * k) % 7}", 1 + k) for user in range(12) for k in (1, 2, 4)),
    *((user, f"i{(user + 4) % 7}", 9) for user in (1, 2, 3)),
    *((user, f"i{user % 7}", 9) for user in (20, 21)),
]


def table(events):
    user, item, time = zip(*events, strict=True)
    names = [f"u{u}" for u in user]
    return pa.table({"user": names, "item": list(item), "time": list(time)})


def parts(read):
    """Equal data in two forms: as two files, and as one file that is split."""
    train = read(table([event for event in EVENTS if event[2] < 9]))
    heldout = read(table([event for event in EVENTS if event[2] == 9]), features=train)
    whole = read(table(EVENTS))
    split = whole.split_at(9)
    return (train, heldout), (split.train.align_features(train), split.heldout)


def measured(model, train, heldout, **options):
    found = sj.evaluate(model, train, heldout, k=3, **options)
    return {n: v for n, v in found.items() if "popularity" not in n or "mean" not in n}


@pytest.mark.parametrize("exclude", ["inputs", None])
def test_two_files_and_one_that_is_split_agree(exclude):
    (train, heldout), (whole, later) = parts(sj.data.from_arrow)
    model = sj.baselines.popularity(train)
    later = later.align_features(train)
    found = measured(model, train, heldout, exclude=exclude)
    assert (found["users"], found["users_new"]) == (5, 2)
    assert found == pytest.approx(measured(model, whole, later, exclude=exclude))
    # By hand: what is recommended to a row without entries is what is most popular.
    best = sj.recommend(model, scipy.sparse.csr_array((1, 7)), 3).names(train)[0]
    of_new = [f"i{user % 7}" in best for user in (20, 21)]
    known = measured(model, train, heldout, exclude=exclude, unknown_users="skip")
    assert (known["users"], known["users_new"]) == (3, 2)
    assert found["recall@3"] == pytest.approx((3 * known["recall@3"] + sum(of_new)) / 5)
    again = measured(model, whole, later, exclude=exclude, unknown_users="skip")
    assert known == pytest.approx(again)
    # The entries of new users that are named to be excluded are.
    seen = sj.data.from_arrow(table([(20, "i6", 1), (1, "i0", 1)]), features=train)
    with pytest.warns(UserWarning, match="1 of 5 held-out entries"):
        sj.evaluate(model, train, heldout, k=3, exclude=seen)


def test_histories():
    (train, heldout), (whole, later) = parts(sj.read_sequences)
    later = later.align_features(train)
    config = sj.SASRecConfig(max_length=4, width=8, blocks=1)
    model = sj.sequence.SASRec(config, items=train.num_features, rngs=nnx.Rngs(0))
    for options in ({}, {"unknown_users": "skip"}, {"exclude": None}):
        found = measured(model, train, heldout, **options)
        assert found == pytest.approx(measured(model, whole, later, **options))
        assert found["users"] == (3 if "unknown_users" in options else 5)
        assert found["users_new"] == 2
    same = measured(model, train, heldout.to_sparse())
    assert same == pytest.approx(measured(model, train, heldout))


@pytest.mark.usefixtures("wrong_types")
def test_when_nobody_is_known():
    (train, heldout), _ = parts(sj.data.from_arrow)
    model = sj.baselines.popularity(train)
    new = heldout.align_rows(["u20", "u21"])
    with pytest.raises(ValueError, match="2 of 2 rows of heldout are not in inputs"):
        sj.evaluate(model, train, new)
    both = train.align_rows([*train.row_names.tolist(), "u20", "u21"], missing="empty")
    assert sj.evaluate(model, both, new, k=3)["users_new"] == 2
    with pytest.raises(ValueError, match="none of the 2 rows of heldout has an entry"):
        sj.evaluate(model, both, new, unknown_users="skip")
    with pytest.raises(ValueError, match='unknown_users is "count" or "skip", got'):
        sj.evaluate(model, train, heldout, unknown_users="miss")  # pyrefly: ignore


def test_commands_and_functions_agree(tmp_path, capsys):
    train, test, run = (
        str(tmp_path / name) for name in ("train.csv", "test.csv", "run")
    )
    for path, chosen in ((train, EVENTS[:36]), (test, EVENTS[36:])):
        lines = [f"u{user},{item}\n" for user, item, _ in chosen]
        with open(path, "w") as file:
            file.write("user,item\n" + "".join(lines))
    with contextlib.redirect_stderr(io.StringIO()):
        argv = ["train", train, "--run", run, "--epochs", "1", "--hidden", "4"]
        assert main([*argv, "--linear", "None"]) == 0
    model, names = sj.load_model(run)
    data = sj.read(train, features=names)
    heldout = sj.read(test, features=names)
    for more, options in (
        ([], {}),
        (["--unknown-users", "skip"], {"unknown_users": "skip"}),
    ):
        capsys.readouterr()
        assert main(["evaluate", run, train, test, "--k", "3", *more]) == 0
        said = capsys.readouterr()
        found = json.loads(said.out.splitlines()[-1])
        assert "2 of 5 rows are not in" in said.err
        assert "2 users are new: the model is shown nothing of them" in said.out
        wanted = sj.evaluate(model, data, heldout, k=3, **options)  # pyrefly: ignore
        assert found == pytest.approx(wanted)
        assert (found["users"], found["users_new"]) == (3 if more else 5, 2)


class Fixed(nnx.Module):
    """A model with equal scores for all rows."""

    def __init__(self, scores):
        self.num_features = self.num_items = len(scores)
        self.scores = nnx.Variable(jnp.asarray(scores, jnp.float32))

    def top_k(self, x, k, *, exclude=None):
        raise NotImplementedError

    def item_scores(self, x, ids):
        return self.scores[...][ids]


@pytest.mark.filterwarnings("ignore:3 of 7 candidates")
@pytest.mark.parametrize("named", [False, True])
def test_among_candidates_items_that_were_not_trained_on_are_left_out(named):
    # Item 0 is in no row of the inputs, but has a column, and would have the best score.
    inputs = np.array([[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], bool)
    heldout = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0]], bool)
    lists = np.array([[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 0, 0]], bool)
    lists[:, 0] |= named
    given = map(scipy.sparse.csr_array, (inputs, heldout, lists))
    shown, wanted, candidates = given
    model = Fixed([9, 3, 2, 1])
    found = sj.evaluate(model, shown, wanted, k=4, candidates=candidates)
    # Row 0 finds nothing. Row 1 finds item 1 first, of two. Row 2 finds item 2 behind 1.
    assert found["recall@4"] == pytest.approx((0 + 1 / 2 + 1) / 3)
    assert found["mrr@4"] == pytest.approx((0 + 1 + 1 / 2) / 3)
    skipped = sj.evaluate(
        model, shown, wanted, k=4, candidates=candidates, unknown="skip"
    )
    assert skipped["users"] == 2 and skipped["recall@4"] == 1
    # A catalogue in which item 0 counts as known: the model may find it.
    every = scipy.sparse.csr_array(np.ones((1, 4), bool))
    found = sj.evaluate(
        model, shown, wanted, k=1, candidates=candidates, popularity=every
    )
    assert found["hit_rate@1"] == pytest.approx(2 / 3)
