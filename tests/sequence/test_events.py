"""Models of histories with event columns, and weighted losses, compared with NumPy."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.sequence.events import (
    Categories,
    EventSizes,
    EventVectors,
    Label,
    NextEvent,
)
from sparsejax.sequence.turns import tokens_of_turn

ITEMS, LENGTH = 11, 12
CONFIGS = {
    "sasrec": sj.SASRecConfig(
        max_length=LENGTH, width=8, dropout=0.0, blocks=1, temperature=None
    ),
    "hstu": sj.HSTUConfig(
        max_length=LENGTH, width=8, dropout=0.0, blocks=1, temperature=None
    ),
    "gru": sj.GRUConfig(
        max_length=LENGTH, width=8, dropout=0.0, blocks=1, temperature=None
    ),
}
SIZES = EventSizes(
    ("price",),
    (
        Categories("kind", "kind", 4, None),
        Categories("tags", "tags", 6, 3),
        Categories("first", "tags", 6, None),
    ),
    context=("price", "tags"),
    users=EventSizes(("age",), (Categories("likes", "likes", 5, 2),)),
)


def made(name: str, events: EventSizes | None = SIZES, **options):
    config = dataclasses.replace(CONFIGS[name], **options)
    model = sj.sequence.build_sequence_model(
        config, items=ITEMS, events=events, rngs=nnx.Rngs(0)
    )
    model.output.kernel[...] *= 20
    for vectors in (model.events, model.context, model.users):
        if vectors is not None and vectors.numbers is not None:
            for table in [*vectors.tables, vectors.numbers]:
                table[...] *= 20
    model.eval()
    return model


def batch(rows: int, seed: int = 0):
    """Histories, weights and columns `[rows, LENGTH + 1]`; some rows are empty."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, LENGTH + 2, rows)
    lengths[:2] = 0, LENGTH + 1
    shape = rows, LENGTH + 1
    is_item = np.arange(LENGTH + 1) < lengths[:, None]
    weights = np.where(rng.random(shape) < 0.5, 0, rng.random(shape))
    columns = {
        "price": rng.normal(size=shape),
        "kind": rng.integers(0, 4, shape),
        "tags": np.sort(rng.integers(-1, 6, (*shape, 3)))[..., ::-1],
        "first": rng.integers(0, 6, shape),
    }
    columns["users/age"] = rng.normal(size=rows)
    columns["users/likes"] = np.sort(rng.integers(-1, 5, (rows, 2)))[..., ::-1]
    columns = {
        n: jnp.asarray(
            np.ascontiguousarray(x), jnp.float32 if x.dtype == float else jnp.int32
        )
        for n, x in columns.items()
    }
    histories = np.where(is_item, rng.integers(0, ITEMS, shape), -1)
    return jnp.asarray(histories), jnp.asarray(weights, jnp.float32), columns


def shown(columns, length: int = LENGTH):
    """The columns at the first positions, and the context of the event after them."""
    to_come = {f"context/{n}": columns[n][:, length] for n in SIZES.context}
    own = {n: columns[n][:, :length] for n in SIZES.shapes}
    return columns | own | to_come


def test_vectors_are_sums_over_columns():
    vectors = EventVectors(SIZES, 5, rngs=nnx.Rngs(0))
    columns = {n: x for n, x in batch(6)[2].items() if n in SIZES.shapes}
    found = vectors(columns)
    assert vectors.numbers is not None
    kinds, tags = (np.asarray(table[...], np.float64) for table in vectors.tables)
    numbers = np.asarray(vectors.numbers[...], np.float64)
    given = {name: np.asarray(x) for name, x in columns.items()}
    has = given["tags"] >= 0
    several = (tags[given["tags"]] * has[..., None]).sum(-2)
    several /= np.maximum(has.sum(-1), 1)[..., None]
    wanted = kinds[given["kind"]] + several + tags[given["first"]]
    wanted += given["price"][..., None] * numbers[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    for name, wrong in (("kind", 4), ("kind", -1), ("tags", 6)):
        broken = columns | {name: columns[name].at[0, 0].set(wrong)}
        is_nan = np.isnan(vectors(broken)).all(axis=-1)
        assert is_nan[0, 0] and is_nan.sum() == 1


@pytest.mark.parametrize("negatives", [None, 5])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_is_the_weighted_mean_over_targets(name, negatives):
    """Of all places at once, of those that are packed, and by turns."""
    model = made(name, negatives=negatives)
    histories, weights, columns = batch(120)
    assert tokens_of_turn(histories) is not None

    @nnx.jit
    def losses(model, histories, weights, columns):
        def loss(**how):
            own = {"weights": weights, "events": columns}
            return nnx.clone(model).loss(histories, **own, **how)

        hidden = model(histories[:, :-1], events=shown(columns))
        return loss(), loss(max_targets=histories.size), hidden

    by_turns, packed, hidden = losses(model, histories, weights, columns)
    np.testing.assert_allclose(by_turns, packed, rtol=1e-5)
    if negatives is None:
        scores = (
            np.asarray(hidden, np.float64)
            @ np.asarray(model.output.kernel[...][:ITEMS], np.float64).T
        )
        scores -= scores.max(-1, keepdims=True)
        logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        targets = np.asarray(histories)  # also the first item, behind the user's place
        each = -np.take_along_axis(logs, np.maximum(targets, 0)[..., None], -1)[..., 0]
        own = np.where(targets >= 0, np.asarray(weights, np.float64), 0)
        np.testing.assert_allclose(by_turns, (own * each).sum() / own.sum(), rtol=1e-5)
    nothing = losses(model, histories, jnp.zeros_like(weights), columns)
    assert nothing[0] == nothing[1] == 0
    with pytest.raises(ValueError, match="one for each place of the histories"):
        model.loss(histories, weights=weights[:, 1:], events=columns)


def labelled() -> EventSizes:
    """The sizes of event columns, with labels of each kind."""
    number, columns = sj.data.DenseColumn(missing=0.25), sj.data.LabelColumn
    labels = (
        Label("kind", columns(weight=2.0), 0, 3),
        Label("tags", columns(), 3, 5),
        Label("price", columns("quantile", 0.3), 8, 1, number),
        Label("seconds", columns("squared", weight=0.5), 9, 1, number),
    )
    dense = "price", "seconds"
    return dataclasses.replace(SIZES, dense=dense, context=("first",), labels=labels)


def with_labels(rows: int):
    """The result of `batch`, in which some numbers are missing."""
    histories, weights, columns = batch(rows)
    rng = np.random.default_rng(1)
    for name in ("price", "seconds"):
        x = rng.normal(size=histories.shape)
        missing = rng.random(histories.shape) < 0.3
        columns[name] = jnp.asarray(np.where(missing, np.nan, x), jnp.float32)
    return histories, weights, columns


def losses_of_labels(head, h, items, columns, is_event):
    """The mean of the events' losses by the formula of `NextEvent`, in float64."""
    p = {
        n: [
            np.asarray(x[...], np.float64)
            for x in (layer.kernel, layer.bias)
            if x is not None
        ]
        for n, layer in vars(head).items()
        if isinstance(layer, nnx.Linear)
    }
    (a, b), (c, d), (e, f) = p["of_history"], p["of_item"], p["scores"]
    z = ((h @ a + b) * (items * np.sqrt(items.shape[-1]) @ c + d)) @ e + f
    total = 0.0
    for name, ids, first, weight in (("kind", 4, 0, 2.0), ("tags", 6, 3, 1.0)):
        x = np.asarray(columns[name])
        x = x[..., None] if x.ndim == 2 else x
        has = (x[..., None] == np.arange(1, ids)).any(axis=-2)
        own = z[..., first : first + ids - 1]
        each = np.logaddexp(0, own) - has * own
        total += weight * (each.sum(-1) * (x > 0).any(-1) * is_event).sum()
    price, seconds = (np.asarray(columns[n], np.float64) for n in ("price", "seconds"))
    over = price - z[..., 8]
    total += np.nansum(np.maximum(0.3 * over, -0.7 * over) * is_event)
    total += 0.5 * np.nansum(np.square(seconds - z[..., 9]) * is_event)
    return total / is_event.sum()


@pytest.mark.parametrize(
    ("name", "negatives"), [("sasrec", None), ("hstu", 5), ("gru", 5)]
)
def test_labels_of_the_next_event_have_losses_of_their_own(name, negatives):
    """Packed and by turns; they are means over all events, whatever the weights."""
    model = made(name, labelled(), negatives=negatives)
    plain = nnx.clone(model)
    plain.next_event = None
    histories, weights, columns = with_labels(90)
    assert tokens_of_turn(histories) is not None
    packed = {"max_targets": histories.size}

    def loss(model, weights, **how):
        own = {"events": columns, "weights": weights}
        return nnx.clone(model).loss(histories, **own, **how)

    @nnx.jit
    def losses(model, plain, weights):
        return (
            loss(model, weights),
            loss(model, weights, **packed),
            loss(plain, weights),
        )

    own = {n: columns[n][:, :LENGTH] for n in labelled().shapes}
    own |= {"context/first": columns["first"][:, LENGTH]}
    own |= {n: x for n, x in columns.items() if n.startswith("users/")}
    h = nnx.jit(lambda model, h, e: model(h, events=e))(model, histories[:, :-1], own)
    h, kernel = (np.asarray(x, np.float64) for x in (h, model.output.kernel[...]))
    items = kernel[np.maximum(np.asarray(histories), 0)]
    is_event = np.asarray(histories) >= 0
    wanted = losses_of_labels(model.next_event, h, items, columns, is_event)
    *found, without = losses(model, plain, weights)
    np.testing.assert_allclose(np.array(found) - without, wanted, rtol=2e-5)
    *found, without = losses(model, plain, jnp.zeros_like(weights))
    np.testing.assert_allclose(found, wanted, rtol=2e-5)
    assert without == 0


@pytest.mark.parametrize("how", ["turns", "packed"])
def test_gradients_of_labels_are_those_of_differences(how):
    """Also of the vectors of items, which are read as inputs, targets and given items."""
    model = made("sasrec", labelled())
    histories, _, columns = with_labels(90)
    graph, state, rest = nnx.split(model, nnx.Param, ...)
    rng = np.random.default_rng(0)
    shift = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), state)
    most = histories.size if how == "packed" else None

    @jax.jit
    def loss_and_gradient(state):
        def loss(state):
            model = nnx.merge(graph, state, rest, copy=True)
            return model.loss(histories, events=columns, max_targets=most)

        return jax.value_and_grad(loss)(state)

    leaves = zip(
        *map(jax.tree.leaves, (loss_and_gradient(state)[1], shift)), strict=True
    )
    given = sum(float(jnp.vdot(x, d)) for x, d in leaves)
    moved = (
        jax.tree.map(lambda x, d, by=by: x + by * d, state, shift)
        for by in (1e-3, -1e-3)
    )
    ends = [float(loss_and_gradient(each)[0]) for each in moved]
    np.testing.assert_allclose(given, (ends[0] - ends[1]) / 2e-3, rtol=2e-2)


def test_one_vector_gives_the_score_of_any_item():
    head = NextEvent(labelled(), 8, rngs=nnx.Rngs(0))
    h, items = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    wanted = head(h[:, None], items[None])
    for place in range(10):
        vector, number = head.query(h, place)
        found = vector @ items.T + number[:, None]
        np.testing.assert_allclose(found, wanted[..., place], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_column_changes_no_earlier_place(name):
    """But a column that is known of the event to come changes the place before it."""
    model = made(name)
    histories, _, columns = batch(4)
    histories = jnp.maximum(histories, 0)[:, :LENGTH]
    hidden = nnx.jit(lambda model, histories, events: model(histories, events=events))
    before = hidden(model, histories, shown(columns))
    for at, column in itertools.product((7, LENGTH), SIZES.shapes):
        x = columns[column]
        other = x.at[:, at].add(1)
        if column == "tags":
            other = x.at[:, at, 0].set((x[:, at, 0] + 1) % 6)
        elif column != "price":
            other = x.at[:, at].set((x[:, at] + 1) % SIZES.ids[0].size)
        after = hidden(model, histories, shown(columns | {column: other}))
        # The place of users is before the first one.
        first = at + 1 - (column in SIZES.context)
        np.testing.assert_array_equal(after[:, :first], before[:, :first])
        if first <= LENGTH:
            moved = np.abs(after[:, first] - before[:, first]).max(axis=1)
            assert (moved > 1e-4).all(), column
    older = shown(columns | {"users/age": columns["users/age"] + 1})
    moved = np.abs(hidden(model, histories, older) - before).max(axis=2)
    assert (moved > 1e-5).all()  # also of the first place, before all items
    columns = shown(columns)
    # The last place alone, whose padding is not computed on a CPU.
    many = jnp.tile(histories, (100, 1)).at[::3, 5:].set(-1)
    given = {n: jnp.tile(x, (100,) + (1,) * (x.ndim - 1)) for n, x in columns.items()}
    assert tokens_of_turn(many) is not None
    last = nnx.jit(lambda model, h, e: (model.last(h, events=e), model(h, events=e)))
    found, every = last(model, many, given)
    place = np.sum(np.asarray(many) >= 0, axis=1)
    wanted = np.take_along_axis(np.asarray(every), place[:, None, None], 1)[:, 0]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_columns_without_an_item_are_not_read(name):
    model = made(name)
    histories, _, columns = batch(4)  # the first one is empty
    histories, columns = histories[:, :LENGTH], shown(columns)
    has = np.asarray(histories >= 0)
    other = columns | {
        n: jnp.where(
            has.reshape(has.shape + (1,) * (columns[n].ndim - 2)), columns[n], 3
        )
        for n in SIZES.shapes
    }
    hidden = nnx.jit(lambda model, histories, events: model(histories, events=events))
    found, changed = (hidden(model, histories, each) for each in (columns, other))
    np.testing.assert_array_equal(found[0, 0], changed[0, 0])
    request = columns | {"context/price": columns["context/price"] + 1}
    asked = hidden(model, histories, request)
    last = has.sum(axis=1), np.arange(4)  # behind the place of users
    assert (np.abs(asked - found)[last[1], last[0]].max(axis=1) > 1e-4).all()
    for row, place in zip(last[1], last[0], strict=True):
        np.testing.assert_array_equal(asked[row, :place], found[row, :place])
    has = np.pad(has, ((0, 0), (1, 0)), constant_values=True)  # the place of users
    np.testing.assert_array_equal(found[has], changed[has])


def test_columns_must_be_those_of_the_model():
    histories, _, columns = batch(3)
    wrong = {
        "kind": columns["kind"][:-1],
        "tags": columns["tags"][..., 0],
        "price": columns["price"][..., None],
    }
    uses = (
        lambda model, events: model.loss(histories, events=events),
        lambda model, events: model.last(histories[:, :-1], events=shown(events)),
    )
    for model, (column, values), use in itertools.product(
        (made("sasrec"), made("gru")), wrong.items(), uses
    ):
        with pytest.raises(ValueError, match=f"of events '{column}' has the shape"):
            use(model, columns | {column: values})
    with pytest.raises(ValueError, match="made without columns of events"):
        made("sasrec", None).loss(histories, events=columns)
    for name in ("sasrec", "gru"):
        with pytest.raises(
            ValueError, match="reads the columns of events .* give events"
        ):
            made(name).loss(histories)
    with pytest.raises(NotImplementedError, match="scores of neighbours"):
        sizes = sj.nn.ContentSizes.of(None, np.ones((ITEMS, 2), np.float32))
        config = CONFIGS["sasrec"]
        content = sj.sequence.build_sequence_model(
            config, items=ITEMS, events=SIZES, content=sizes, rngs=nnx.Rngs(0)
        )
        sj.sequence.WithNeighbours(content)


@pytest.mark.parametrize("name", CONFIGS)
def test_eight_devices_do_what_one_does(name):
    histories, weights, columns = with_labels(16)

    def gradients():
        model = made(name, labelled())

        @nnx.jit
        def both(model):
            def loss(model):
                own = {"weights": weights, "events": columns}
                packed = model.loss(histories, **own, max_targets=histories.size)
                return packed + model.loss(histories, **own)

            return nnx.value_and_grad(loss)(model)

        return both(model)

    loss, one = gradients()
    with jax.set_mesh(sj.make_mesh(data=2, model=4)):
        on_mesh, eight = gradients()
    np.testing.assert_allclose(on_mesh, loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(eight), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
