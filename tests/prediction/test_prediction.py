"""Recommendations and their metrics, on data whose right answers are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx
from linear import Linear
from ranked_by_hand import expected

from sparsejax import optimizers
from sparsejax.data import SparseDataset
from sparsejax.engine.batching import on_device
from sparsejax.engine.rank.evaluation import Setup, prepared_evaluation
from sparsejax.engine.rank.popularity import Popularity
from sparsejax.engine.rank.recommendations import Recommendations
from sparsejax.metrics.ranking import METRICS
from sparsejax.nn.config import NetworkConfig
from sparsejax.nn.models import FeedForward
from sparsejax.optimizers.optimizer import Optimizer
from sparsejax.sparse import CSR
from sparsejax.verbs.evaluate import evaluate
from sparsejax.verbs.recommend import recommend

ALL_KNOWN = {"users_unknown": 0, "entries_unknown": 0}


def all_items_known(inputs, heldout) -> dict[str, int]:
    """The counts that `evaluate` returns if there are no unknown items."""
    new = (inputs.sum(axis=1) == 0) & (heldout.sum(axis=1) > 0)
    return ALL_KNOWN | {"users_new": int(new.sum())}


def random_matrix(rows, cols, density=0.2, seed=0):
    rng = np.random.default_rng(seed)
    dense = rng.random((rows, cols)) < density
    return scipy.sparse.csr_array(dense)


def dataset(matrix, names=None, features=None):
    rows, cols = matrix.shape
    return SparseDataset.from_scipy(
        matrix,
        row_names=names or [f"row{r}" for r in range(rows)],
        feature_names=features or [f"item{i}" for i in range(cols)],
    )


def oracle(scores, k, exclude=None):
    """The k best items by (score descending, id ascending), computed by NumPy."""
    scores = np.array(scores, np.float64)
    if exclude is not None:
        scores[exclude.toarray() != 0] = -np.inf
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(scores, order, axis=1)
    ids = np.full((len(scores), k), -1)
    ids[:, : order.shape[1]] = np.where(best == -np.inf, -1, order)
    padded = np.full((len(scores), k), -np.inf)
    padded[:, : best.shape[1]] = best
    return ids, padded


def oracle_metrics(ids, heldout, k, popularity=None):
    """Metrics by their definitions, over rows with held-out entries."""
    sums = dict.fromkeys(METRICS, 0.0)
    labels = [set(np.flatnonzero(row)) for row in heldout.toarray()]
    users = sum(map(bool, labels))
    counts = np.zeros(heldout.shape[1])
    for ranked, wanted in zip(ids, labels, strict=True):
        if wanted:
            for name in sums:
                sums[name] += expected(name, ranked, wanted, k)
            for i in ranked[:k]:
                counts[i] += i >= 0
    measured = {f"{name}@{k}": total / users for name, total in sums.items()}
    measured[f"coverage@{k}"] = np.mean(counts > 0)
    # Half the mean difference between two items, over the mean.
    differences = np.abs(counts[:, None] - counts).mean()
    measured[f"gini@{k}"] = differences / (2 * counts.mean())
    if popularity is not None:
        mean = (counts * popularity).sum() / counts.sum()
        measured[f"mean_popularity@{k}"] = mean
    return measured


def popularity_of(matrix):
    """`[items]` share of the rows that have each item."""
    return np.mean(matrix.toarray() != 0, axis=0)


@pytest.fixture(scope="module")
def problem():
    """Inputs, held-out entries, weights and bias; rows 3 and 8 have no inputs."""
    rng = np.random.default_rng(1)
    whole = random_matrix(37, 19, density=0.4, seed=2).toarray()
    held = whole & (rng.random(whole.shape) < 0.3)
    held[[3, 8]] = False
    held[3, 5] = True
    seen = whole & ~held
    seen[[3, 8]] = False
    weights = rng.normal(size=(19, 19)).astype(np.float32)
    bias = rng.normal(size=19).astype(np.float32)
    as_csr = scipy.sparse.csr_array
    return as_csr(seen), as_csr(held), weights, bias


@pytest.fixture(scope="module")
def model(problem):
    return Linear(*problem[2:])


def scores_of(problem):
    inputs, _, weights, bias = problem
    return inputs.toarray() @ weights.astype(np.float64) + bias


# recommend


def test_checkerboard():
    """Even users like even items; each is recommended the one it lacks."""
    users, items = 12, 12
    likes = (np.arange(users)[:, None] + np.arange(items)) % 2 == 0
    model = Linear(likes.astype(np.float32))
    shown = scipy.sparse.csr_array(likes & ~np.eye(users, dtype=bool))
    data = dataset(shown)
    found = recommend(model, data, 1, exclude=data)
    assert found.names(data) == [[f"item{u}"] for u in range(users)]
    heldout = dataset(scipy.sparse.csr_array(np.eye(users, dtype=bool)))
    measured = evaluate(model, data, heldout, k=1)
    assert measured["recall@1"] == measured["ndcg@1"] == 1
    assert measured["users"] == users


@pytest.mark.parametrize(
    ("k", "excluding"), [(1, True), (7, False), (30, False), (30, True)]
)
def test_all_items_are_ranked(problem, model, k, excluding):
    inputs = problem[0]
    exclude = inputs if excluding else None
    found = recommend(model, inputs, k, exclude=exclude)
    ids, scores = oracle(scores_of(problem), k, exclude)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5, atol=1e-5)
    assert found.ids.dtype == np.int32 and found.scores.dtype == np.float32
    assert len(found) == inputs.shape[0]


def test_what_rows_have_is_left_out_by_default(problem, model):
    inputs = problem[0]
    found = recommend(model, inputs, 5)
    np.testing.assert_array_equal(found.ids, oracle(scores_of(problem), 5, inputs)[0])


def test_rows_without_entries_get_the_bias(problem, model):
    found = recommend(model, problem[0], 19, exclude=None)
    np.testing.assert_array_equal(found.ids[3], np.argsort(-problem[3]))
    np.testing.assert_array_equal(found.scores[8], np.sort(problem[3])[::-1])


def test_every_kind_of_input_gives_the_same(problem, model):
    matrix = problem[0]
    host = CSR.from_scipy(matrix)
    device = jax.tree.map(jnp.asarray, CSR.from_scipy(matrix, nse=matrix.nnz + 100))
    wanted = recommend(model, matrix, 5, exclude=matrix)
    for source in (host, device, dataset(matrix), scipy.sparse.coo_matrix(matrix)):
        for exclude in (source, host):
            found = recommend(model, source, 5, exclude=exclude)
            np.testing.assert_array_equal(found.ids, wanted.ids)


@pytest.mark.parametrize("batch_size", [7, 37, 1000])
def test_batch_size_does_not_matter(problem, model, batch_size):
    inputs, heldout = problem[:2]
    found = recommend(model, inputs, 5, exclude=inputs, batch_size=batch_size)
    np.testing.assert_array_equal(found.ids, oracle(scores_of(problem), 5, inputs)[0])
    measured = evaluate(model, inputs, heldout, k=5, batch_size=batch_size)
    wanted = evaluate(model, inputs, heldout, k=5)
    assert measured == pytest.approx(wanted, rel=1e-6)


def test_exclude_is_matched_by_name(problem, model):
    inputs = problem[0]
    rng = np.random.default_rng(3)
    order = rng.permutation(inputs.shape[0])[:-2]  # two rows have nothing to exclude
    names = [f"row{r}" for r in order]
    others = scipy.sparse.vstack([inputs[order], inputs[:3]], format="csr")
    exclude = dataset(others, [*names, "unknown a", "unknown b", "unknown c"])
    found = recommend(model, dataset(inputs), 5, exclude=exclude)
    known = np.isin(np.arange(inputs.shape[0]), order)
    expected = scipy.sparse.diags_array(known.astype(float)) @ inputs
    np.testing.assert_array_equal(found.ids, oracle(scores_of(problem), 5, expected)[0])


def test_names_skip_what_ran_out(problem, model):
    inputs = dataset(problem[0])
    found = recommend(model, inputs, 30, exclude=inputs)
    names = found.names(inputs)
    for ids, row in zip(found.ids, names, strict=True):
        assert row == [f"item{i}" for i in ids if i >= 0]
    assert names == found.names([f"item{i}" for i in range(19)])
    with pytest.raises(ValueError, match="item 18 .*only 18 names"):
        found.names(["name"] * 18)
    nothing = Recommendations(
        np.full((2, 3), -1, np.int32), np.full((2, 3), -np.inf, np.float32)
    )
    assert nothing.names([]) == [[], []]


def test_no_rows(model):
    found = recommend(model, scipy.sparse.csr_array((0, 19)), 4)
    assert found.ids.shape == found.scores.shape == (0, 4)
    assert found.names(["name"] * 19) == []


def test_similar_requests_share_one_program(problem, model):
    inputs = problem[0]
    assert inputs[:3].nnz <= 16  # the least there is room for
    recommend(model, inputs[:3], 4, exclude=inputs[:3])
    traced = Linear.times_traced
    for rows in (0, 1, 2):
        recommend(model, inputs[:rows], 4, exclude=inputs[:rows])
    model.bias[...] = model.bias[...] + 0.0  # as a step of training does
    recommend(model, inputs[1:4], 4, exclude=inputs[1:4])
    assert Linear.times_traced == traced


def test_nan_names_the_row(problem):
    inputs, heldout, weights, bias = problem
    column = np.flatnonzero(inputs.toarray()[20])[0]
    broken = weights.copy()
    broken[column] = np.nan
    row = int(np.flatnonzero(inputs.toarray()[:, column])[0])
    model, data = Linear(broken, bias), dataset(inputs)
    with pytest.raises(
        FloatingPointError, match=rf"row {row} \('row{row}'\) of inputs"
    ):
        recommend(model, data, 3, batch_size=4, exclude=None)
    with pytest.raises(FloatingPointError, match=rf"row {row} of inputs"):
        recommend(model, inputs, 5, exclude=None)
    scored = (inputs.toarray()[:, column] > 0) & (heldout.sum(axis=1) > 0)
    row = int(np.flatnonzero(scored)[0])
    with pytest.raises(FloatingPointError, match=rf"row {row} .*of heldout"):
        evaluate(model, data, dataset(heldout), k=5)


def test_errors_say_what_does_not_fit(problem, model):
    inputs = problem[0]
    narrow = inputs[:, :18]
    with pytest.raises(ValueError, match="inputs has 18 columns .* 19 features; read"):
        recommend(model, narrow)
    with pytest.raises(ValueError, match="exclude has 18 columns .* 19 items; read"):
        recommend(model, inputs, exclude=narrow)
    with pytest.raises(ValueError, match="inputs has 37 rows but exclude has 36"):
        recommend(model, inputs, exclude=inputs[:36])
    with pytest.raises(ValueError, match="inputs has 37 rows but exclude has 36"):
        recommend(model, dataset(inputs), exclude=inputs[:36])
    with pytest.raises(ValueError, match="exclude has none of the rows.*'row0'"):
        others = dataset(inputs, [f"someone else {r}" for r in range(37)])
        recommend(model, dataset(inputs), exclude=others)
    with pytest.raises(ValueError, match="column 0 is 'item0' in inputs but 'item18'"):
        turned = dataset(inputs, features=[f"item{18 - i}" for i in range(19)])
        recommend(model, dataset(inputs), exclude=turned)
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        recommend(model, inputs, 0)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        recommend(model, inputs, batch_size=0)
    with pytest.raises(TypeError):
        recommend(model, inputs.toarray())


# evaluate


def test_metrics_and_baseline_match_the_oracle(problem, model):
    inputs, heldout = problem[:2]
    measured = evaluate(model, inputs, heldout, k=(3, 40))
    counts = np.broadcast_to(inputs.toarray().sum(axis=0), inputs.shape)
    wanted = {"users": np.sum(heldout.toarray().any(axis=1))} | all_items_known(
        inputs, heldout
    )
    for k in (3, 40):
        ids, _ = oracle(scores_of(problem), 40, inputs)
        popularity = popularity_of(inputs)
        wanted |= oracle_metrics(ids, heldout, k, popularity)
        popular, _ = oracle(counts, 40, inputs)
        for name, value in oracle_metrics(popular, heldout, k, popularity).items():
            wanted[f"popularity_{name}"] = value
    assert measured == pytest.approx(wanted, rel=1e-5)
    assert measured["recall@3"] < measured["truncated_recall@3"]


@pytest.mark.parametrize("nothing", [True, False])
def test_what_is_excluded_can_be_chosen(problem, model, nothing):
    inputs, heldout = problem[:2]
    other = None
    if not nothing:
        others = random_matrix(37, 19, seed=7).toarray() & ~heldout.toarray()
        other = scipy.sparse.csr_array(others)
    measured = evaluate(model, inputs, heldout, k=5, exclude=other)
    ids, _ = oracle(scores_of(problem), 5, other)
    popularity = popularity_of(inputs)
    counts = np.broadcast_to(inputs.toarray().sum(axis=0), inputs.shape)
    popular, _ = oracle(counts, 5, other)
    for key, value in oracle_metrics(ids, heldout, 5, popularity).items():
        assert measured[key] == pytest.approx(value, rel=1e-5)
    for key, value in oracle_metrics(popular, heldout, 5, popularity).items():
        assert measured[f"popularity_{key}"] == pytest.approx(value, rel=1e-5)


def test_held_out_rows_are_matched_by_name(problem, model):
    inputs, heldout = problem[:2]
    order = np.random.default_rng(5).permutation(37)[:20]
    some = dataset(heldout[order], [f"row{r}" for r in order])
    mask = np.isin(np.arange(37), order).astype(float)
    kept = scipy.sparse.diags_array(mask) @ heldout
    measured = evaluate(model, dataset(inputs), some, k=5)
    assert measured == pytest.approx(evaluate(model, inputs, kept, k=5), rel=1e-6)
    shuffled = np.random.default_rng(6).permutation(37)
    data = dataset(inputs[shuffled], [f"row{r}" for r in shuffled])
    again = evaluate(model, data, some, k=5, exclude=dataset(inputs))
    assert again == pytest.approx(measured, rel=1e-6)


def test_popularity_of_counts_that_float32_cannot_tell_apart():
    counts = np.array([0, 2**24 + 1, 2**24, 2**24 + 1])
    baseline = Popularity(counts, 4)
    assert baseline.scores[...].tolist() == [-np.inf, 2, 1, 2]


def test_other_items_than_features():
    """Inputs that are no items: nothing is seen, and no baseline can be counted."""
    weights = np.random.default_rng(0).normal(size=(4, 9)).astype(np.float32)
    inputs, heldout = random_matrix(11, 4, 0.5), random_matrix(11, 9, 0.5, seed=1)
    model = Linear(weights)
    with pytest.raises(
        ValueError, match="inputs has 4 columns but heldout has 9; read"
    ):
        evaluate(model, inputs, heldout)
    measured = evaluate(model, inputs, heldout, k=3, exclude=None, popularity=None)
    ids, _ = oracle(inputs.toarray() @ weights, 3)
    wanted = oracle_metrics(ids, heldout, 3) | {"users": 11}
    wanted |= all_items_known(inputs, heldout)
    assert measured == pytest.approx(wanted, rel=1e-5)


def test_popularity_of_other_rows():
    """Rows the model was not trained on: what is popular is known from the others."""
    weights = np.random.default_rng(0).normal(size=(4, 9)).astype(np.float32)
    inputs, heldout = random_matrix(11, 4, 0.5), random_matrix(11, 9, 0.5, seed=1)
    trained_on = random_matrix(30, 9, 0.5, seed=2)
    measured = evaluate(
        Linear(weights), inputs, heldout, k=3, exclude=None, popularity=trained_on
    )
    counts = np.asarray(trained_on.toarray().sum(axis=0))
    popular, _ = oracle(np.tile(counts, (11, 1)), 3)
    for key, value in oracle_metrics(
        popular, heldout, 3, popularity_of(trained_on)
    ).items():
        assert measured[f"popularity_{key}"] == pytest.approx(value, rel=1e-5)


def test_prepared_once_and_compiled_once(problem):
    inputs, heldout, weights, bias = problem
    evaluation = prepared_evaluation(inputs, heldout, Setup(k=5, batch_size=16))
    model = Linear(weights, bias)
    before = evaluation.run(model)
    traced = Linear.times_traced
    model.bias[...] = -model.bias[...]
    model.train()
    after = evaluation.run(model)
    again = evaluate(model, inputs, heldout, k=5, batch_size=16)
    assert Linear.times_traced == traced
    assert again == after
    assert after["recall@5"] != before["recall@5"]
    assert after["popularity_recall@5"] == before["popularity_recall@5"]


def all_scores(model, inputs):
    """All scores of a `FeedForward`, computed by calling it."""
    run = nnx.jit(lambda model, x: model(x, deterministic=True))
    return run(model, CSR.from_scipy(inputs))


def test_feed_forward(problem):
    """Dropout and corruption are off also in a model that is in training."""
    inputs, heldout = problem[:2]
    config = NetworkConfig.autoencoder((8, 5), corruption=0.5, dropout=0.5)
    model = FeedForward(config, inputs=19, outputs=19, rngs=nnx.Rngs(0))
    model.train()
    scores = all_scores(model, inputs)
    found = recommend(model, inputs, 5, exclude=inputs)
    ids, _ = oracle(scores, 5, inputs)
    np.testing.assert_array_equal(found.ids, ids)
    measured = evaluate(model, inputs, heldout, k=5, popularity=None)
    wanted = oracle_metrics(ids, heldout, 5) | {"users": measured["users"]}
    wanted |= all_items_known(inputs, heldout)
    assert measured == pytest.approx(wanted, rel=1e-5)


def test_rows_that_are_behind_are_read_up_to_date(problem):
    inputs, heldout = problem[:2]
    config = NetworkConfig.autoencoder((8,))
    model = FeedForward(config, inputs=19, outputs=19, rngs=nnx.Rngs(0))
    optimizer = Optimizer(model, optimizers.adam(0.05))

    @nnx.jit
    def step(model, optimizer, x):
        _, grads = optimizer.value_and_grad(lambda model: model.loss(x, x))(model)
        optimizer.update(model, grads)

    # After the first step only two columns are touched: the others fall behind.
    columns = scipy.sparse.csr_array(np.eye(37, 19, dtype=bool)[:2])
    for part in (inputs, columns, columns, columns):
        step(model, optimizer, on_device(CSR.from_scipy(part)))
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    found = recommend(model, inputs, 5, optimizer=optimizer, exclude=None)
    measured = evaluate(model, inputs, heldout, k=5, optimizer=optimizer)
    stale = recommend(model, inputs, 5, exclude=None)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model, nnx.Param), before)
    optimizer.flush(model)
    current = recommend(model, inputs, 5, exclude=None)
    np.testing.assert_array_equal(found.ids, current.ids)
    np.testing.assert_allclose(found.scores, current.scores, rtol=1e-5)
    assert measured == pytest.approx(evaluate(model, inputs, heldout, k=5), rel=1e-5)
    assert np.abs(stale.scores - current.scores).max() > 1e-3


# rows the model has not seen


def test_unseen_rows_are_folded_in(problem, model):
    """The same as splitting each row and naming both parts."""
    whole = dataset(problem[0] + problem[1])
    train, others = whole.split_rows(0.4, seed=1)
    given, rest = others.split(0.7, seed=3)
    measured = evaluate(model, others, k=4, fold_in=0.7, seed=3, popularity=train)
    assert measured == evaluate(model, given, rest, k=4, popularity=train)
    assert measured["users"] == np.sum(np.diff(rest.matrix.indptr) > 0)
    scores = given.to_scipy().toarray() @ problem[2].astype(np.float64) + problem[3]
    ids, _ = oracle(scores, 4, given.to_scipy())
    shares = popularity_of(train.to_scipy())
    for key, value in oracle_metrics(ids, rest.to_scipy(), 4, shares).items():
        assert measured[key] == pytest.approx(value, rel=1e-5)
    assert measured != evaluate(model, others, k=4, fold_in=0.7, popularity=train)


def test_errors_of_folding_in(problem, model):
    data = dataset(problem[0])
    with pytest.raises(ValueError, match="give heldout, or fold_in"):
        evaluate(model, data)
    with pytest.raises(ValueError, match="heldout or fold_in, not both"):
        evaluate(model, data, data, fold_in=0.8)
    with pytest.raises(TypeError, match="must be a SparseDataset, got csr_array"):
        evaluate(model, problem[0], fold_in=0.8)
    with pytest.raises(ValueError, match="fold_in must be below 1"):
        evaluate(model, data, fold_in=1.0)


# candidates


def among(scores, candidates, heldout, k, exclude=None):
    """The oracle's k best among the candidates and the held-out items of each row."""
    others = (candidates.toarray() == 0) & (heldout.toarray() == 0)
    if exclude is not None:
        others |= exclude.toarray() != 0
    return oracle(scores, k, scipy.sparse.csr_array(others))[0]


@pytest.mark.parametrize(("k", "excluding"), [(1, True), (3, False), (25, True)])
def test_candidates_alone_are_ranked(problem, model, k, excluding):
    inputs, heldout = problem[:2]
    candidates = random_matrix(37, 19, density=0.3, seed=9)
    candidates = scipy.sparse.csr_array(candidates.toarray() | (np.arange(19) == 4))
    exclude = inputs if excluding else None
    measured = evaluate(
        model,
        inputs,
        heldout,
        k=k,
        exclude=exclude,
        candidates=candidates,
        batch_size=7,
    )
    popularity = popularity_of(inputs)
    ids = among(scores_of(problem), candidates, heldout, k, exclude)
    wanted = oracle_metrics(ids, heldout, k, popularity)
    popular = np.tile(popularity, (37, 1))
    ids = among(popular, candidates, heldout, k, exclude)
    for name, value in oracle_metrics(ids, heldout, k, popularity).items():
        wanted[f"popularity_{name}"] = value
    wanted |= {"users": measured["users"]}
    wanted |= all_items_known(inputs, heldout)
    assert measured == pytest.approx(wanted, rel=1e-5)


def test_leave_one_out_by_hand():
    """The held-out item has rank 2 for one user and 3 for the other."""
    model = Linear(np.zeros((5, 5)), bias=[5, 4, 3, 2, 1])
    names = ["ann", "bob"]
    inputs = dataset(scipy.sparse.csr_array(np.eye(5, dtype=bool)[[4, 4]]), names)
    heldout = dataset(scipy.sparse.csr_array(np.eye(5, dtype=bool)[[2, 3]]), names)
    lists = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 1, 1], [0, 1, 1, 0, 1]], bool)
    candidates = dataset(scipy.sparse.csr_array(lists), ["ann", "eve", "bob"])
    every = scipy.sparse.csr_array(np.ones((1, 5), bool))  # so all items are known
    options = {"k": (1, 2), "popularity": every}
    found = evaluate(model, inputs, heldout, candidates=candidates, **options)
    assert found["hit_rate@1"] == 0
    assert found["hit_rate@2"] == found["recall@2"] == 1 / 2
    assert found["ndcg@2"] == pytest.approx(1 / np.log2(3) / 2, rel=1e-6)
    assert found["mrr@2"] == 1 / 4
    # With the item itself among the candidates it is the same.
    lists[0, 2] = lists[2, 3] = True
    again = dataset(scipy.sparse.csr_array(lists), ["ann", "eve", "bob"])
    assert evaluate(model, inputs, heldout, candidates=again, **options) == found


@pytest.mark.parametrize("temperature", [None, 0.2])
def test_feed_forward_scores_candidates(problem, temperature):
    inputs, heldout = problem[:2]
    config = NetworkConfig.autoencoder((8,), temperature=temperature)
    model = FeedForward(config, inputs=19, outputs=19, rngs=nnx.Rngs(0))
    scores = all_scores(model, inputs)
    candidates = scipy.sparse.csr_array(np.ones((37, 19), bool))
    # All items are candidates: the same as without.
    found = evaluate(model, inputs, heldout, k=5, candidates=candidates)
    assert found == pytest.approx(evaluate(model, inputs, heldout, k=5), rel=1e-6)
    candidates = random_matrix(37, 19, density=0.9)
    found = evaluate(model, inputs, heldout, k=5, candidates=candidates)
    ids = among(scores, candidates, heldout, 5, inputs)
    for key, value in oracle_metrics(ids, heldout, 5, popularity_of(inputs)).items():
        assert found[key] == pytest.approx(value, rel=1e-5)


def test_errors_of_candidates(problem, model):
    inputs, heldout, weights, bias = problem
    candidates = random_matrix(37, 19, density=0.9)
    with pytest.raises(
        ValueError, match="candidates has 18 columns but heldout has 19"
    ):
        evaluate(model, inputs, heldout, candidates=candidates[:, :18])
    with pytest.raises(ValueError, match="heldout has 37 rows but candidates has 36"):
        evaluate(model, inputs, heldout, candidates=candidates[:36])
    with pytest.raises(ValueError, match=r"1 of \d+ rows of heldout have no .*'row20'"):
        names = [f"row{r}" for r in range(37) if r != 20]
        some = dataset(candidates[[r for r in range(37) if r != 20]], names)
        evaluate(model, dataset(inputs), dataset(heldout), candidates=some)
    with pytest.raises(ValueError, match="rows of heldout have no candidates"):
        none = some.align_rows([])
        evaluate(model, dataset(inputs), dataset(heldout), candidates=none)
    with pytest.raises(ValueError, match="rows of heldout have no candidates"):
        evaluate(model, inputs, heldout, candidates=scipy.sparse.csr_array((37, 19)))
    with pytest.raises(FloatingPointError, match="row 0 of heldout"):
        broken = Linear(weights, bias + np.nan)
        evaluate(broken, inputs, heldout, k=5, candidates=candidates)

    class NoScores(nnx.Module):
        num_features = num_items = 19
        top_k = Linear.top_k

    with pytest.raises(TypeError, match="item_scores.*NoScores does not have it"):
        evaluate(NoScores(), inputs, heldout, candidates=candidates)


def test_errors_of_evaluate(problem, model):
    inputs, heldout = problem[:2]
    data, held = dataset(inputs), dataset(heldout)
    with pytest.raises(ValueError, match="heldout has 36 rows but inputs has 37"):
        evaluate(model, inputs, heldout[:36])
    with pytest.raises(ValueError, match="no row of heldout has an entry"):
        evaluate(model, inputs, scipy.sparse.csr_array((37, 19)))
    with pytest.raises(ValueError, match="4 of 4 rows of heldout .* inputs: 'a', 'b'"):
        rows = np.flatnonzero(heldout.sum(axis=1))[:4]
        names = list("abcd")
        evaluate(model, data, dataset(heldout[rows], names))
    with pytest.raises(ValueError, match="inputs has 19 columns but heldout has 18"):
        evaluate(model, inputs, heldout[:, :18])
    with pytest.raises(ValueError, match="'item0' in inputs but 'thing0' in heldout"):
        things = dataset(heldout, features=[f"thing{i}" for i in range(19)])
        evaluate(model, data, things)
    with pytest.raises(ValueError, match="inputs has 19 columns .* 18 features"):
        small = Linear(np.zeros((18, 19), np.float32))
        evaluate(small, data, held)
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        evaluate(model, data, held, k=(5, 0))


def test_unknown_rows_without_entries_are_no_error(problem, model):
    inputs, heldout = problem[:2]
    more = scipy.sparse.vstack([heldout, scipy.sparse.csr_array((1, 19))], format="csr")
    names = [f"row{r}" for r in range(37)] + ["newcomer"]
    measured = evaluate(model, dataset(inputs), dataset(more, names))
    assert measured == evaluate(model, inputs, heldout)
