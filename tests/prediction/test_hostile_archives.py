"""Small predictor files that would be unpacked to very large ones are refused."""

import json
import os
import struct
import time
import tracemalloc
import zipfile
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import sparsejax as sj
from sparsejax.predictors import archive
from sparsejax.predictors.files import check_predictor

SETTINGS = ["predictor.json", "clicks.json"]
METHODS = [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
SIZE = 2**27


@pytest.fixture(scope="module", params=METHODS)
def packed(request, tmp_path_factory):
    """Blanks compressed by a method, as the bytes of a zip file."""
    path = tmp_path_factory.mktemp("bomb") / "zip"
    with zipfile.ZipFile(path, "w", request.param) as new:
        new.writestr("name", b" " * SIZE)
    return path.read_bytes()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("stated", [100, SIZE])
def test_no_more_is_unpacked_than_is_allowed(packed, name, stated, tmp_path):
    path = tmp_path / "bomb"
    path.write_bytes(packed)
    rename(path, name)
    state(path, stated)
    assert path.stat().st_size < 2**20
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"^{path}: is not a predictor, or is damaged"):
        sj.load_predictor(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**23


def rename(path, name):
    """Renames the only file of an archive."""
    with zipfile.ZipFile(path) as old:
        [info] = old.infolist()
    content = path.read_bytes()
    start = info.header_offset + 30 + len("name")
    packed = content[start : start + info.compress_size]
    encoded = name.encode()
    facts = (info.CRC, len(packed), info.file_size, len(encoded))
    shared = (info.flag_bits & 0, info.compress_type, 0, 33, *facts, 0)
    local = struct.pack("<4s5H3L2H", b"PK\3\4", 63, *shared) + encoded
    central = struct.pack("<4s2B5H3L5H2L", b"PK\1\2", 63, 3, 63, *shared, 0, 0, 0, 0, 0)
    central += encoded
    counts = (0, 0, 1, 1, len(central), len(local) + len(packed), 0)
    end = struct.pack("<4s4H2LH", b"PK\5\6", *counts)
    path.write_bytes(local + packed + central + end)


def state(path, size):
    """Changes the size in the archive's directory, and the checksum to that of as many blanks."""
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\1\2")
    struct.pack_into("<L", content, at + 16, zlib.crc32(b" " * size))
    struct.pack_into("<L", content, at + 24, size)
    path.write_bytes(content)


def test_a_stored_part_that_states_two_sizes(tmp_path):
    path = tmp_path / "two"
    with zipfile.ZipFile(path, "w") as new:
        new.writestr("name", b" " * 100)
    rename(path, "predictor.json")
    for size in (50, 200):
        state(path, size)
        with pytest.raises(ValueError, match=r"predictor.json states two sizes"):
            sj.load_predictor(path)


def test_the_same_model_is_the_same_bytes(tmp_path, monkeypatch):
    written = []
    for now in (1e9, 2e9):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        monkeypatch.setattr(time, "localtime", lambda *_, now=now: time.gmtime(now))
        weights = np.arange(6.0, dtype=np.float32).reshape(2, 3)
        like = jax.ShapeDtypeStruct(weights.shape, weights.dtype)
        archive.save(
            tmp_path / "p",
            {"names.json": ["a"]},
            programs=[(1, export.export(jax.jit(jnp.sin))(1.0))],
            weights=[archive.Stored(like, iter([weights]))],
        )
        written.append((tmp_path / "p").read_bytes())
    assert written[0] == written[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A predictor with names."""
    path = tmp_path_factory.mktemp("whole") / "p"
    config = sj.NetworkConfig.autoencoder((4,))
    model = sj.FeedForward(config, inputs=3, outputs=3, rngs=nnx.Rngs(0))
    sj.export_predictor(model, path, k=2, names=["a", "b", "c"], batch_size=1)
    return path


@pytest.mark.parametrize("method", METHODS[:2])
@pytest.mark.parametrize("read", [sj.load_predictor, check_predictor])
def test_a_part_that_no_release_writes_is_not_unpacked(whole, method, read, tmp_path):
    path = tmp_path / "more"
    path.write_bytes(whole.read_bytes())
    read(path)
    with zipfile.ZipFile(path, "a", method) as parts:
        parts.writestr("more", b" " * SIZE)
    tracemalloc.start()
    with pytest.raises(ValueError, match="'more' is no part of a predictor"):
        read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**23


@pytest.mark.parametrize("read", [sj.load_predictor, check_predictor])
@pytest.mark.parametrize("name", ["weights/0", "names/0/lengths"])
def test_arrays_are_not_packed(whole, name, read, tmp_path):
    """What they unpack to would have no bound but what the same file states."""
    path = tmp_path / "packed"
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(path, "w") as new:
        for part in old.namelist():
            how = zipfile.ZIP_DEFLATED if part == name else zipfile.ZIP_STORED
            content = b" " * SIZE if part == name else old.read(part)
            if part == "names.json" and "names" in name:
                content = json.dumps({"items": SIZE // 4})
            new.writestr(part, content, how)
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"{name} is packed"):
        read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**23


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_no_part_comes_twice(whole, tmp_path):
    path = tmp_path / "twice"
    path.write_bytes(whole.read_bytes())
    with zipfile.ZipFile(path, "a") as parts:
        parts.writestr("names.json", parts.read("names.json"))
    with pytest.raises(ValueError, match="has a part twice"):
        sj.load_predictor(path)


@pytest.mark.parametrize("read", [sj.load_predictor, check_predictor])
def test_pipes_and_devices_are_not_opened(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "link", "zero"):
        with pytest.raises(ValueError, match=f"{name}: is not a regular file"):
            read(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        read(tmp_path)
