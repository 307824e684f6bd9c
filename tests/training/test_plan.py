"""Compares memory plans with real arrays, and with the memory that the compiler reports."""

import contextlib
import dataclasses
import functools
import math
import re
from typing import Any

import jax
import numpy as np
import pytest
import scipy.sparse
from flax import nnx
from jax.sharding import NamedSharding

import sparsejax as sj
from sparsejax import training
from sparsejax.data.sets.events import Events
from sparsejax.engine.train.footprint import footprint, laid_out
from sparsejax.kinds.histories.footprint import HistoryWorkload
from sparsejax.kinds.items.footprint import NetworkWorkload
from sparsejax.mesh.layout import padded_rows, put_on_mesh
from sparsejax.nn.config import HiddenConfig, InputConfig, OutputConfig
from sparsejax.sequence.build import build_sequence_model
from sparsejax.sequence.events import EventSizes
from sparsejax.verbs import plan as planning
from sparsejax.verbs.plan import plan

ADAMW = sj.optimizers.adamw(1e-3, weight_decay=0.1)
RMSPROP = sj.optimizers.rmsprop(1e-3)
SGD = sj.optimizers.sgd(1e-3)
DECAYING = sj.optimizers.sgd(1e-3, weight_decay=1e-3)
SIZES: dict[str, Any] = {
    "inputs": 70_000,
    "rows": 5_000,
    "entries": 200_000,
    "batch_size": 64,
}
DEEP = sj.NetworkConfig(
    layers=(
        InputConfig(),
        HiddenConfig(name="hidden1", size=24, dropout=0.1),
        HiddenConfig(name="hidden2", size=48, use_bias=False),
        HiddenConfig(name="hidden3", size=40),
        OutputConfig(use_bias=False, dtype="bfloat16"),
    )
)
WIDE = sj.NetworkConfig.autoencoder((128,), temperature=None)
HALF = sj.NetworkConfig.autoencoder((128,), temperature=None, output_dtype="bfloat16")
TIED = sj.NetworkConfig.autoencoder((32,), tied=True)


def small(network: sj.NetworkConfig, rule=RMSPROP, **options: Any) -> sj.Plan:
    return plan(network, rule, **{**SIZES, **options})


def large(network: sj.NetworkConfig, rule=SGD, **options: Any) -> sj.Plan:
    """A plan for ten times the items, so that one array is the largest temporary one."""
    return small(network, rule, **{"inputs": 700_000, **options})


@pytest.mark.parametrize(
    ("network", "name"),
    [(DEEP, "sgd"), (TIED, "rmsprop"), (DEEP, "rowwise_adagrad"), (TIED, "adam")],
    ids=["deep", "tied", "deep", "tied"],
)
def test_weights_and_state_are_those_of_real_arrays(network, name):
    rule = sj.optimizers.get(name, learning_rate=0.1)
    planned = plan(network, rule, inputs=1000, rows=10, entries=100)
    model = sj.FeedForward(network, inputs=1000, outputs=1000, rngs=nnx.Rngs(0))
    optimizer = sj.Optimizer(model, rule)

    def size(module) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(module)))

    assert (planned.weights, planned.state) == (size(model), size(optimizer))


@functools.cache
def compiled(network, rule=SGD, **options) -> int:
    """Temporary bytes of a `large` program, as compiled; also checks the other figures of the
    plan.
    """
    planned = large(network, rule, compile=True, **options)
    assert planned.compiled is not None and planned.compiled.platform == "cpu"
    numbers = 2 * 4  # the first step, and how many
    assert planned.compiled.kept == planned.kept + numbers
    assert "compiler (cpu)" in planned.table()
    return planned.compiled.temporary


CONTENT = sj.nn.ContentSizes(tags=500, entries=3000, vectors=96, dtype="float16")


@pytest.mark.parametrize("kind", ["items", "histories"])
def test_content_is_counted_as_it_is_built(kind):
    """Also what a mesh divides, and sends."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((1000, 7)).astype(np.float16)
    tags = scipy.sparse.random_array((1000, 30), density=0.1, rng=rng, format="csr")
    sizes = sj.nn.ContentSizes.of(tags.astype(np.float32), vectors)
    network: Any = TIED
    rule = sj.optimizers.adam(1e-3)
    if kind == "histories":
        network = sj.SASRecConfig(max_length=6, width=32, blocks=1, heads=1)
    counts = {"inputs": 1000, "rows": 10, "entries": 100}
    options: dict[str, Any] = {**counts, "content": sizes, "batch_size": 64}
    planned = plan(network, rule, **options)
    rngs = nnx.Rngs(0)
    if kind == "items":
        how = {"inputs": 1000, "outputs": 1000, "content": sizes}
        model: Any = sj.FeedForward(network, **how, rngs=rngs)
    else:
        model = build_sequence_model(network, items=1000, content=sizes, rngs=rngs)
    optimizer = sj.Optimizer(model, rule)

    def size(module) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(module)))

    assert (planned.weights, planned.state) == (size(model), size(optimizer))
    del options["content"]
    mesh = {"data": 2, "model": 4}
    one, other = (
        plan(network, rule, **options, **mesh, content=c) for c in (sizes, None)
    )
    rows = padded_rows(1000)
    given = 2 * rows * 7 + 4 * rows + 4 * (2 * 256 * sizes.entries + 256 + rows)
    # Two kernels, the log of a number, and a random key with its count.
    shared = 4 * (padded_rows(30) + 7) * 32 + 4
    assert one.weights - other.weights == given // 8 + shared + 4 + 8
    sums = "sums of hidden gradients"
    # Layers of histories are on all devices, those of items are divided over "model".
    devices = 8 if kind == "histories" else 2
    crosses = 2 * (devices - 1) / devices * shared
    found = one.over_data[sums] - other.over_data[sums]
    assert found == pytest.approx(crosses, abs=2)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_vectors_with_content_and_their_gradient_are_temporary(half):
    network = HALF if half else WIDE
    more = compiled(network, content=CONTENT) - compiled(network)
    with_content, without = large(network, content=CONTENT), large(network)
    planned = with_content.temporary - without.temporary
    assert more == pytest.approx(planned, rel=0.3)
    with pytest.raises(NotImplementedError, match="cannot have a fused update"):
        small(network, content=CONTENT, fused=True)


def test_the_gradient_of_the_output_is_what_a_fused_update_saves():
    """On a CPU chunks are smaller, but the gradient is the same array."""
    saved = compiled(WIDE) - compiled(WIDE, fused=True)
    assert large(WIDE, fused=True).output_gradient == 0
    assert saved == pytest.approx(large(WIDE).output_gradient, rel=0.1)


def test_the_operand_is_a_copy_of_the_kernel():
    more = compiled(HALF, fused=True) - compiled(WIDE, fused=True)
    assert more == pytest.approx(large(HALF).operand, rel=0.1)


def test_a_chunk_of_float32_operands_is_rounded_where_there_are_many_scores():
    exact = dataclasses.replace(WIDE, precision="highest")
    for fused in (False, True):
        rounded, half, full = (
            large(x, batch_size=256, fused=fused) for x in (WIDE, HALF, exact)
        )
        assert rounded.chunk == half.chunk + half.operand // 2  # there are two chunks
        assert rounded != full
    assert small(WIDE) == small(exact)


def test_the_gradient_of_the_input_is_dense_where_most_rows_drift():
    options: dict[str, Any] = {"outputs": 500, "target_entries": 20_000, "values": True}
    few, many = {**options, "entries": 400_000}, {**options, "entries": 5_000_000}
    planned = [large(WIDE, DECAYING, **o).input_gradient for o in (few, many)]
    assert planned[1] - planned[0] > padded_rows(700_000) * 128 * 4
    more = compiled(WIDE, DECAYING, **many) - compiled(WIDE, DECAYING, **few)
    assert more == pytest.approx(planned[1] - planned[0], rel=0.1)


def test_a_mesh_divides_kernels_state_and_data():
    rule = sj.optimizers.adam(1e-3)
    one = small(WIDE, rule, rows=6_400)
    mesh = small(WIDE, rule, rows=6_400, data=4, model=8)
    rows = padded_rows(70_000)
    first = rows * 128 * 4  # over "model"
    last = rows * (128 + 1) * 4  # kernel and bias of the items, over all devices
    divided = first // 8 + last // 32
    assert mesh.weights == divided + one.weights - first - last
    # Moments, and the last step of each row.
    first, last = 2 * first + rows * 4, 2 * last
    divided = first // 8 + last // 32
    assert mesh.state == divided + one.state - first - last
    assert mesh.dataset == math.ceil(200_000 / 32 * 1.05) * 4 + (6_400 // 4 + 1) * 4
    assert mesh.order == one.order // 4
    half = [small(HALF, data=d, model=m).operand for d, m in ((1, 1), (1, 8), (2, 4))]
    assert half[1] == half[2] == half[0] // 8


def test_what_is_sent():
    """By a ring of n, (n - 1) / n of an array for a part from each, twice for a sum."""
    planned = small(HALF, data=4, model=2)
    sums = 2 * 4 * (64 // 4) * 128 // 2
    assert planned.over_model == {
        "sums of the first layer": sums,
        "gradient of the last hidden layer": sums,
    }
    sent = planned.over_data
    assert sent["gradient of the first layer"] == 4 * 64 * 128 * 3 // 4
    assert sent["hidden vectors of the batch"] == 2 * 64 * 128 * 3 // 4
    assert sent["gradient of the last hidden layer"] == 4 * 64 * 128 * 3 // 4
    assert sent["normalisers"] == 4 * 4 * 64 * 7
    assert small(HALF, model=8).over_model["normalisers"] == 4 * 4 * 64 * 7
    assert not small(HALF).over_data
    # Nothing that moves grows with the items.
    more = small(HALF, data=4, model=2, inputs=700_000, entries=200_000)
    assert more.over_data == sent
    # But a tied kernel is gathered, and its gradient summed.
    tied = small(TIED, data=4, model=2).over_data
    of_kernel = 3 * (padded_rows(70_000) // 2 * 32 * 4) * 3 // 4
    assert tied["tied kernel and its gradient"] == of_kernel


@pytest.mark.parametrize("name", ["adam", "rowwise_adagrad"])
def test_what_a_mesh_divides_is_what_lies_in_parts(name):
    with jax.set_mesh(sj.make_mesh(data=2, model=4)):
        model = sj.FeedForward(DEEP, inputs=300, outputs=500, rngs=nnx.Rngs(0))
        rule = sj.optimizers.get(name, learning_rate=0.1)
        state = nnx.state((model, sj.Optimizer(model, rule)))
        whole = put_on_mesh(state)
    job = NetworkWorkload(
        network=DEEP,
        rule=rule,
        inputs=300,
        outputs=500,
        rows=10,
        entries=100,
        target_entries=100,
        values=False,
        batch=64,
        fused=False,
    )
    laid = {variable.path: variable for variable in laid_out(job, 2, 4)}
    arrays = {p: v.get_raw_value() for p, v in nnx.to_flat_state(whole)}
    assert laid.keys() == arrays.keys()
    for path, array in arrays.items():
        planned = NamedSharding(array.sharding.mesh, laid[path].spec)
        assert planned.is_equivalent_to(array.sharding, array.ndim), path
        assert laid[path].part == array.addressable_shards[0].data.nbytes, path


def test_what_is_sent_is_what_the_program_sends(monkeypatch):
    """The collectives in the loop over steps, of a program for eight CPU devices."""
    network = sj.NetworkConfig.autoencoder((128, 96, 64, 32))
    sizes: dict[str, Any] = {"inputs": 20_000, "batch_size": 256, "fused": True}
    mesh = {"data": 2, "model": 4}
    planned, shapes = sent_by(monkeypatch, small, network, SGD, **mesh, **sizes)
    sent = {"data": 0.0, "model": 0.0}
    for n, (size, largest) in shapes.items():
        sent["model" if n == 4 else "data"] += size
        # The gradient of the output's kernel stays where it is made.
        assert largest < padded_rows(20_000) // 8 * 32 * 4
    assert sum(planned.over_data.values()) == pytest.approx(sent["data"], rel=0.05)
    assert sum(planned.over_model.values()) == pytest.approx(sent["model"], rel=0.05)


def sent_by(monkeypatch, planned, *arguments, **options):
    """The plan; and for each group size the bytes that the program sends, in total and at most at
    once.
    """
    made: list[Any] = []

    def program(*arguments):
        made.append(compile_(*arguments))
        return made[-1]

    compile_ = planning.program
    monkeypatch.setattr(planning, "program", program)
    found = planned(*arguments, compile=True, **options)
    sent: dict[int, tuple[float, int]] = {}
    text = made[0].as_text()
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all"
    kinds = rf"= (.*?) ({kinds})\(.*replica_groups=(.*?), .*while/body"
    for shapes, kind, groups in re.findall(kinds, text):
        n = group_size(groups)
        # All devices make a part or the whole of what is that large.
        times = {"all-reduce": 2, "reduce-scatter": n}.get(kind, 1)
        size, largest = sent.get(n, (0.0, 0))
        bytes_ = bytes_of(shapes)
        sent[n] = size + times * (n - 1) / n * bytes_, max(largest, bytes_)
    return found, sent


def group_size(groups: str) -> int:
    """The number of devices in a group, written as `mesh['data'=2,'model'=4] {'data'}` or
    `[4,2]<=...`.
    """
    if groups.startswith("mesh"):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups))
        axes = re.findall(r"'(\w+)'", groups.partition("{")[2])
        return math.prod(int(sizes[axis]) for axis in axes)
    return int(re.findall(r"\d+", groups)[1])


def bytes_of(shapes: str) -> int:
    """Bytes of shapes written as `f32[128,96]{1,0}`; all elements have four bytes."""
    dims = re.findall(r"[fs]32\[([\d,]*)\]", shapes)
    return sum(4 * math.prod(int(n) for n in d.split(",") if n) for d in dims)


def test_the_least_mesh_that_fits():
    options: dict[str, Any] = {"inputs": 7_000_000, "memory": 2 * 10**9}
    planned = small(WIDE, **options)
    assert planned.fits is False and planned.least_model == 16
    assert f"{planned.total / 1e9:.1f} GB" in planned.table()
    assert planned.table().endswith("does not fit in 2.00 GB; needs model=16 at least")
    mesh = small(WIDE, model=16, **options)
    assert mesh.fits and mesh.total <= 2 * 10**9
    assert mesh.table().endswith("fits in 2.00 GB")
    assert not small(WIDE, model=8, **options).fits


def test_nothing_fits_in_no_memory():
    planned = small(WIDE, memory=10**6)
    assert planned.fits is False and planned.least_model is None
    assert planned.table().endswith("with data=1 no model is large enough")
    assert small(WIDE).fits is None  # a CPU does not say


def test_entries_of_a_device_are_counted_in_32_bits():
    planned = small(WIDE, rows=10**8, entries=3 * 10**9, memory=10**15)
    assert planned.total < 10**15 and planned.fits is False
    assert planned.least_model == 2
    assert "3,000,000,000 entries on a device" in planned.table()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"target_entries": 5}, "target_entries needs outputs"),
        ({"data": 3}, "data must be a divisor of 64, got 3"),
        ({"model": 512}, "model must be a divisor of 256"),
        ({"data": 8, "model": 64}, r"data \* model must be at most 256, got 8 \* 64"),
        ({"data": 2, "batch_size": 100}, "batch_size=100 must be a multiple of 64"),
    ],
)
def test_wrong_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        small(WIDE, **options)


def test_a_tied_output_is_not_fused():
    with pytest.raises(NotImplementedError, match="tied"):
        small(TIED, fused=True)


def test_sizes_as_text():
    read = [planning.read_bytes(size) for size in ("141GB", "1.5 TB", "2KiB", "7B")]
    assert read == [141 * 10**9, 15 * 10**11, 2048, 7]
    for wrong in ("141", "1.2.3GB", "GB"):
        with pytest.raises(ValueError, match="expected a size"):
            planning.read_bytes(wrong)


def test_computing_a_linear_part_is_counted():
    def planned(rank, **options):
        linear = sj.nn.LinearConfig(rank=rank)
        return small(dataclasses.replace(WIDE, linear=linear), **options)

    sizes = {"rows": 10_000, "inputs": 70_000}
    few, many = (planned(rank, **sizes) for rank in (100, 1100))
    each = 4 * 1000 * 70_000
    assert many.linear - few.linear == pytest.approx(5 * each, rel=0.02)
    assert many.temporary - few.temporary == many.linear - few.linear
    assert many.weights - few.weights == pytest.approx(each, rel=0.03)
    assert "computing the linear part" in many.table()
    # By NumPy, in the host's memory.
    assert planned(1100, inputs=4000).linear == 0


HISTORIES: dict[str, Any] = {
    "inputs": 20_000,
    "rows": 2_000,
    "entries": 60_000,
    "batch_size": 64,
    "times": True,
}
MODELS = [sj.SASRecConfig(width=64), sj.HSTUConfig(width=64), sj.GRUConfig(width=64)]
EACH = pytest.mark.parametrize("config", MODELS, ids=lambda config: config.model)
SASREC = MODELS[0]


def of_histories(
    config: sj.sequence.SequenceConfig, rule=ADAMW, **options: Any
) -> sj.Plan:
    return plan(config, rule, **{**HISTORIES, **options})


def histories(lengths: np.ndarray, items: int) -> sj.SequenceDataset:
    """Histories of random items, one second apart."""
    ends = np.append(0, np.cumsum(lengths))
    rng = np.random.default_rng(0)
    return sj.SequenceDataset(
        ends,
        rng.integers(0, items, ends[-1]).astype(np.int32),
        np.array([f"u{i}" for i in range(len(lengths))]),
        np.array([f"i{i}" for i in range(items)]),
        times=np.arange(ends[-1]),
    )


def with_events(data: sj.SequenceDataset) -> sj.SequenceDataset:
    """Adds event columns of numbers, of categories and of lists with three ids."""
    ids = {"kind": sj.data.HashedColumn(5), "tags": sj.data.HashedColumn(9)}
    dense = {"price": sj.data.DenseColumn()}
    schema = sj.EventSchema(dense=dense, ids=ids, context=["price", "tags"])
    count = data.num_entries
    columns = {
        "price": np.zeros(count, np.float32),
        "kind": np.zeros(count, np.int32),
        "tags": np.zeros((count, 3), np.int32),
    }
    return dataclasses.replace(data, events=Events(schema, {}, columns))


@EACH
@pytest.mark.parametrize("mesh", [{}, {"data": 2, "model": 4}], ids=["one", "mesh"])
def test_what_histories_keep_is_what_their_arrays_take(config, mesh):
    """Rows of two entries: the places with a next item need not be estimated."""
    sizes: dict[str, Any] = {"inputs": 300, "rows": 130, "entries": 260}
    data = with_events(histories(np.full(130, 2), 300))
    assert data.events is not None
    if config.model != "sasrec":
        schema = dataclasses.replace(data.events.schema, context=())
        users = Events(schema, {}, {n: c[:130] for n, c in data.events.columns.items()})
        data = dataclasses.replace(data, users=users)
    columns = {"events": data.events, "users": data.users}
    planned = of_histories(config, **columns, **sizes, **mesh)
    placed = jax.set_mesh(sj.make_mesh(**mesh)) if mesh else contextlib.nullcontext()
    with placed:
        model, optimizer = sj.build(config, data, ADAMW)
        examples = training.place(data, model=model).on_device(0, None)

        def size(tree) -> int:
            leaves = map(put_on_mesh, jax.tree.leaves(tree))
            return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)

        assert planned.weights == size(nnx.state(model))
        assert planned.state == size(nnx.state(optimizer))
        assert planned.dataset == size(examples)
    assert planned.order == 4 * 3 * 64 // mesh.get("data", 1)


def test_columns_of_users_are_counted():
    events: Any = EventSizes.of_data(with_events(histories(np.full(9, 2), 30)))
    sizes: Any = {"inputs": 30, "rows": 9, "entries": 90, "batch": 8, "times": False}
    weights = [
        footprint(
            HistoryWorkload(
                network=SASREC,
                rule=ADAMW,
                events=dataclasses.replace(events, users=users),
                **sizes,
            ),
            1,
            1,
        ).weights
        for users in (None, dataclasses.replace(events, context=()))
    ]
    # Vectors of 5 and 9 ids and of a number, and one place more.
    assert weights[1] - weights[0] == 4 * SASREC.width * (5 + 9 + 1 + 1)


def test_the_places_with_a_next_item_are_estimated():
    """With lognormal lengths, of which the longest are cut off."""
    lengths = np.random.default_rng(0).lognormal(3, 1, 3_000).astype(int) + 2
    wanted = np.sum(np.minimum(lengths, 51) - 1)
    sizes = {"rows": len(lengths), "entries": int(lengths.sum())}
    assert of_histories(SASREC, **sizes).entries == pytest.approx(wanted, rel=0.03)
    longer = dataclasses.replace(SASREC, max_length=500)
    wanted = lengths.sum() - len(lengths)
    assert of_histories(longer, **sizes).entries == pytest.approx(wanted, rel=0.01)


def test_a_batch_has_room_for_its_places():
    """The plan's room is that of `fit`, but for the steps between sizes."""
    lengths = np.random.default_rng(1).lognormal(3, 1, 2_000).astype(int) + 2
    data = histories(lengths, 50)
    model, _ = sj.build(SASREC, data)
    placed = training.place(data, model=model)
    epochs = training.Epochs(placed, batch_size=64, num_epochs=5)
    found = next(epochs.dispatches(0)).sizes.capacities
    job = HistoryWorkload(
        network=SASREC,
        rule=ADAMW,
        inputs=50,
        rows=len(lengths),
        entries=int(lengths.sum()),
        batch=64,
        times=False,
    )
    windows, places = job.capacities(1, 1)
    assert windows == found[0]
    assert found[1] / 1.3 < places < found[1] * 1.3
    # Long histories are dealt to the parts, which so need no more room together.
    with jax.set_mesh(sj.make_mesh(data=4, model=2)):
        model, _ = sj.build(SASREC, data)
        placed = training.place(data, model=model)
        epochs = training.Epochs(placed, batch_size=64, num_epochs=5)
        parts = next(epochs.dispatches(0)).sizes.capacities
    assert parts[1] < found[1] * 1.3
    assert job.capacities(4, 2)[1] == places


@functools.cache
def compiled_histories(config, **options) -> tuple[sj.Plan, int]:
    """A plan, and the temporary bytes that the compiler reports."""
    planned = of_histories(config, compile=True, **options)
    assert planned.compiled is not None
    # The program does not read the places that have a next item.
    places = 4 * planned.entries + 4 * (HISTORIES["rows"] + 1)
    numbers = 2 * 4  # the first step, and how many
    assert planned.compiled.kept == planned.kept - places + numbers
    return planned, planned.compiled.temporary


@pytest.mark.parametrize(
    ("config", "mesh"),
    [*((config, (1, 1)) for config in MODELS), (SASREC, (2, 4))],
    ids=["sasrec", "hstu", "gru", "mesh"],
)
def test_activations_grow_with_the_batch(config, mesh):
    options = {"data": mesh[0], "model": mesh[1]}
    few, many = (
        compiled_histories(config, batch_size=size, **options) for size in (128, 256)
    )
    more = many[0].hidden - few[0].hidden
    # On a mesh XLA keeps less than the plan says.
    within = 0.35 if mesh[0] > 1 else 0.25
    assert many[1] - few[1] == pytest.approx(more, rel=within)


def test_gradients_grow_with_the_items():
    """The output's, and that of the vectors that histories are read as."""
    few, many = (
        compiled_histories(SASREC, inputs=items) for items in (100_000, 300_000)
    )

    def gradients(planned: sj.Plan) -> int:
        return planned.output_gradient + planned.input_gradient

    more = gradients(many[0]) - gradients(few[0])
    assert more == pytest.approx(2 * 4 * 64 * 200_000, rel=0.05)
    assert many[1] - few[1] == pytest.approx(more, rel=0.1)


def test_negatives_replace_what_grows_with_the_items():
    def config(count, **options):
        return dataclasses.replace(SASREC, negatives=count, blocks=1, **options)

    def drawing(count, **options):
        return compiled_histories(config(count), **{"inputs": 200_000, **options})

    few, large, many = drawing(64), drawing(64, inputs=400_000), drawing(1064)
    assert few[0].output_gradient == 0
    assert large[0].temporary == few[0].temporary
    assert large[1] == pytest.approx(few[1], rel=0.01)
    more = many[0].chunk - few[0].chunk
    # A CPU also keeps a byte for each score: whether it counts.
    assert many[1] - few[1] == pytest.approx(more, rel=0.25)
    half = of_histories(config(1064, dtype="bfloat16"))
    assert half.chunk == 1.5 * many[0].chunk
    # Each of the eight devices has the scores of its own tokens.
    assert of_histories(config(1064), data=2, model=4).chunk == half.chunk / 8


@pytest.mark.parametrize(
    ("mesh", "negatives"),
    [
        *((mesh, None) for mesh in ((2, 4), (8, 1), (1, 8))),
        # With two owners all rows have places, and no gather stands by.
        *((mesh, 128) for mesh in ((4, 2), (8, 1))),
    ],
)
def test_what_histories_send_is_about_what_the_program_sends(
    monkeypatch, mesh, negatives
):
    config = dataclasses.replace(SASREC, negatives=negatives, blocks=1)
    options = {"data": mesh[0], "model": mesh[1], "batch_size": 128}
    planned, shapes = sent_by(monkeypatch, of_histories, config, **options)
    sent = sum(size for size, _ in shapes.values())
    found = sum([*planned.over_data.values(), *planned.over_model.values()])
    assert found == pytest.approx(sent, rel=0.2)
    assert bool(planned.over_data) == (mesh[0] > 1)
    assert bool(planned.over_model) == (mesh[1] > 1)


def test_times_are_counted_for_the_model_that_reads_them():
    for config in MODELS:
        planned = of_histories(config)
        without = of_histories(config, times=False)
        windows = 4 * 51 * (2_000 + 1) if config.model == "hstu" else 0
        assert planned.dataset - without.dataset == windows
        assert (planned.hidden > without.hidden) == bool(windows)


def test_histories_that_do_not_fit():
    options: dict[str, Any] = {"inputs": 7_000_000, "memory": 2 * 10**9}
    planned = of_histories(SASREC, **options)
    assert planned.fits is False and planned.least_model == 8
    assert of_histories(SASREC, model=8, **options).fits
    assert not of_histories(SASREC, model=4, **options).fits


def test_large_outputs_of_histories():
    """The GPU programs round operands where there are many scores."""
    dots = dataclasses.replace(SASREC, temperature=None)
    odd = dataclasses.replace(SASREC, width=50)
    sizes: dict[str, Any] = {"inputs": 700_000}
    rows = padded_rows(700_000)
    # No scores exist: rows of a chunk in bfloat16, and their gradient, twice.
    assert of_histories(dots, **sizes).chunk == 2**19 * 64 * (2 + 2 * 4)
    cosines = of_histories(SASREC, **sizes)
    # Slopes of a chunk of 2^27 scores and the bits of targets, and rows of the chunk.
    assert cosines.chunk > 2 * 2**27
    # The kernel is copied with zeros, for products of 64 columns.
    more = of_histories(odd, **sizes).operand - cosines.operand
    assert more == 4 * rows * 64


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"entries": 3_999}, ValueError, "rows must have two entries or more each"),
        ({"outputs": 5}, ValueError, "targets of histories are their own items"),
        ({"values": True}, ValueError, "histories have no values"),
        ({"fused": True}, NotImplementedError, "histories are read with it"),
        ({"rows": 0}, ValueError, "rows must be at least 1"),
        ({"data": 2, "batch_size": 100}, ValueError, "must be a multiple of 64"),
    ],
)
def test_wrong_arguments_of_histories(options, error, message):
    with pytest.raises(error, match=message):
        of_histories(SASREC, **options)


def test_a_network_reads_no_times():
    with pytest.raises(ValueError, match="a network does not read times"):
        small(WIDE, times=True)
