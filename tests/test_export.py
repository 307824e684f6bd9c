"""Predictors: files that recommend as the model did."""

import json
import os
import pathlib
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx

import sparsejax as sj
from sparsejax import batching
from sparsejax.config import HiddenConfig, InputConfig, NetworkConfig, OutputConfig

pytestmark = pytest.mark.usefixtures("symbolic_sizes")

FEATURES, ITEMS, K = 300, 41, 6

# What answers in another process, where a good deal is forbidden.
ANSWER = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("flax", "optax", "orbax") or name in (
            "sparsejax.models", "sparsejax.layers", "sparsejax.prediction"
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


def same_bits(a: sj.Recommendations, b: sj.Recommendations) -> bool:
    return (
        a.ids.tobytes() == b.ids.tobytes() and a.scores.tobytes() == b.scores.tobytes()
    )


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


def test_same_bits_in_another_process_without_flax(model, path, tmp_path):
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
        assert same_bits(sj.Recommendations(**found), expected)
    assert answer.stdout == f"item {expected.ids[0, 0]}\n"


@pytest.mark.parametrize("rows", [0, 1, 17, 30, 31])
@pytest.mark.parametrize("valued", [False, True])
def test_any_number_of_rows(model, predictor, rows, valued):
    x = random_rows(40, FEATURES, 3, valued=valued)[:rows]
    found = predictor.recommend(x)
    assert found.ids.shape == (rows, K)
    assert same_bits(found, sj.recommend(model, x, K, batch_size=30))


def test_other_dtypes_and_own_modules(tmp_path):
    class Own(nnx.Module):
        def __init__(self, rngs):
            self.first = sj.SparseLinear(
                FEATURES, 8, param_dtype=jnp.bfloat16, combiner="mean", rngs=rngs
            )
            self.norm = nnx.BatchNorm(8, rngs=rngs, use_running_average=True)
            self.output = sj.SparseOutput(8, ITEMS, rngs=rngs)
            self.num_features, self.num_items = FEATURES, ITEMS

        def top_k(self, x, k, *, exclude=None):
            h = self.norm(self.first(x).astype(jnp.float32))
            return self.output.top_k(h, k, exclude=exclude)

    model = Own(nnx.Rngs(5))
    model.norm.mean[...] = jnp.arange(8) / 10  # no parameter, and counts
    sj.export_predictor(model, tmp_path / "own", k=ITEMS + 2, batch_size=16)
    x = random_rows(9, FEATURES, 4)
    predictor = sj.load_predictor(tmp_path / "own")
    found = predictor.recommend(x)
    assert same_bits(found, sj.recommend(model, x, ITEMS + 2))
    assert (found.ids[:, ITEMS:] == -1).all()
    with pytest.raises(ValueError, match="no names; export it with names="):
        predictor.names(found)


def test_named_data_is_matched_by_name(tmp_path):
    data = sj.SparseDataset.from_scipy(random_rows(9, FEATURES, 6))
    config = NetworkConfig.autoencoder((8,))
    sizes = {"inputs": FEATURES, "outputs": FEATURES}
    model = sj.FeedForward(config, **sizes, rngs=nnx.Rngs(1))
    sj.export_predictor(model, tmp_path / "p", k=3, names=data, batch_size=16)
    predictor = sj.load_predictor(tmp_path / "p")
    some = data.align_rows(["3", "1"])
    found = predictor.recommend(data, exclude=some)
    assert same_bits(found, sj.recommend(model, data, 3, exclude=some))
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
    sj.export_predictor(large, target, batch_size=16)
    with zipfile.ZipFile(target) as archive:
        assert archive.getinfo("programs/16").file_size < 50_000
        weights = [i.file_size for i in archive.infolist() if "weights" in i.filename]
    assert sum(weights) > 2 * 9000 * 64 * 4


def test_the_batch_sizes_are_those_of_recommend():
    for largest in (1, 16, 17, 512, 600):
        used = {min(largest, batching.bucket(rows)) for rows in range(1, 900)}
        assert batching.batch_sizes(largest) == sorted(used)


def test_runs_are_for_both_platforms(path):
    predictor = sj.load_predictor(path)
    assert sorted(predictor.programs) == [16, 24, 30]
    for program in predictor.programs.values():
        assert program.platforms == ("cpu", "cuda")


def test_a_score_that_is_nan_is_reported(tmp_path):
    model = feed_forward()
    assert model.output.bias is not None
    model.output.bias[3] = jnp.nan
    sj.export_predictor(model, tmp_path / "p", k=2, batch_size=16)
    with pytest.raises(FloatingPointError, match="row 0 of inputs"):
        sj.load_predictor(tmp_path / "p").recommend(random_rows(2, FEATURES, 0))


def test_a_failed_export_leaves_the_old_file(model, path, monkeypatch):
    before = path.read_bytes()
    with pytest.raises(ValueError, match="40 names were given but the model has 41"):
        sj.export_predictor(model, path, names=range(40))
    with pytest.raises(ValueError, match="k must be at least 1"):
        sj.export_predictor(model, path, k=0)
    with pytest.raises(ValueError, match="there is no folder"):
        sj.export_predictor(model, path / "in" / "file")

    def broken(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(np.lib.format, "write_array_header_1_0", broken)
    with pytest.raises(OSError, match="disk full"):
        sj.export_predictor(model, path, batch_size=16)
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
    """A copy of an archive in which one part has another content."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for part in old.namelist():
            new.writestr(part, content if part == name else old.read(part))
    return target


def test_files_that_are_no_predictors(path, tmp_path):
    with pytest.raises(FileNotFoundError):
        sj.load_predictor(tmp_path / "nothing")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="text: is no predictor, or is damaged"):
        sj.load_predictor(tmp_path / "text")
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("letter", "hello")
    with pytest.raises(ValueError, match="zip: is no predictor, or is damaged"):
        sj.load_predictor(tmp_path / "zip")
    settings = json.dumps({"version": 99})
    newer = _changed(path, tmp_path / "newer", "predictor.json", settings)
    with pytest.raises(
        ValueError, match="newer: predictor of version 99; this release"
    ):
        sj.load_predictor(newer)


@pytest.mark.parametrize("part", ["weights/1.npy", "programs/16", "predictor.json"])
def test_a_changed_byte_is_found(path, tmp_path, part):
    damaged = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(part)
    damaged[info.header_offset + 100 + info.compress_size // 2] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    with pytest.raises(ValueError, match="damaged: (is no predictor|.*JSON|.*CRC)"):
        sj.load_predictor(tmp_path / "damaged")


def test_half_a_file(path, tmp_path):
    whole = path.read_bytes()
    (tmp_path / "half").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="half: is no predictor, or is damaged"):
        sj.load_predictor(tmp_path / "half")


def test_the_model_is_left_as_it_was(tmp_path):
    model = feed_forward()
    model.first.implementation = "mosaic_gpu"
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    sj.export_predictor(model, tmp_path / "p", batch_size=16)
    assert model.first.implementation == "mosaic_gpu"
    after = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, before, after)
