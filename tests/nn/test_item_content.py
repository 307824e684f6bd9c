"""Vectors of items with content, and their gradients, compared with dense float64."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx
from jax.sharding import AxisType
from kernels import kernel_can_run
from tolerances import assert_close

import sparsejax as sj
from sparsejax.kinds import content as kinds_content
from sparsejax.kinds.content import count_entries
from sparsejax.mesh import layout
from sparsejax.nn import ContentSizes, ItemContent, content_vectors, item_content
from sparsejax.sequence.build import build_sequence_model

ITEMS, TAGS, WIDTH = 1100, 37, 8


def near(got, want, dtype, terms):
    """Compares sums of terms that cancel, with a tolerance relative to the largest term."""
    largest = np.abs(want).max()
    assert_close(got, want, terms=terms, magnitude=largest, dtype=dtype)


def some_tags(items=ITEMS, seed=0):
    """Draws tags: some rows have none, one has all, and values have both signs."""
    rng = np.random.default_rng(seed)
    dense = (rng.random((items, TAGS)) < 0.08) * rng.uniform(-1, 2, (items, TAGS))
    dense[::7], dense[3] = 0, 1
    return scipy.sparse.csr_array(dense)


def some_vectors(items=ITEMS, dtype=np.float16, seed=1):
    vectors = np.random.default_rng(seed).standard_normal((items, 5))
    vectors[::5] = 0
    return vectors.astype(dtype)


def some_counts(items=ITEMS):
    return np.random.default_rng(2).integers(0, 9, items)


def some_content(tags, vectors, items=ITEMS) -> Any:
    sizes = ContentSizes.of(tags, vectors)
    content = ItemContent(items, WIDTH, sizes, rngs=nnx.Rngs(0))
    content.set_to(tags, vectors)
    content.set_entries(some_counts(items))
    return content


def dense_parts(content, tags, vectors):
    """The factor a, its derivative, and the rows by which T and V are multiplied, in float64."""
    n = np.asarray(content.entries[...], np.float64)
    half = np.exp(float(content.log_half[...]))
    a, slope = n / (n + half), -n * half / (n + half) ** 2
    rows = len(n)
    t = np.zeros((rows, 1 if tags is None else content.tag_kernel.shape[0]))
    if tags is not None:
        dense = tags.toarray()
        norms = np.linalg.norm(dense, axis=1, keepdims=True)
        t[: tags.shape[0], : tags.shape[1]] = dense / np.where(norms > 0, norms, 1)
    v = np.zeros((rows, 1 if vectors is None else vectors.shape[1]))
    if vectors is not None:
        v[: len(vectors)] = vectors.astype(np.float64)
    return a, slope, t, v


def kernel_of(parameter, like):
    if parameter is None:
        return np.zeros((like.shape[1], WIDTH))
    return np.asarray(parameter[...], np.float64)


@pytest.mark.parametrize(
    ("with_tags", "with_vectors", "chunk", "dtype"),
    [
        (True, True, 2**16, jnp.float32),
        (True, True, 300, jnp.float32),
        (True, False, 300, jnp.float32),
        (False, True, 1, jnp.float32),
        (True, True, 300, jnp.bfloat16),
    ],
)
def test_vectors_and_gradients(monkeypatch, with_tags, with_vectors, chunk, dtype):
    monkeypatch.setattr(content_vectors, "CHUNK_ITEMS", chunk)
    monkeypatch.setattr(content_vectors, "SORTED_TAGS", 4 * chunk)  # also in some parts
    tags = some_tags() if with_tags else None
    vectors = some_vectors() if with_vectors else None
    content = some_content(tags, vectors)
    check(content, tags, vectors, dtype)


def check(content, tags, vectors, dtype, place=lambda x: x):
    rng = np.random.default_rng(3)
    a, slope, t, v = dense_parts(content, tags, vectors)
    r, g = (
        rng.standard_normal((len(a), WIDTH)).astype(np.float32).astype(np.float64)
        for _ in range(2)
    )
    r[content.items :] = 0
    g = np.asarray(jnp.asarray(g, dtype), np.float64)

    @nnx.jit
    def both(content, r, g):
        def f(content, r):
            made = content.vectors_with(r, dtype)
            return jnp.sum(made.astype(jnp.float32) * g), made

        grad = nnx.value_and_grad(f, argnums=(0, 1), has_aux=True)
        (_, made), slopes = grad(content, r)
        return made, *slopes

    made, of_content, of_rows = both(
        content, place(np.float32(r)), place(np.float32(g))
    )
    assert made.dtype == dtype
    kernels = kernel_of(content.tag_kernel, t), kernel_of(content.vector_kernel, v)
    wanted = a[:, None] * r + t @ kernels[0] + v @ kernels[1]
    near(np.asarray(made, np.float64), wanted, dtype, 64)
    assert not np.asarray(made)[content.items :].any()
    near(of_rows, a[:, None] * g, dtype, 4)
    terms = len(a)
    near(of_content["log_half"][...], np.sum(slope * (g * r).sum(1)), dtype, terms)
    if tags is not None:
        near(of_content["tag_kernel"][...], t.T @ g, dtype, terms)
    if vectors is not None:
        near(of_content["vector_kernel"][...], v.T @ g, dtype, terms)


def test_gpu_programs(monkeypatch):
    """Interpreted here: the sums of tags' rows, and the gradient of T in two parts."""
    tags = some_tags(200)[:, :2]  # the program is slow here, by entries
    monkeypatch.setattr(content_vectors, "SORTED_TAGS", 300)
    content = some_content(tags, None, 200)
    content.implementation = "mosaic_gpu"
    with kernel_can_run():
        check(content, tags, None, jnp.bfloat16)


def test_lowers_for_cuda():
    """With the GPU programs of tags, forward and backward, in loops over parts."""
    content = some_content(some_tags(), some_vectors())
    content.implementation = "mosaic_gpu"
    graph, learned, rest = nnx.split(content, nnx.Param, ...)

    def slopes(learned, rest, r):
        def f(learned, r):
            made = nnx.merge(graph, learned, rest, copy=True)
            return jnp.sum(made.vectors_with(r, jnp.bfloat16) ** 2)

        return jax.grad(f, argnums=(0, 1))(learned, r)

    r = jax.ShapeDtypeStruct((len(content.entries[...]), WIDTH), jnp.float32)
    traced = jax.jit(slopes).trace(learned, rest, r)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 4  # two programs, twice


@pytest.mark.parametrize(
    ("shape", "axis_type"),
    [((2, 4), AxisType.Auto), ((1, 8), AxisType.Explicit), ((8, 1), AxisType.Auto)],
)
def test_on_a_mesh(monkeypatch, shape, axis_type):
    monkeypatch.setattr(content_vectors, "CHUNK_ITEMS", 100)
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(axis_type,) * 2)
    tags, vectors = some_tags(), some_vectors()
    with jax.set_mesh(mesh):
        content = some_content(tags, vectors)
        lies: Any = content.given[...].sharding
        spec = lies.spec
        assert "model" in (spec[0] if isinstance(spec[0], tuple) else spec)

        def place(x):
            return jax.device_put(x, jax.NamedSharding(mesh, spec))

        check(content, tags, vectors, jnp.float32, place)


def test_memory_does_not_grow_by_content_in_float32():
    """What is beside arguments and results is one chunk, at two numbers of items."""

    def temporary(items):
        sizes = ContentSizes(vectors=256, dtype="float16")
        content = nnx.eval_shape(
            lambda: ItemContent(items, WIDTH, sizes, rngs=nnx.Rngs(0))
        )
        graph, learned, rest = nnx.split(content, nnx.Param, ...)

        def step(learned, rest, r):
            def f(learned, r):
                made = nnx.merge(graph, learned, rest, copy=True).vectors_with(r)
                return jnp.sum(jnp.sin(made))

            return jax.grad(f, argnums=(0, 1))(learned, r)

        r = jax.ShapeDtypeStruct((items, WIDTH), jnp.float32)
        made = jax.jit(step).lower(learned, rest, r).compile()
        analysis: Any = made.memory_analysis()
        return analysis.temp_size_in_bytes

    few, many = 2**17, 2**18
    per_item = (temporary(many) - temporary(few)) / (many - few)
    assert per_item < 4 * 4 * WIDTH  # content is 512 bytes an item, in float32 1,024


@pytest.mark.parametrize(("name", "temperature"), [("sasrec", 0.2), ("gru", None)])
def test_models_of_histories_read_and_score_one_matrix(name, temperature):
    """Loss and best items are those of a model whose kernel is the finished vectors."""
    tags, vectors = some_tags(60), some_vectors(60, np.float32)
    config = {
        "sasrec": sj.SASRecConfig(
            max_length=4, width=WIDTH, blocks=1, temperature=temperature
        ),
        "gru": sj.GRUConfig(
            max_length=4, width=WIDTH, blocks=1, temperature=temperature
        ),
    }[name]
    made = [
        build_sequence_model(config, items=60, content=sizes, rngs=nnx.Rngs(0))
        for sizes in (ContentSizes.of(tags, vectors), None)
    ]
    for model in made:
        model.eval()
    with_content, plain = made
    content: Any = with_content.output.content
    content.set_to(tags, vectors)
    content.set_entries(some_counts(60) + 1)
    a, _, t, v = dense_parts(content, tags, vectors)
    r = np.asarray(with_content.output.kernel[...], np.float64)
    kernels = kernel_of(content.tag_kernel, t), kernel_of(content.vector_kernel, v)
    e = a[:, None] * r + t @ kernels[0] + v @ kernels[1]
    # All other parameters alike: content draws numbers that move them.
    rest = nnx.state(with_content)
    rest["output"].pop("content")
    nnx.update(plain, rest)
    plain.output.kernel.set_value(jnp.asarray(e, jnp.float32))
    histories = jnp.array([[0, 7, 59, 3, 3], [5, 1, -1, -1, -1]])
    want, slopes = nnx.value_and_grad(lambda m: m.loss(histories))(plain)
    got, found = nnx.value_and_grad(lambda m: m.loss(histories))(with_content)
    near(got, float(want), jnp.float32, 64)
    g = np.asarray(slopes["output"]["kernel"][...], np.float64)
    near(found["output"]["kernel"][...], a[:, None] * g, jnp.float32, 4096)
    of_content = found["output"]["content"]
    near(of_content["tag_kernel"][...], t.T @ g, jnp.float32, 4096)
    near(of_content["vector_kernel"][...], v.T @ g, jnp.float32, 4096)
    for method in ("top_k", "item_scores"):
        argument = 5 if method == "top_k" else jnp.array([[0, 59], [4, 4]])
        a, b = (
            getattr(m, method)(histories[:, :4], argument)
            for m in (with_content, plain)
        )
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_new_items_are_their_content():
    tags, vectors = some_tags(250), some_vectors(250)
    content = some_content(tags, vectors, 250)
    kernel = jnp.ones((512, WIDTH))
    before = content.vectors_with(kernel[:256])
    content.add_items(30)
    after = content.vectors_with(kernel)
    np.testing.assert_array_equal(after[:250], before[:250])
    assert not after[250:].any()  # no content and no entries yet
    content.set_to(some_tags(280), some_vectors(280))
    a, _, t, v = dense_parts(content, some_tags(280), some_vectors(280))
    assert not a[250:].any()
    want = t @ kernel_of(content.tag_kernel, t) + v @ kernel_of(
        content.vector_kernel, v
    )
    near(content.vectors_with(kernel)[250:], want[250:], jnp.float32, 64)


@pytest.mark.usefixtures("wrong_types")
def test_arrays_that_span_processes_are_exchanged(monkeypatch):
    taken = []

    def spy(array):
        taken.append(array.shape)
        return layout.to_host(array)

    for module in (kinds_content, item_content):
        monkeypatch.setattr(module, "to_host", spy)
    content = some_content(some_tags(20), None, 20)
    model: Any = types.SimpleNamespace(output=types.SimpleNamespace(content=content))
    counts = np.arange(20)
    count_entries(model, counts)
    np.testing.assert_array_equal(
        content.entries[:20], np.maximum(counts, some_counts(20))
    )
    assert len(taken) == 1
    content.add_items(3)
    assert len(taken) == 4


def test_wrong_content():
    tags, vectors = some_tags(20), some_vectors(20)
    content = some_content(tags, vectors, 20)
    with pytest.raises(ValueError, match="vectors of 0 numbers, but the model"):
        content.set_to(tags, None)
    with pytest.raises(ValueError, match="of 19 items, but the model has 20"):
        content.set_to(some_tags(19), some_vectors(19))
    with pytest.raises(ValueError, match="one for each of 20 items"):
        content.set_entries(np.ones(19))


def test_items_without_entries_are_unseen_and_padding_is_not():
    content = some_content(some_tags(20), None, 20)
    rows = len(content.entries[...])
    assert rows > 20
    counts = np.arange(20) % 3
    for given, want in ((counts, counts == 0), (0 * counts, np.zeros(20, bool))):
        content.set_entries(given)
        found = np.asarray(content.unseen())
        np.testing.assert_array_equal(found, np.pad(want, (0, rows - 20)))


def test_a_softmax_leaves_out_items_without_entries():
    """In training they are no negatives; they are ranked like all others."""
    tags, histories = some_tags(60), jnp.array([[0, 7, 59, 3, 3], [5, 1, -1, -1, -1]])
    config = sj.SASRecConfig(max_length=4, width=WIDTH, blocks=1)
    sizes = ContentSizes.of(tags, None)
    model = build_sequence_model(config, items=60, content=sizes, rngs=nnx.Rngs(0))
    model.eval()
    content: Any = model.output.content
    content.set_to(tags, None)
    counts = np.arange(60) % 2  # the items of the histories have some
    counts[[0, 59, 3, 7, 5, 1]] = 1
    content.set_entries(counts)
    h = model(histories[:, :4])
    scores = np.asarray(model.output.scores(h.reshape(8, -1)), np.float64)
    targets = np.asarray(histories[:, 1:]).reshape(-1)
    rows = np.flatnonzero(targets >= 0)
    kept = np.where(counts > 0, scores, -np.inf)[rows]
    lse = np.log(np.exp(kept).sum(axis=1))
    want = np.mean(lse - kept[np.arange(len(rows)), targets[rows]])
    near(model.loss(histories), want, jnp.float32, 64)
    slopes = nnx.grad(lambda m: m.loss(histories))(model)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes))
    ids, _ = model.top_k(histories[:, :4], 60)
    assert set(np.asarray(ids[0]).tolist()) == set(range(60))


@pytest.mark.parametrize("kind", ["histories", "items"])
def test_in_training_some_items_are_their_content_alone(monkeypatch, kind):
    """Others in each step. Nothing is left out when items are ranked."""
    tags = some_tags(60)
    sizes, rngs = ContentSizes.of(tags, None), nnx.Rngs(0)
    if kind == "histories":
        config = sj.GRUConfig(max_length=4, width=WIDTH, blocks=1, dropout=0.0)
        model: Any = build_sequence_model(config, items=60, content=sizes, rngs=rngs)
        shown: Any = (jnp.array([[0, 7, 59, 3, 3], [5, 1, -1, -1, -1]]),)
    else:
        network = sj.NetworkConfig.autoencoder((WIDTH,), corruption=0.0, tied=True)
        sizes_of_model = {"inputs": 60, "outputs": 60, "content": sizes}
        model = sj.FeedForward(network, **sizes_of_model, rngs=rngs)
        x = sj.CSR.from_scipy(scipy.sparse.csr_array(np.eye(3, 60)))
        shown = x, x
    content: Any = model.output.content
    content.set_to(tags, None)
    content.set_entries(some_counts(60) + 1)

    where = "output" if kind == "histories" else "first"

    def loss(rate, training=True):
        monkeypatch.setattr(item_content, "DROPPED", rate)
        (model.train if training else model.eval)()
        slopes = nnx.value_and_grad(lambda m: m.loss(*shown))(model)
        return float(slopes[0]), slopes[1][where]["kernel"][...]

    whole, _ = loss(0.0)
    some, slopes = loss(0.5)
    assert some != whole and some != loss(0.5)[0]
    rows = np.asarray(slopes).any(axis=1)[:60]
    assert 10 < rows.sum() < 50  # the others are content alone
    assert loss(0.5, training=False)[0] == pytest.approx(whole, rel=1e-6)
    alone, slopes = loss(1.0)
    bare = np.diff(tags.indptr) == 0
    assert not np.asarray(slopes)[:60][~bare].any()
    kernel = model.output.kernel[...]
    model.output.kernel.set_value(kernel.at[np.flatnonzero(~bare)].set(0))
    assert loss(0.0)[0] == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("kind", ["tags", "vectors", "both"])
def test_items_without_content_keep_their_rows(monkeypatch, kind):
    monkeypatch.setattr(item_content, "DROPPED", 1.0)
    tags = some_tags(60) if kind != "vectors" else None
    vectors = np.eye(60, 5, dtype=np.float32) if kind != "tags" else None
    content = ItemContent(60, WIDTH, ContentSizes.of(tags, vectors), rngs=nnx.Rngs(0))
    content.set_to(tags, vectors)
    content.set_entries(np.full(60, 9))
    content.train()
    kernel = jax.random.normal(jax.random.key(0), content.entries.shape + (WIDTH,))
    has = np.zeros(60, bool)
    has |= np.diff(tags.indptr) > 0 if tags is not None else False
    has |= vectors.any(axis=1) if vectors is not None else False
    assert has.any() and not has.all()
    found = content.vectors_with(kernel, deterministic=False)[:60]
    whole = content.vectors_with(kernel)[:60]
    np.testing.assert_array_equal(found[~has], whole[~has])
    assert np.all(np.any(np.asarray(found != whole), axis=1) == has)


@pytest.mark.parametrize("use_bias", [True, False])
def test_items_without_entries_are_no_sampled_negatives(use_bias):
    """Drawn or not, they change neither the loss nor what is learned."""
    tags, vectors = None, np.eye(4, 3, dtype=np.float32)
    layer: Any = sj.nn.SparseOutput(
        3,
        4,
        use_bias=use_bias,
        content=ContentSizes.of(tags, vectors),
        rngs=nnx.Rngs(0),
    )
    layer.content.set_to(tags, vectors)
    layer.content.set_entries(np.array([3, 0, 2, 0]))
    h, targets = jnp.ones((3, 3)), jnp.array([0, 2, -1])

    def found(negatives):
        def loss(layer):
            return layer.sampled_cross_entropy(h, targets, jnp.array(negatives))

        return nnx.value_and_grad(loss)(layer)

    (got, slopes), (want, others) = found([0, 1, 2, 3, -1]), found([0, 2])
    np.testing.assert_allclose(got, want, rtol=1e-6)
    pairs = zip(jax.tree.leaves(slopes), jax.tree.leaves(others), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    # The vector of item 1 alone has the second number.
    assert not slopes["content"]["vector_kernel"][1].any()
    loss, slopes = found([1, 3, -1])
    assert loss == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))
