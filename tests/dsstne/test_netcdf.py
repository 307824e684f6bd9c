"""DSSTNE's NetCDF files, compared with its C library (netCDF4) and NumPy."""

import dataclasses
import re
import resource
import subprocess
import sys

import h5py
import netCDF4
import numpy as np
import pytest
import scipy.sparse
from contents import contents

from sparsejax.data import DataError, DenseDataset, SparseDataset
from sparsejax.dsstne import (
    hdf5,
    netcdf,
    read_datasets,
    read_ignore_zeros,
    read_weights,
    write_datasets,
)
from sparsejax.dsstne.datasets import Classes, FileDataset, SparseRows


def write_netcdf(path, attributes, variables, *, data_sets=1):
    """Writes a file by netCDF4: attributes with DSSTNE's types, and flat variables."""
    with netCDF4.Dataset(path, "w") as file:
        file.setncattr("datasets", np.uint32(data_sets))
        for name, value in attributes.items():
            plain = isinstance(value, int)
            file.setncattr(name, np.uint32(value) if plain else value)
        for name, (dimension, values) in variables.items():
            if dimension not in file.dimensions:
                file.createDimension(dimension, len(values))
            dtype = str if values.dtype == object else values.dtype
            file.createVariable(name, dtype, (dimension,))[:] = values


def sparse_file(path, **changes):
    """Writes rows [1, 3], [], [0] of four columns; `changes` replace attributes or variables."""
    attributes = {"name0": "input", "attributes0": 3, "kind0": 0, "dataType0": 0}
    attributes |= {"dimensions0": 1, "width0": 4}
    variables = {
        "sparseStart0": ("examplesDim0", np.array([0, 2, 2], np.uint32)),
        "sparseEnd0": ("examplesDim0", np.array([2, 2, 3], np.uint32)),
        "sparseIndex0": ("sparseDataDim0", np.array([1, 3, 0], np.uint32)),
    }
    for name, value in changes.items():
        if isinstance(value, tuple):
            variables[name] = value
        elif name in variables:
            variables[name] = (variables[name][0], np.array(value, np.uint32))
        else:
            attributes[name] = value
    write_netcdf(path, attributes, variables)


def dense(data: SparseDataset) -> np.ndarray:
    return data.to_scipy().toarray()


DENSE = [[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]


def test_a_file_of_the_c_library_is_read(tmp_path):
    sparse_file(tmp_path / "a.nc")
    [(name, data)] = read_datasets(tmp_path / "a.nc").items()
    assert name == "input" and data.matrix.data is None
    np.testing.assert_array_equal(dense(data), DENSE)
    assert data.feature_names.tolist() == ["0", "1", "2", "3"]


@pytest.mark.parametrize("offsets", [np.uint32, np.uint64, np.int64])
def test_rows_lie_anywhere(tmp_path, offsets):
    """Not sorted, with gaps, over each other, and with an entry twice."""
    sparse_file(
        tmp_path / "a.nc",
        attributes0=1,
        dataType0=4,
        sparseStart0=("examplesDim0", np.array([5, 0, 2, 2], offsets)),
        sparseEnd0=("examplesDim0", np.array([7, 3, 2, 4], offsets)),
        sparseIndex0=("sparseDataDim0", np.array([3, 3, 0, 1, 2, 0, 2], np.uint32)),
        sparseData0=("sparseDataDim0", np.arange(1, 8, dtype=np.float32)),
    )
    data = read_datasets(tmp_path / "a.nc")["input"]
    expected = [[6, 0, 7, 0], [3, 0, 0, 3], [0, 0, 0, 0], [3, 4, 0, 0]]
    np.testing.assert_array_equal(dense(data), expected)


def test_an_entry_twice_counts_once_in_an_indicator_and_stays_in_the_file(tmp_path):
    sparse_file(tmp_path / "a.nc", sparseIndex0=[1, 1, 0])
    data = read_datasets(tmp_path / "a.nc")["input"]
    np.testing.assert_array_equal(dense(data)[0], [0, 1, 0, 0])
    stored = netcdf.load(tmp_path / "a.nc")
    netcdf.save(tmp_path / "b.nc", stored)
    with netCDF4.Dataset(tmp_path / "b.nc") as file:
        assert file["sparseIndex0"][:].tolist() == [1, 1, 0]


TYPES = ["u4", "i4", "i8", "u8", "f4", "f8", "u1", "i1"]


@pytest.mark.parametrize("number", range(len(TYPES)))
@pytest.mark.parametrize("size", [(5,), (3, 2), (2, 3, 4)])
def test_dense_values_of_every_type(tmp_path, number, size):
    dtype = np.dtype(TYPES[number])
    rng = np.random.default_rng(number)
    values = rng.integers(0, 127, (6, *reversed(size))).astype(dtype)
    netcdf.save(tmp_path / "a.nc", {"x": FileDataset(size, values)})
    code = [0, 1, 2, 3, 4, 5, 8, 9][number]
    with netCDF4.Dataset(tmp_path / "a.nc") as file:
        assert (
            file.getncattr("dataType0") == code and file.getncattr("attributes0") == 0
        )
        assert file.getncattr("dimensions0") == len(size)
        stored = file["data0"]
        assert stored.dtype == ("S1" if dtype == "i1" else dtype)
        flat = np.asarray(stored[:].filled()).reshape(-1)
        np.testing.assert_array_equal(flat.view(dtype), values.reshape(-1))
    inputs = read_datasets(tmp_path / "a.nc")["x"]
    targets = read_datasets(tmp_path / "a.nc", targets=["x"])["x"]
    scale, shift = {"u1": (256, 0.5), "i1": (128, 0)}.get(TYPES[number], (1, 0))
    np.testing.assert_allclose(inputs, values.astype(float) / scale - shift, rtol=1e-6)
    np.testing.assert_allclose(targets, values.astype(float) / scale, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "scale"), [("u1", 256), ("i1", 128), ("i4", 1)])
def test_sparse_bytes_are_scaled(tmp_path, dtype, scale):
    """As inputs and as targets, and several entries of a column before they are added."""
    values = np.array([64, 100, 3, 120, 100], dtype)
    rows = SparseRows(
        np.array([0, 2]), np.array([2, 5]), np.array([1, 3, 0, 2, 2]), values
    )
    netcdf.save(tmp_path / "a.nc", {"x": FileDataset((4,), rows)})
    expected = np.array([[0, 64, 0, 100], [3, 0, 220, 0]]) / scale
    for targets in ((), ["x"]):
        x = read_datasets(tmp_path / "a.nc", targets=targets)["x"]
        np.testing.assert_allclose(dense(x), expected, rtol=1e-6)


def test_images_that_the_c_library_wrote(tmp_path):
    attributes = {"name0": "x", "attributes0": 0, "kind0": 1, "dataType0": 6}
    attributes |= {"dimensions0": 3, "width0": 2, "height0": 1, "length0": 3}
    pixels = np.arange(250, 256, dtype=np.uint8)
    write_netcdf(tmp_path / "a.nc", attributes, {"data0": ("dataDim0", pixels)})
    x = read_datasets(tmp_path / "a.nc")["x"]
    assert x.shape == (1, 3, 1, 2)
    np.testing.assert_allclose(x[0, 2, 0], [254 / 256 - 0.5, 255 / 256 - 0.5])


def test_classes_are_one_hot(tmp_path):
    netcdf.save(
        tmp_path / "a.nc", {"y": FileDataset((3, 2), Classes(np.array([5, 0])))}
    )
    data = read_datasets(tmp_path / "a.nc")["y"]
    np.testing.assert_array_equal(dense(data), np.eye(6)[[5, 0]])
    with netCDF4.Dataset(tmp_path / "a.nc") as file:
        assert file.getncattr("attributes0") == 2
        assert file["data0"][:].tolist() == [5, 0]


@pytest.mark.parametrize("by_example", [False, True])
def test_indexed_and_weighted(tmp_path, by_example):
    rows = SparseRows(np.array([0, 2]), np.array([2, 3]), np.array([1, 3, 0]))
    index = np.array([1, 0, 0, 1, 1])
    weights = np.array([1, 2, 3, 4, 5.0] if by_example else [0.5, 2], np.float32)
    wide = np.arange(8, dtype=np.float32).reshape(2, 4)
    given = {
        "x": FileDataset((4,), rows, index=index, weights=weights, ignore_zeros=True),
        "z": FileDataset((4,), wide, index=index),
    }
    netcdf.save(tmp_path / "a.nc", given)
    found = netcdf.load(tmp_path / "a.nc")
    assert found["x"].ignore_zeros and not found["z"].ignore_zeros
    expected = weights if by_example else weights[index]
    np.testing.assert_array_equal(found["x"].example_weights(), expected)
    data = read_datasets(tmp_path / "a.nc")
    np.testing.assert_array_equal(dense(data["x"]), np.array(DENSE)[[0, 2]][index])
    np.testing.assert_array_equal(data["z"], wide[index])
    with netCDF4.Dataset(tmp_path / "a.nc") as file:
        assert file.getncattr("attributes0") == 1 + 2 + 32 + 64 + 128
        assert file["sparseStart0"].dimensions == ("uniqueExamplesDim0",)
        assert file["index0"].dimensions == ("examplesDim0",)


@pytest.mark.parametrize("valued", [False, True])
def test_what_was_written_is_read(tmp_path, valued):
    rng = np.random.default_rng(3)
    matrix = scipy.sparse.random_array((20, 300), density=0.05, rng=rng, format="csr")
    matrix = matrix.astype(np.float32) if valued else matrix.astype(bool)
    names = [f"ä{i}" for i in range(20)]
    data = SparseDataset.from_scipy(matrix, row_names=names)
    ages = DenseDataset(rng.normal(size=(20, 3)), names[::-1])
    weights = {"in": rng.random(20)}
    path = tmp_path / "a.nc"
    write_datasets(path, {"in": data, "ages": ages}, weights=weights)
    found = read_datasets(path)
    assert contents(found["in"]) == contents(data)
    np.testing.assert_array_equal(found["ages"].values, ages.values[::-1])
    assert found["ages"].row_names.tolist() == names
    stored = netcdf.load(path)["in"].example_weights()
    np.testing.assert_array_equal(stored, weights["in"].astype(np.float32))
    write_datasets(path, found)  # replaces the file
    assert contents(read_datasets(path)["in"]) == contents(data)


def test_weights_and_ignored_zeros_go_there_and_back(tmp_path):
    """Read, written and read again: the same bits, the same flags."""
    rows = SparseRows(np.array([0, 2]), np.array([2, 3]), np.array([1, 3, 0]))
    index = np.array([1, 0, 0, 1, 1])
    weights = np.random.default_rng(0).random(5).astype(np.float32)
    by_row = np.array([0.1, 0], np.float32)
    given = {
        "x": FileDataset((4,), rows, index=index, weights=weights, ignore_zeros=True),
        "y": FileDataset((4,), np.eye(5, 4), weights=weights[::-1]),
        "z": FileDataset((4,), rows, index=index, weights=by_row),
        "u": FileDataset((4,), rows, index=index, ignore_zeros=True),
        "v": FileDataset((4,), np.eye(5, 4)),
    }
    netcdf.save(tmp_path / "a.nc", given)
    expected = {"x": weights, "y": weights[::-1], "z": by_row[index]}
    path = tmp_path / "a.nc"
    for other in ("b.nc", "c.nc"):
        write_datasets(
            tmp_path / other,
            read_datasets(path),
            weights=read_weights(path),
            ignore_zeros=read_ignore_zeros(path),
        )
        path = tmp_path / other
        found = read_weights(path)
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            assert found[name].dtype == np.float32
            np.testing.assert_array_equal(found[name], array)
        assert read_ignore_zeros(path) == {"x", "u"}
        with netCDF4.Dataset(path) as file:
            bits = [file.getncattr(f"attributes{n}") for n in range(5)]
            assert bits == [1 + 2 + 32 + 128, 128, 1 + 2 + 128, 1 + 2 + 32, 0]


def test_names_of_columns(tmp_path):
    path, index = tmp_path / "a.nc", tmp_path / "features"
    sparse_file(path)
    index.write_text("tea\t1\nmilk\t0\nrye\t2\n")
    data = read_datasets(path, features=index, samples=["ann", "bob", "eve"])["input"]
    assert data.feature_names.tolist() == ["milk", "tea", "rye", "(padding 3)"]
    assert data.row_names.tolist() == ["ann", "bob", "eve"]
    write_datasets(tmp_path / "b.nc", {"input": data})
    assert contents(read_datasets(tmp_path / "b.nc")["input"]) == contents(data)
    assert read_datasets(path, features={"input": index})["input"].num_features == 4
    with pytest.raises(DataError, match="5 features but the data set has the width 4"):
        read_datasets(path, features=list("abcde"))
    with pytest.raises(DataError, match="2 samples but the data set has 3 examples"):
        read_datasets(path, samples=["a", "b"])
    with pytest.raises(ValueError, match="no data set 'output'; it has 'input'"):
        read_datasets(path, targets=["output"])


BAD = {
    "sparseIndex0[1] is 4": {"sparseIndex0": [1, 4, 0]},
    "sparseEnd0[1] is 1, before": {"sparseEnd0": [2, 1, 3]},
    "sparseEnd0[2] is 9, outside": {"sparseEnd0": [2, 2, 9]},
    "width0 is 0": {"width0": 0},
    "width0 is 4294967296; expected a number from 1 to 4294967295": {
        "width0": np.uint64(2**32)
    },
    "dimensions0 is 4": {"dimensions0": 4},
    "width0 x height0 x length0 is": {
        "dimensions0": 3,
        "width0": 2**31,
        "height0": 2**31,
        "length0": 2**31,
    },
    "no variable data0": {"attributes0": 0},
    "no variable sparseData0": {"attributes0": 1},
    "no variable index0": {"attributes0": 3 + 64},
    "no variable dataWeight0": {"attributes0": 3 + 128},
    "dataType0 is 7 (RGB16)": {"dataType0": 7},
    "attributes0 is 4099": {"attributes0": 4099},
    "sparseData0[1] is nan": {
        "attributes0": 1,
        "sparseData0": ("sparseDataDim0", np.array([1, np.nan, 2], np.float32)),
    },
    "data0[1] is 4, outside": {
        "attributes0": 2,
        "data0": ("dataDim0", np.array([0, 4], np.uint32)),
    },
    "data0 has 6 values": {
        "attributes0": 0,
        "data0": ("dataDim0", np.zeros(6, np.float32)),
    },
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_wrong_is_said(tmp_path, message):
    path = tmp_path / "bad.nc"
    sparse_file(path, **BAD[message])
    with pytest.raises(DataError, match=re.escape(message)) as raised:
        read_datasets(path)
    assert str(raised.value).startswith(str(path)) and "\n" not in str(raised.value)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "a.nc"
    with pytest.raises(DataError, match="no such file"):
        read_datasets(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="no NetCDF-4 file"):
        read_datasets(path)
    with netCDF4.Dataset(path, "w", format="NETCDF3_CLASSIC") as file:
        file.setncattr("datasets", 1)
    with pytest.raises(DataError, match="classic format; convert it: nccopy"):
        read_datasets(path)
    with netCDF4.Dataset(path, "w"):
        pass
    with pytest.raises(DataError, match="no attribute datasets"):
        read_datasets(path)


def test_a_cut_file_is_refused(tmp_path):
    path = tmp_path / "a.nc"
    sparse_file(path)
    whole = path.read_bytes()
    for size in (9, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError):
            read_datasets(path)


def test_nothing_large_is_made_of_a_small_file(tmp_path):
    path = tmp_path / "a.nc"
    sparse_file(path)
    with h5py.File(path, "a") as file:
        del file["sparseIndex0"]
        file.create_dataset("sparseIndex0", (2**40,), np.uint32, chunks=(2**16,))
    with pytest.raises(DataError, match="sparseIndex0.*over 1,000 times the 0 bytes"):
        read_datasets(path)
    many = np.full(100_000, 100_000, np.uint32)
    sparse_file(
        path,
        sparseStart0=("examplesDim0", many * 0),
        sparseEnd0=("examplesDim0", many),
        sparseIndex0=("sparseDataDim0", many * 0),
    )
    with pytest.raises(DataError, match="input.*10,000,000,000 entries"):
        read_datasets(path)
    (tmp_path / "secret").write_bytes(bytes(12))
    sparse_file(path)
    with h5py.File(path, "a") as file:
        del file["sparseIndex0"]
        outside = [(str(tmp_path / "secret"), 0, 12)]
        file.create_dataset("sparseIndex0", (3,), np.uint32, external=outside)
    with pytest.raises(DataError, match="sparseIndex0 lies in another file"):
        read_datasets(path)


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_changed(tmp_path, seed):
    """Whatever is damaged, it is read or an error says so."""
    rng = np.random.default_rng(seed)
    path = tmp_path / "a.nc"
    names = ["a", "b", "c"]
    matrix = scipy.sparse.csr_array(np.array(DENSE, [bool, np.float32][seed % 2]))
    data = SparseDataset.from_scipy(matrix, row_names=names)
    write_datasets(path, {"x": data, "y": DenseDataset(np.eye(3), names)})
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    refused = 0
    for _ in range(100):
        damaged = whole.copy()
        at = rng.integers(0, len(whole), rng.integers(1, 30))
        damaged[at] = rng.integers(0, 256, len(at))
        path.write_bytes(damaged.tobytes())
        try:
            read_datasets(path)
        except DataError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
            refused += 1
    assert refused > 10


def test_a_list_of_texts_without_an_end(tmp_path):
    """HDF5 stays for ever at free space of 0 bytes."""
    path = tmp_path / "a.nc"
    names = ["a", "b", "c"]
    matrix = scipy.sparse.csr_array(np.array(DENSE, bool))
    write_datasets(path, {"x": SparseDataset.from_scipy(matrix, row_names=names)})
    whole = bytearray(path.read_bytes())
    heap = whole.index(b"GCOL")
    whole[heap + 16 : heap + 32] = bytes(16)
    path.write_bytes(whole)
    with pytest.raises(DataError, match="a list of its texts has no end"):
        read_datasets(path)


@pytest.mark.parametrize("chunks", [None, (2,)])
def test_a_text_longer_than_the_file(tmp_path, chunks):
    """HDF5 takes as much memory as the length says, here 3 GiB."""
    path = tmp_path / "a.nc"
    sparse_file(path)
    names = ["a", "b", "c"]
    with h5py.File(path, "a") as file:
        stored = file.create_dataset(
            "samples", data=names, dtype=h5py.string_dtype(), chunks=chunks
        )
        if chunks is None:
            at = stored.id.get_offset()
        else:
            at = stored.id.get_chunk_info(1).byte_offset
    assert read_datasets(path)["input"].row_names.tolist() == names
    whole = bytearray(path.read_bytes())
    whole[at : at + 4] = (3 * 2**30).to_bytes(4, "little")
    path.write_bytes(whole)
    with pytest.raises(DataError, match="samples is longer than the file"):
        read_datasets(path)


def text_attribute_by_h5py(path, name, text, others):
    with h5py.File(path, "a") as file:
        del file.attrs[name]
        for n in range(others):
            file.attrs[f"other{n}"] = "x"
        file.attrs[name] = text


def text_attribute_by_the_c_library(path, name, text, others):
    with netCDF4.Dataset(path, "a") as file:
        file.delncattr(name)
        for n in range(others):
            file.setncattr_string(f"other{n}", "x")
        file.setncattr_string(name, text)


@pytest.mark.parametrize("others", [0, 100])
@pytest.mark.parametrize(
    "write", [text_attribute_by_h5py, text_attribute_by_the_c_library]
)
def test_the_length_of_an_attribute_is_found(tmp_path, write, others):
    """However it is stored: with many others, HDF5 does that in another way."""
    path, text = tmp_path / "a.nc", "a long and unusual name"
    sparse_file(path)
    write(path, "name0", text, others)
    assert [*read_datasets(path)] == [text]
    with hdf5.opened(path, "data sets") as file:
        assert dataclasses.replace(file, size=len(text)).text("name0") == text
        with pytest.raises(DataError, match="attribute name0 is longer than the file"):
            dataclasses.replace(file, size=len(text) - 1).text("name0")


def test_an_attribute_longer_than_the_file(tmp_path):
    """As for a list of texts."""
    path = tmp_path / "a.nc"
    with h5py.File(path, "w") as file:  # its parts have no checksums
        file.attrs["datasets"] = np.uint32(1)
        file.attrs["name0"] = "a long and unusual name"
    whole = bytearray(path.read_bytes())
    heap = whole.index(b"GCOL").to_bytes(8, "little")
    # The reference: length, address of the heap, number of the text.
    at = whole.index(len("a long and unusual name").to_bytes(4, "little") + heap)
    whole[at : at + 4] = (3 * 2**30).to_bytes(4, "little")
    path.write_bytes(whole)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="attribute name0 is longer than the file"):
        read_datasets(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 2**19  # KiB


def test_an_attribute_that_is_a_list_of_lists(tmp_path):
    path = tmp_path / "a.nc"
    with h5py.File(path, "w") as file:
        ragged = np.empty(1, object)
        ragged[0] = np.array([1], np.int32)
        kind = h5py.vlen_dtype(np.int32)
        file.attrs.create("datasets", ragged, (1,), dtype=kind)
    with pytest.raises(DataError, match="attribute datasets is no number and no text"):
        read_datasets(path)


def test_writing_says_what_cannot_be_written(tmp_path):
    path = tmp_path / "a.nc"
    empty = SparseDataset.from_scipy(scipy.sparse.csr_array((3, 4), dtype=bool))
    with pytest.raises(ValueError, match="'x': sparseDataDim0 is 0"):
        write_datasets(path, {"x": empty})
    with pytest.raises(ValueError, match="no data set to write"):
        write_datasets(path, {})
    with pytest.raises(ValueError, match="'x' has 2 rows but 'y' has 3"):
        write_datasets(path, {"x": np.eye(2), "y": np.eye(3)})
    with pytest.raises(ValueError, match="weights: 'y' is no data set; there are 'x'"):
        write_datasets(path, {"x": np.eye(2)}, weights={"y": np.ones(2)})
    with pytest.raises(ValueError, match="ignore_zeros: 'y' is no data set"):
        write_datasets(path, {"x": np.eye(2)}, ignore_zeros=["y"])
    with pytest.raises(ValueError, match="ignore_zeros: 'x' is not sparse"):
        write_datasets(path, {"x": np.eye(2)}, ignore_zeros=["x"])
    with pytest.raises(ValueError, match="there is no folder"):
        write_datasets(tmp_path / "no" / "a.nc", {"x": np.eye(2)})
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(tmp_path):
    """HDF5 itself would end the process."""
    code = """
import resource, signal, sys
import numpy as np
from sparsejax.dsstne import write_datasets
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_datasets(sys.argv[1], {"x": np.zeros((1000, 1000))})
except OSError as error:
    assert error.filename == sys.argv[1], error
else:
    sys.exit("it was written")
"""
    assert resource.RLIMIT_FSIZE
    command = [sys.executable, "-c", code, str(tmp_path / "a.nc")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


def test_without_the_extra_it_says_what_to_install():
    code = "import sys; sys.modules['h5py'] = None; import sparsejax.dsstne"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "pip install 'sparsejax[dsstne]'" in done.stderr
