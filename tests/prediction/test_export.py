"""Predictors: files that recommend as their model did."""

import copy
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx
from jax import export
from jax.extend import mlir
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context

import sparsejax as sj
from sparsejax import CSR
from sparsejax.nn.config import HiddenConfig, InputConfig, NetworkConfig, OutputConfig
from sparsejax.ops import implementations
from sparsejax.predictors import stablehlo
from sparsejax.predictors.runtime import sizes_of_programs
from sparsejax.predictors.signature import Array, Signature, of_ranking

pytestmark = pytest.mark.usefixtures("symbolic_sizes")

FEATURES, ITEMS, K = 300, 41, 6

# What answers in another process, where a good deal is forbidden.
ANSWER = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("flax", "optax", "orbax") or name in (
            "sparsejax.nn.models", "sparsejax.nn.layers", "sparsejax.verbs.recommend"
        ):
            raise ImportError(f"{name} is forbidden")

sys.meta_path.insert(0, Forbidden())
import numpy, scipy.sparse
import sparsejax as sj

predictor = sj.load_predictor(sys.argv[1])
x = scipy.sparse.load_npz(sys.argv[2])
seen = scipy.sparse.load_npz(sys.argv[3])
found = predictor.recommend(x, exclude=seen)
numpy.savez(sys.argv[4], ids=found.ids, scores=found.scores)
print(predictor.names(found)[0][0])
"""


def random_rows(rows: int, columns: int, seed: int, *, valued=True):
    rng = np.random.default_rng(seed)
    dense = np.where(rng.random((rows, columns)) < 0.1, rng.random((rows, columns)), 0)
    dense[0] = 0  # a row without entries
    return scipy.sparse.csr_array(dense if valued else dense > 0)


def feed_forward(*, temperature: float | None = None) -> sj.FeedForward:
    config = NetworkConfig(
        layers=(
            InputConfig(normalize=True, corruption=0.3),
            HiddenConfig(name="h1", size=24, activation="tanh", dropout=0.2),
            HiddenConfig(name="h2", size=16, activation="gelu"),
            OutputConfig(temperature=temperature),
        )
    )
    return sj.FeedForward(config, inputs=FEATURES, outputs=ITEMS, rngs=nnx.Rngs(0))


def assert_same(found: sj.Recommendations, expected: sj.Recommendations) -> None:
    """Asserts equal items and nearly equal scores, because other programs add in another order."""
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def model() -> sj.FeedForward:
    return feed_forward(temperature=0.2)


@pytest.fixture(scope="module")
def path(model, symbolic_sizes, tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("export") / "model.predictor"
    names = [f"item {i}" for i in range(ITEMS)]
    sj.export_predictor(model, path, k=K, names=names, batch_size=30)
    return path


@pytest.fixture(scope="module")
def predictor(path) -> sj.Predictor:
    return sj.load_predictor(path)


def test_the_same_in_another_process_without_flax(model, path, tmp_path):
    x, seen = random_rows(77, FEATURES, 1), random_rows(77, ITEMS, 2, valued=False)
    files = [str(tmp_path / name) for name in ("x.npz", "seen.npz", "found.npz")]
    scipy.sparse.save_npz(files[0], x)
    scipy.sparse.save_npz(files[1], seen)
    answer = subprocess.run(
        [sys.executable, "-c", ANSWER, str(path), *files],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    expected = sj.recommend(model, x, K, exclude=seen, batch_size=30)
    with np.load(files[2]) as found:
        assert_same(sj.Recommendations(**found), expected)
    assert answer.stdout == f"item {expected.ids[0, 0]}\n"


@pytest.mark.parametrize(
    ("rows", "valued"),
    [
        *[(0, True), (1, False), (2, True), (7, False)],
        *[(9, True), (17, False), (30, True), (31, False)],
    ],
)
def test_any_number_of_rows(model, predictor, rows, valued):
    x = random_rows(40, FEATURES, 3, valued=valued)[:rows]
    found = predictor.recommend(x)
    assert found.ids.shape == (rows, K)
    assert_same(found, sj.recommend(model, x, K, exclude=None))


def test_fewer_items_than_exported(model, predictor):
    x = random_rows(3, FEATURES, 3)
    assert_same(predictor.recommend(x, k=2), sj.recommend(model, x, 2, exclude=None))
    with pytest.raises(ValueError, match="k is 7 but the predictor was exported for"):
        predictor.recommend(x, k=7)
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        predictor.recommend(x, k=0)


def test_rows_on_the_device_and_long_ones(model, predictor):
    dense = np.random.default_rng(5).random((10, FEATURES))
    x = CSR.from_scipy(scipy.sparse.csr_array(dense), nse=4000)
    on_device = jax.tree.map(jnp.asarray, x)
    assert_same(predictor.recommend(on_device), sj.recommend(model, x, K, exclude=None))
    outside = CSR(None, jnp.array([FEATURES]), jnp.array([0, 1]), num_cols=FEATURES)
    with pytest.raises(ValueError, match="column 300: the column is outside"):
        predictor.recommend(outside)


def test_a_layer_is_folded(tmp_path):
    model = feed_forward(temperature=0.2)
    model.output.dtype = jnp.bfloat16
    sj.export_predictor(model, tmp_path / "p", k=K, batch_size=1)
    x = random_rows(3, FEATURES, 3)
    predictor = sj.load_predictor(tmp_path / "p")
    found, expected = predictor.recommend(x), sj.recommend(model, x, K, exclude=None)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5, atol=1e-6)
    (kernel,) = [i for i, w in enumerate(predictor.weights) if w.shape == (256, 16)]
    assert predictor.weights[kernel].dtype == jnp.bfloat16
    # Were the norms made in the call, the cosines would stay as they are.
    predictor.weights[kernel] *= 2
    bias = np.asarray(model.output.bias)[found.ids]
    doubled = predictor.recommend(x).scores - bias
    np.testing.assert_allclose(doubled, 2 * (found.scores - bias), rtol=1e-5)
    assert model.output.kernel.dtype == jnp.float32  # the model is as it was
    assert model.output.folded_scale is None


class OwnRanking(sj.FeedForward):
    """A model whose ranking differs from that of its output layer."""

    def top_k(self, x, k, *, exclude=None):  # pyrefly: ignore[bad-override]
        ids, scores = super().top_k(x, k, exclude=exclude)
        return ids, scores + 1


def test_a_class_with_its_own_top_k_keeps_it(tmp_path):
    config = NetworkConfig.autoencoder((8,))
    model = OwnRanking(config, inputs=FEATURES, outputs=ITEMS, rngs=nnx.Rngs(0))
    sj.export_predictor(model, tmp_path / "p", k=K, batch_size=8)
    predictor = sj.load_predictor(tmp_path / "p")
    assert predictor.signature.layer is None
    x = random_rows(3, FEATURES, 3)
    assert_same(predictor.recommend(x), sj.recommend(model, x, K, exclude=None))


@pytest.fixture
def for_hopper(monkeypatch) -> Iterator[None]:
    """Programs traced inside the test are traced for a Hopper GPU."""
    monkeypatch.setattr(implementations, "gpu_capability", lambda: 9.0)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_items_are_ranked_by_the_gpu_program(tmp_path, for_hopper, dtype):
    """The file holds arithmetic alone; the program is that of this package."""
    config = NetworkConfig.autoencoder((64,), temperature=0.1)
    model = sj.FeedForward(config, inputs=FEATURES, outputs=ITEMS, rngs=nnx.Rngs(0))
    model.output.dtype = jnp.dtype(dtype)
    sj.export_predictor(model, tmp_path / "p", k=K, batch_size=1)
    programs = sj.load_predictor(tmp_path / "p").model.programs
    arguments = programs.arguments(1, programs.nothing, 256)
    traced = programs.by_rows[1].trace(programs.weights, arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("custom_call @mosaic_gpu" in text) == (dtype == "bfloat16")


def test_a_click_model_is_exported_in_arithmetic_alone(tmp_path, for_hopper):
    """A file that a CPU reads, too, also where training uses a GPU program."""
    sizes = {"num_dense": 2, "features": {"user": 5, "item": 7}}
    config = sj.DLRMConfig(dim=16, bottom=(4,), top=(4,), dtype="bfloat16")
    model = sj.clicks.DLRM(config, **sizes, rngs=nnx.Rngs(0))
    ids = {name: jnp.zeros(4, jnp.int32) for name in sizes["features"]}
    traced = jax.jit(model.__call__).trace(jnp.zeros((4, 2)), ids)
    sj.export_predictor(model, tmp_path / "p", batch_size=4)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in text


@pytest.fixture
def compilations(caplog) -> Iterator[Callable[[], int]]:
    """A function that returns how many programs were compiled since its last call."""
    caplog.set_level("WARNING", logger="jax")

    def count() -> int:
        found = sum("Finished XLA comp" in r.getMessage() for r in caplog.records)
        caplog.clear()
        return found

    with jax.log_compiles():
        yield count


def test_few_programs_whatever_comes(path, compilations):
    predictor = sj.load_predictor(path)  # for 1, 8 and 30 rows
    rng = np.random.default_rng(0)
    compilations()
    for items in (1, 5, 17, 40, 90, 150, 257, FEATURES):
        for rows in (1, 2, 3, 5, 8, 16, 31, 70):
            dense = rng.random((rows, FEATURES)).argsort(axis=1) < items
            exclude = scipy.sparse.csr_array(dense[:, :ITEMS])
            x = scipy.sparse.csr_array(dense)
            predictor.recommend(x, exclude=exclude)
            predictor.recommend(x)
    # Of one row 256 or 1,024 entries; of eight 512, 2,048 or 8,192; of thirty 1,920,
    # 7,680 or 30,720.
    assert 5 <= compilations() <= 2 + 3 + 3


def test_warm_programs_are_all_that_requests_need(path, compilations):
    predictor = sj.load_predictor(path)
    predictor.warm_up(max_items=FEATURES, rows=9)
    assert compilations() == 2 + 3
    names = predictor.items
    for rows in (1, 3, 7, 9):
        for items in (0, 1, 100, FEATURES):
            x = np.zeros((rows, FEATURES), bool)
            x[:, :items] = True
            x = scipy.sparse.csr_array(x)
            found = predictor.recommend(x)
            predictor.names(found)
    assert names is not None
    assert compilations() == 0
    with pytest.raises(ValueError, match="max_items must be at least 1"):
        predictor.warm_up(max_items=0)


@pytest.fixture(scope="module")
def shop_path(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("shop") / "p"


@pytest.fixture(scope="module")
def shop(symbolic_sizes, shop_path) -> tuple[sj.FeedForward, sj.Predictor]:
    """A model whose features are its items, and its predictor with names."""
    config = NetworkConfig.autoencoder((8,))
    sizes = {"inputs": ITEMS, "outputs": ITEMS}
    model = sj.FeedForward(config, **sizes, rngs=nnx.Rngs(1))
    names = [f"item {i}" for i in range(ITEMS)]
    sj.export_predictor(model, shop_path, k=K, names=names, batch_size=8)
    return model, sj.load_predictor(shop_path)


def by_ids(model, histories, k=K, *, exclude=True) -> list[list[str]]:
    x = np.zeros((len(histories), ITEMS), bool)
    for row, history in zip(x, histories, strict=True):
        row[history] = True
    x = scipy.sparse.csr_array(x)
    found = sj.recommend(model, x, k, exclude=x if exclude else None)
    return found.names([f"item {i}" for i in range(ITEMS)])


def test_names_in_names_out(shop):
    model, predictor = shop
    one = predictor.recommend_names(["item 7", "item 3"])
    assert one == by_ids(model, [[3, 7]])[0]
    assert not {"item 7", "item 3"} & set(one)
    twice = predictor.recommend_names(("item 3", "item 7", "item 3"), k=2)
    assert twice == one[:2]
    several = [["item 5"], [], ["item 1", "item 40"]]
    assert predictor.recommend_names(several) == by_ids(model, [[5], [], [1, 40]])
    assert predictor.recommend_names([]) == by_ids(model, [[]])[0]
    assert predictor.recommend_names([["item 5"]]) == by_ids(model, [[5]])
    again = predictor.recommend_names([["item 5"]], exclude_seen=False)
    assert again == by_ids(model, [[5]], exclude=False)
    most = [f"item {i}" for i in range(ITEMS - 2)]
    assert len(predictor.recommend_names(most)) == 2  # items ran out


def test_names_that_are_unknown(shop):
    model, predictor = shop
    known = by_ids(model, [[3]])[0]
    assert predictor.recommend_names(["tea", "item 3"]) == known
    assert predictor.recommend_names(["tea"]) == by_ids(model, [[]])[0]
    with pytest.raises(
        ValueError, match="2 of 3 names are not items of the .* 'tea', 'i"
    ):
        predictor.recommend_names([["tea", "item 3"], ["item"]], unknown="error")
    with pytest.raises(ValueError, match='unknown is "skip" or "error", got \'x\''):
        predictor.recommend_names(["tea"], unknown="x")
    with pytest.raises(TypeError, match="a history is a list of names, got the string"):
        predictor.recommend_names("tea")
    with pytest.raises(TypeError, match="but one of the lists is 'tea'"):
        predictor.recommend_names([["item 3"], "tea"])
    with pytest.raises(TypeError, match="but one of the lists is 3"):
        predictor.recommend_names([3])
    with pytest.raises(TypeError, match="a name is a str, got 3"):
        predictor.recommend_names([[3]])


def test_names_need_the_names_of_features(predictor):
    with pytest.raises(ValueError, match="names of its 41 items, not of its 300 feat"):
        predictor.recommend_names(["item 3"])


def test_other_dtypes_and_own_modules(tmp_path):
    class Own(nnx.Module):
        def __init__(self, rngs):
            self.first = sj.SparseLinear(
                FEATURES, 8, param_dtype=jnp.bfloat16, combiner="mean", rngs=rngs
            )
            self.norm = nnx.BatchNorm(8, rngs=rngs, use_running_average=True)
            self.output = sj.SparseOutput(8, ITEMS, rngs=rngs)
            self.num_features, self.num_items = FEATURES, ITEMS

        def queries(self, x):  # of its own: no vectors for the output layer
            return -self.first(x).astype(jnp.float32)

        def top_k(self, x, k, *, exclude=None):
            h = self.norm(self.first(x).astype(jnp.float32))
            return self.output.top_k(h, k, exclude=exclude)

    model = Own(nnx.Rngs(5))
    model.norm.mean[...] = jnp.arange(8) / 10  # no parameter, and counts
    sj.export_predictor(model, tmp_path / "own", k=ITEMS + 2, batch_size=1)
    x = random_rows(9, FEATURES, 4)
    predictor = sj.load_predictor(tmp_path / "own")
    found = predictor.recommend(x)
    assert_same(found, sj.recommend(model, x, ITEMS + 2, exclude=None))
    assert (found.ids[:, ITEMS:] == -1).all()
    with pytest.raises(ValueError, match="no names; export it with names="):
        predictor.names(found)
    with pytest.raises(ValueError, match="no names; export it with names="):
        predictor.recommend_names(["0"])


def test_named_data_is_matched_by_name(tmp_path):
    data = sj.SparseDataset.from_scipy(random_rows(9, FEATURES, 6))
    config = NetworkConfig.autoencoder((8,))
    sizes = {"inputs": FEATURES, "outputs": FEATURES}
    model = sj.FeedForward(config, **sizes, rngs=nnx.Rngs(1))
    sj.export_predictor(model, tmp_path / "p", k=3, names=data, batch_size=1)
    predictor = sj.load_predictor(tmp_path / "p")
    some = data.align_rows(["3", "1"])
    found = predictor.recommend(data, exclude=some)
    assert_same(found, sj.recommend(model, data, 3, exclude=some))
    assert predictor.names(found) == found.names(data)
    other = sj.SparseDataset.from_scipy(
        data.to_scipy(), feature_names=range(1, FEATURES + 1)
    )
    with pytest.raises(
        ValueError, match="column 0 is '1' in inputs but '0' in the pre"
    ):
        predictor.recommend(other)


def test_weights_are_no_constants(path):
    large = sj.FeedForward(
        NetworkConfig.autoencoder((64,)), inputs=9000, outputs=9000, rngs=nnx.Rngs(0)
    )
    target = path.parent / "large"
    sj.export_predictor(large, target, batch_size=8)
    with zipfile.ZipFile(target) as archive:
        # A larger one would take a GPU's compiler long.
        assert archive.getinfo("programs/8").file_size < 20_000
        weights = [i.file_size for i in archive.infolist() if "weights" in i.filename]
    assert sum(weights) > 2 * 9000 * 64 * 4


def test_the_numbers_of_rows():
    assert sizes_of_programs(1) == (1,)
    assert sizes_of_programs(2) == (1, 2)
    assert sizes_of_programs(8) == (1, 8)
    assert sizes_of_programs(512) == (1, 8, 64, 512)
    assert sizes_of_programs(600) == (1, 8, 64, 512, 600)


def test_runs_are_for_both_platforms():
    signature = signature_of(5, 5, 3, ())
    made = stablehlo.program(signature, 2, lambda *_: jnp.zeros((2, 2, 3)))
    loaded = stablehlo.load(signature, 2, made.mlir_module_serialized)
    assert loaded.platforms == ("cpu", "cuda")


def test_a_score_that_is_nan_is_reported(tmp_path):
    model = feed_forward()
    model.output.kernel[3] = jnp.inf  # times hidden units of both signs
    sj.export_predictor(model, tmp_path / "p", k=2, batch_size=1)
    with pytest.raises(FloatingPointError, match="row 0 of inputs"):
        sj.load_predictor(tmp_path / "p").recommend(random_rows(2, FEATURES, 0))


def test_a_failed_export_leaves_the_old_file(model, path, monkeypatch):
    before = path.read_bytes()
    with pytest.raises(ValueError, match="40 names were given but the model has 41"):
        sj.export_predictor(model, path, names=range(40))
    with pytest.raises(ValueError, match="item names must be unique, but .* 'tea'"):
        sj.export_predictor(model, path, names=["tea"] * 41)
    with pytest.raises(TypeError, match="k must be a whole number, got 2.5"):
        sj.export_predictor(model, path, k=2.5)  # pyrefly: ignore
    with pytest.raises(ValueError, match="k must be at least 1"):
        sj.export_predictor(model, path, k=0)
    with pytest.raises(ValueError, match="there is no folder"):
        sj.export_predictor(model, path / "in" / "file")

    def broken(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", broken)
    with pytest.raises(OSError, match="disk full"):
        sj.export_predictor(model, path, batch_size=1)
    assert path.read_bytes() == before
    assert not [name for name in os.listdir(path.parent) if name.startswith(".")]


def test_inputs_that_do_not_fit(path):
    predictor = sj.load_predictor(path)
    with pytest.raises(ValueError, match="inputs has 5 columns but the model has 300"):
        predictor.recommend(random_rows(2, 5, 0))
    with pytest.raises(ValueError, match="exclude has 5 columns but the model has 41"):
        predictor.recommend(random_rows(2, FEATURES, 0), exclude=random_rows(2, 5, 0))
    with pytest.raises(TypeError, match="inputs is a SparseDataset, a CSR or"):
        predictor.recommend(np.zeros((2, FEATURES)))  # pyrefly: ignore


def _changed(path, target, name, content) -> pathlib.Path:
    """A copy of an archive in which one file has other content."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for part in old.namelist():
            new.writestr(part, content if part == name else old.read(part))
    return target


def signature_of(features, num_items, k, weights) -> Signature:
    """The signature of a program for one row."""
    return Signature(
        kind="items",
        **of_ranking(features, num_items, k),
        weights=weights,
        rows=(1,),
        platforms=("cpu", "cuda"),
        calling_convention=jax.config.jax_export_calling_convention_version,
        jax=jax.__version__,
    )


def test_files_that_are_no_predictors(path, tmp_path):
    with pytest.raises(FileNotFoundError):
        sj.load_predictor(tmp_path / "nothing")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="text: is not a predictor, or is damaged"):
        sj.load_predictor(tmp_path / "text")
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("letter", "hello")
    with pytest.raises(ValueError, match="zip: is not a predictor, or is damaged"):
        sj.load_predictor(tmp_path / "zip")
    settings = json.dumps({"version": 99})
    newer = _changed(path, tmp_path / "newer", "predictor.json", settings)
    with pytest.raises(
        ValueError, match="newer: .* is 99; this release reads version 5; install"
    ):
        sj.load_predictor(newer)


@pytest.mark.parametrize("part", ["weights/1", "programs/8", "predictor.json"])
def test_a_changed_byte_is_found(path, tmp_path, part):
    damaged = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(part)
    damaged[info.header_offset + 100 + info.compress_size // 2] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    with pytest.raises(ValueError, match="damaged: (is not a predictor|.*JSON|.*CRC)"):
        sj.load_predictor(tmp_path / "damaged")


def test_half_a_file(path, tmp_path):
    whole = path.read_bytes()
    (tmp_path / "half").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="half: is not a predictor, or is damaged"):
        sj.load_predictor(tmp_path / "half")


def test_the_model_is_left_as_it_was(tmp_path):
    model = feed_forward()
    model.first.implementation = "mosaic_gpu"
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    sj.export_predictor(model, tmp_path / "p", batch_size=1)
    assert model.first.implementation == "mosaic_gpu"
    after = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def _code(signature: Signature, target: str) -> bytes:
    """A program with a custom call that JAX was told to allow."""

    def program(weights, inputs):
        shape = jax.ShapeDtypeStruct((1, K), jnp.float32)
        scores = jax.ffi.ffi_call(target, shape)()
        return scores.astype(jnp.int32), scores

    checks = [export.DisabledSafetyCheck.custom_call(target)]
    jitted = jax.jit(program, keep_unused=True)
    exported = export.export(jitted, platforms=("cpu", "cuda"), disabled_checks=checks)
    return exported(*stablehlo.arguments(signature, 1)).mlir_module_serialized


_INFEED = """
module {
  func.func public @main() -> tensor<3xf32> {
    %t = stablehlo.create_token : !stablehlo.token
    %0:2 = "stablehlo.infeed"(%t) <{infeed_config = "", layout = [[0]]}>
      : (!stablehlo.token) -> (tensor<3xf32>, !stablehlo.token)
    return %0#0 : tensor<3xf32>
  }
}
"""


def test_programs_that_do_more_than_arithmetic(path, tmp_path):
    with zipfile.ZipFile(path) as archive:
        stated = json.loads(archive.read("predictor.json"))
    signature = Signature.from_json(stated)
    callback = "xla_ffi_python_cpu_callback"
    with make_ir_context():
        infeed = mlir.serialize_portable_artifact(ir.Module.parse(_INFEED), "1.0.0")
    ranking = of_ranking(FEATURES, ITEMS, 1)
    fewer = dataclasses.replace(signature, layer=None, **ranking)
    smaller = stablehlo.program(fewer, 1, lambda *_: jnp.zeros((2, 1, 1)))
    for code, message in (
        (_code(signature, callback), f"contains the custom call '{callback}'"),
        (_code(signature, "none"), "contains the custom call 'none'"),
        (infeed, "contains the operation stablehlo.infeed"),
        (smaller.mlir_module_serialized, r"a program has the type .*tensor<1x1xf32>\)"),
        (_INFEED.encode(), "a program is not StableHLO"),
        (b"", "a program is not StableHLO"),
    ):
        changed = _changed(path, tmp_path / "changed", "programs/1", code)
        with pytest.raises(ValueError, match=f"changed: .*{message}"):
            sj.load_predictor(changed)


def test_what_an_export_may_not_contain(tmp_path):
    class Own(nnx.Module):
        num_features = num_items = 3

        def top_k(self, x, k, *, exclude=None):
            q, _ = jnp.linalg.qr(jnp.ones((3, 3)) * x.nse)
            return jnp.zeros((x.num_rows, k), jnp.int32), q[: x.num_rows, :k]

    with pytest.raises(ValueError, match="contains the custom call"):
        sj.export_predictor(Own(), tmp_path / "p", k=2, batch_size=1)
    assert not list(tmp_path.iterdir())


# What may stand for any value of the JSON.
_OTHERS = (None, True, -1, 0, 2**31, 10**30, 0.5, "", "x", [], [1], [[]], {}, {"a": 1})


def _edits(value, path=()):
    """The paths of all values in a JSON document."""
    yield path
    entries = {}
    if isinstance(value, dict):
        entries = value
    elif isinstance(value, list):
        entries = dict(enumerate(value[:3]))
    for key, entry in entries.items():
        yield from _edits(entry, (*path, key))


def _edited(value, path, other):
    if not path:
        return other
    changed = copy.copy(value)
    changed[path[0]] = _edited(value[path[0]], path[1:], other)
    return changed


def test_settings_edited_in_every_field(shop, shop_path):
    with zipfile.ZipFile(shop_path) as archive:
        settings = json.loads(archive.read("predictor.json"))
    before = Signature.from_json(settings)
    refused = 0
    for path in _edits(settings):
        for other in _OTHERS:
            edited = _edited(settings, path, other)
            try:
                changed = Signature.from_json(edited)
            except ValueError as error:
                refused += 1
                assert "\n" not in str(error)
            else:  # a size, which the parts have to agree with
                assert edited == settings or changed != before
    assert refused > 200


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": 0},  # a bias
        {"bias": 1},
        {"scale": 9},
        {"kernel": -1},
        {"dtype": "int8"},
        {"precision": "low"},
        {"kernel": None},
    ],
    ids=str,
)
def test_output_layers_that_are_none(path, tmp_path, change):
    with zipfile.ZipFile(path) as archive:
        stated = json.loads(archive.read("predictor.json"))
    assert sj.load_predictor(path).signature.layer is not None
    stated["layer"] |= change
    changed = json.dumps(stated)
    with pytest.raises(ValueError, match="p: is not a predictor.*(layer|signature)"):
        sj.load_predictor(_changed(path, tmp_path / "p", "predictor.json", changed))
    if "kernel" in change:
        stated["layer"] = None  # then the programs have another type
        changed = json.dumps(stated)
        with pytest.raises(ValueError, match="a program has the type"):
            sj.load_predictor(_changed(path, tmp_path / "p", "predictor.json", changed))


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("predictor.json", b"[" * 200_000, "recursion"),
        ("predictor.json", b" " * 2**21, "2,097,152 bytes, more than 1,048,576"),
        ("predictor.json", b"\xff", "utf-8"),
        ("predictor.json", b"[]", "expected a JSON object, got list"),
        ("names.json", b'{"items": 1}', "names/0/lengths has 164 bytes, more than 4"),
        ("names.json", b'{"items": -1}', "names/0/lengths has 164 bytes, more than -4"),
        ("names.json", b'{"items": 9000000000000000}', "names/0/lengths has 164 bytes"),
        ("names.json", b'{"user": 41}', r"'names/0/\w+' is no part of a predictor"),
        ("names.json", b'{"items": [1]}', 'names.json: "items" must be int'),
        ("names.json", b'["a"]', "names.json must be an object"),
        ("names.json", b'{"items": "' + b"x" * 2**20 + b'"}', "bytes, more than"),
        ("names/0/text", b"a", "names/0/text has 1 bytes, expected"),
        ("names/0/text", b"\xff" * 10, "names/0/text has 10 bytes, expected"),
        ("names/0/lengths", b"\xff" * 164, "names/0/text has .* bytes, expected"),
        ("names/0/shifts", bytes(9), "names/0/shifts has 9 bytes, expected 64"),
        ("names/0/table", b"\x29\0\0\0" * 256, "the index is not one of 41 names"),
        ("names/0/table", b"\xfe" + b"\xff" * 1023, "the index is not one of 41 names"),
        ("programs/1", bytes(2**24 + 1), "16,777,217 bytes, more than 16,777,216"),
        ("weights/0", b"", "weights/0 has 0 bytes, expected"),
        ("weights/0", bytes(2**24), "weights/0 has 16,777,216 bytes, more than"),
    ],
)
def test_parts_that_are_too_large_or_no_parts(
    shop, shop_path, tmp_path, part, content, message
):
    """They would be unpacked to a thousand times their size."""
    with zipfile.ZipFile(shop_path) as old:
        rest = {name: old.read(name) for name in old.namelist()}
        stored = part.startswith(("names/", "weights/"))
        packing = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(tmp_path / "p", "w") as new:
        for name in rest.keys() - {part}:
            new.writestr(name, rest[name])
        new.writestr(part, content, compress_type=packing)
    with pytest.raises(ValueError, match=f"^{tmp_path / 'p'}: .*{message}"):
        sj.load_predictor(tmp_path / "p")


def test_random_changes_of_bytes(shop, shop_path, tmp_path):
    """Most are found by checksums, so programs and settings are also changed inside."""
    rng = np.random.default_rng(0)
    whole = shop_path.read_bytes()
    with zipfile.ZipFile(shop_path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    inside = ["programs/1", "programs/8", "predictor.json"]
    for turn in range(60):
        part = None if turn % 2 else inside[turn // 2 % 3]
        damaged = bytearray(whole if part is None else parts[part])
        for at in rng.integers(len(damaged), size=2):
            damaged[at] ^= 1 << rng.integers(8)
        target = tmp_path / "p"
        if part is None:
            target.write_bytes(damaged)
        else:
            _changed(shop_path, target, part, bytes(damaged))
        try:
            sj.load_predictor(target)  # a date, or a constant of a program
        except ValueError as error:
            assert str(error).startswith(f"{target}: ") and "\n" not in str(error)


def test_a_linear_part_becomes_one_kernel_with_the_output(tmp_path):
    data = random_rows(60, ITEMS, 5)
    config = NetworkConfig.autoencoder((8,), linear=sj.nn.LinearConfig(rank=12))
    model, _ = sj.build(config, data)
    sj.export_predictor(model, tmp_path / "linear", k=K, batch_size=8)
    found = sj.load_predictor(tmp_path / "linear").recommend(data[:5])
    expected = sj.recommend(model, data[:5], K, exclude=None)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def small() -> Signature:
    return signature_of(4, 16, 16, (Array(dtype="float32", shape=(4, 4)),))


def program_of(signature, f) -> Callable[[np.ndarray], np.ndarray]:
    """Exports and loads a program that contains `f` as its only weight; returns a function that
    calls it.
    """

    def top_k(weights, inputs):
        scores = f(weights[0]).reshape(1, 16)
        return jnp.zeros(scores.shape, jnp.int32), scores

    made = stablehlo.program(signature, 1, top_k)
    loaded = stablehlo.load(signature, 1, made.mlir_module_serialized)
    nothing = np.zeros(1, np.int32), np.zeros(2, np.int32)
    inputs = [(np.zeros(1, np.float32), *nothing), nothing]
    return lambda x: np.asarray(loaded.call([x], inputs)[1]).reshape(4, 4)


SUMS = {
    "cumsum": (jnp.cumsum, np.cumsum),
    "cumprod": (jnp.cumprod, np.cumprod),
    "cummax": (jax.lax.cummax, np.maximum.accumulate),
    "cummin": (jax.lax.cummin, np.minimum.accumulate),
    "cumlogsumexp": (jax.lax.cumlogsumexp, np.logaddexp.accumulate),
}


@pytest.mark.parametrize("name", SUMS)
def test_cumulative_operations_are_exported(small, name):
    ours, oracle = SUMS[name]
    x = np.random.default_rng(0).standard_normal((4, 4), np.float32)
    for axis in (0, 1):
        found = program_of(small, lambda x, axis=axis: ours(x, axis=axis))(x)
        expected = oracle(x.astype(np.float64), axis=axis)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("f", "oracle"),
    [
        (lambda x: jax.lax.cumsum(x, reverse=True), lambda x: x[::-1].cumsum(0)[::-1]),
        (
            lambda x: jnp.cumsum(x.astype(jnp.int32), 1) + jnp.cumsum(x > 0, 1),
            lambda x: x.astype(int).cumsum(1) + (x > 0).cumsum(1),
        ),
        (
            lambda x: jax.lax.cummax((3 * x).astype(jnp.int32)),
            lambda x: np.maximum.accumulate((3 * x).astype(int)),
        ),
        (
            lambda x: jax.lax.scan(lambda c, y: (c, jnp.cumsum(y)), 0, x)[1],
            lambda x: x.cumsum(1),
        ),
        (jax.vmap(jnp.cumsum), lambda x: x.cumsum(1)),
        (lambda x: x + jnp.cumsum(jnp.zeros(0, x.dtype)).sum(), lambda x: x),
        (
            jax.grad(lambda x: jnp.sum(jnp.cumsum(x, 1) ** 2)),
            lambda x: 2 * x.cumsum(1)[:, ::-1].cumsum(1)[:, ::-1],
        ),
    ],
    ids=[
        "reverse",
        "integers",
        "largest integer",
        "in a loop",
        "vmap",
        "of nothing",
        "gradient",
    ],
)
def test_cumulative_operations_wherever_they_stand(small, f, oracle):
    x = 3 * np.random.default_rng(1).standard_normal((4, 4), np.float32)
    expected = oracle(x.astype(np.float64))
    np.testing.assert_allclose(program_of(small, f)(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (jnp.linalg.cholesky, "cholesky"),
        (lambda x: jax.lax.linalg.triangular_solve(x, x), "triangular_solve"),
        (lambda x: jax.lax.approx_max_k(x, 4)[0], "approx_top_k"),
        (lambda x: jax.pure_callback(lambda y: y, x, x), "callback"),
        (lambda x: [jax.debug.print("{}", x[0]), x][1], "debug_print"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_exported_is_named_in_a_line(small, f, name):
    with pytest.raises(ValueError, match=name) as error:
        program_of(small, f)
    assert len(str(error.value)) < 200 and "\n" not in str(error.value)


def test_errors_of_the_model_itself_stay(small):
    def wrong(x):
        raise KeyError("of the model")

    with pytest.raises(KeyError, match="of the model"):
        program_of(small, wrong)


def test_a_model_with_negatives_is_exported(tmp_path):
    config = sj.SASRecConfig(max_length=3, width=4, blocks=1, heads=1, negatives=2)
    model = sj.sequence.build_sequence_model(config, items=5, rngs=nnx.Rngs(0))
    sj.export_predictor(model, tmp_path / "p", k=2, names=list("abcde"), batch_size=1)
    model.eval()
    predictor = sj.load_predictor(tmp_path / "p")
    ids, _ = model.top_k(jnp.array([[0, 1, 2]], jnp.int32), 2)
    found = predictor.recommend_names(list("abc"), exclude_seen=False)
    assert found == ["abcde"[i] for i in ids[0]]
