"""DSSTNE's text form and index files."""

import gzip
import warnings

import netCDF4
import numpy as np
import pytest

from sparsejax.data import DataError, UnknownFeaturesWarning
from sparsejax.dsstne import index_files, netcdf, text


def rows_of(samples: text.Samples) -> dict[str, list]:
    """The entries of each sample, by name, in the order of the file."""
    rows, found = samples.rows, {}
    for name, start, end in zip(samples.samples, rows.starts, rows.ends, strict=True):
        features = samples.features[rows.indices[start:end]].tolist()
        if rows.values is not None:
            values = rows.values[start:end].tolist()
            features = list(zip(features, values, strict=True))
        found[name] = features
    return found


@pytest.fixture
def read(tmp_path):
    """A function that reads a text, and fails on a warning."""

    def call(content: str, **options) -> text.Samples:
        path = tmp_path / "text"
        path.write_text(content)
        return text.read_samples(path, **options)

    return call


INDICATORS = """Example1\tFeature1:Feature2:Feature3
Example2\tFeature5:Feature2:Feature4
Example3\tFeature6:Feature7:Feature8
"""
ANALOG = """Example1\tFeature1,123
Example2\tFeature2,234
Example3\tFeature3,345:Feature4,456
"""
STARTS, ENDS, INDICES, VALUES = (
    "sparseStart0",
    "sparseEnd0",
    "sparseIndex0",
    "sparseData0",
)


@pytest.mark.parametrize("analog", [False, True])
def test_the_user_guides_texts(read, tmp_path, analog):
    """Its two examples, as the C library reads what is made of them."""
    samples = read(ANALOG if analog else INDICATORS, analog=analog)
    netcdf.save(tmp_path / "gl.nc", {"gl_input": samples.dataset()})
    expected = {"datasets": 1, "name0": "gl_input", "kind0": 0, "dimensions0": 1}
    expected |= {"width0": 128, "attributes0": 3, "dataType0": 0}
    lists = {STARTS: [0, 3, 6], ENDS: [3, 6, 9], INDICES: [0, 1, 2, 3, 1, 4, 5, 6, 7]}
    if analog:
        expected |= {"attributes0": 1, "dataType0": 4}
        lists = {STARTS: [0, 1, 2], ENDS: [1, 2, 4], INDICES: [0, 1, 2, 3]}
        lists[VALUES] = [123, 234, 345, 456]
    with netCDF4.Dataset(tmp_path / "gl.nc") as file:
        found = {name: file.getncattr(name) for name in file.ncattrs()}
        assert found == expected
        for name, value in found.items():
            assert isinstance(value, str) or value.dtype == np.uint32, name
        for name, values in lists.items():
            variable = file[name]
            assert variable[:].tolist() == values
            assert variable.dtype == (np.float32 if name == VALUES else np.uint32)
            of_rows = name in (STARTS, ENDS)
            dimension = "examplesDim0" if of_rows else "sparseDataDim0"
            assert variable.dimensions == (dimension,)
        assert set(file.variables) == set(lists)


def test_names_are_numbered_as_first_seen(read):
    samples = read("b\tz:y\na\ty:x:\n")
    assert samples.features.tolist() == ["z", "y", "x"]
    assert rows_of(samples) == {"b": ["z", "y"], "a": ["y", "x"]}


def test_a_later_line_replaces(read):
    with pytest.warns(UserWarning, match=r"text: 2 lines are replaced by a later line"):
        samples = read("a\tx:y\nb\tz\na\tw\na\ty:y\n")
    assert rows_of(samples) == {"a": ["y", "y"], "b": ["z"]}
    assert samples.features.tolist() == ["x", "y", "z", "w"]


def test_a_missing_value_is_zero(read):
    with pytest.warns(UserWarning, match="2 elements have no value, which counts as 0"):
        samples = read("a\tx,2.5:y:z,\n", analog=True)
    assert rows_of(samples) == {"a": [("x", 2.5), ("y", 0), ("z", 0)]}


def test_the_first_of_several_values_counts(read):
    with pytest.warns(UserWarning, match="1 elements have several values"):
        samples = read("a\tx,1,2,3:y,4\n", analog=True)
    assert rows_of(samples) == {"a": [("x", 1), ("y", 4)]}


def test_unknown_features_are_left_out(read):
    known = ["y", "x"]
    with pytest.warns(UnknownFeaturesWarning, match="3 entries.*2 features.*'u', 'v'"):
        samples = read("a\tu:x:v\nb\tu\nc\ty\n", features=known, new_features=False)
    assert rows_of(samples) == {"a": ["x"], "b": [], "c": ["y"]}
    assert samples.features.tolist() == known
    merged = read("a\tu:x:v\n", features=known)
    assert merged.features.tolist() == ["y", "x", "u", "v"]


def test_a_sample_without_a_line_gets_an_empty_row(read):
    with pytest.warns(UserWarning, match="2 samples of the index have no line"):
        samples = read("new\tx\nb\ty\n", samples=["a", "b", "c"])
    assert rows_of(samples) == {"a": [], "b": ["y"], "c": [], "new": ["x"]}


def test_what_is_skipped(read):
    with pytest.warns(UserWarning, match="1 lines have no TAB"):
        samples = read("no tab\n\n\r\na:b,c\tx::,5:y\tz:\ne\t\n")
    assert rows_of(samples) == {"a:b,c": ["x", "y\tz"], "e": []}


def test_backslashes_and_other_names(read):
    samples = read("ä\\t\tx\\:ö\\,1\n")
    assert rows_of(samples) == {"ä\\t": ["x\\", "ö\\"]}


@pytest.mark.parametrize("value", ["nan", "inf", "abc", "1_0", "1e99", "2020-01-01"])
def test_bad_values(read, value):
    content = f"a\tx,1\n\nb\ty,2:z,{value}\n"
    with pytest.raises(DataError, match=rf"text:3: value '{value}' is"):
        read(content, analog=True)
    assert rows_of(read(content))["b"] == ["y", "z"]


def test_files_without_samples(read, tmp_path):
    with pytest.raises(DataError, match="holds no samples"):
        read("")
    with pytest.raises(DataError, match="text:2: the sample has no name"):
        read("a\tx\n\ty\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="holds no files"):
        text.read_samples(tmp_path / "folder")


def test_a_folder_is_one_text(tmp_path):
    folder = tmp_path / "parts"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "c").write_text("c\tz\n")
    (folder / "2").write_bytes(gzip.compress(b"b\tx\n"))
    (folder / "1").write_text("a\ty:x")
    samples = text.read_samples(folder)
    assert rows_of(samples) == {"a": ["y", "x"], "b": ["x"]}
    assert samples.features.tolist() == ["y", "x"]


def test_many_random_lines(read):
    """Against a parser of a few lines, over duplicates of everything."""
    rng = np.random.default_rng(0)
    lines, expected, features = [], {}, {}
    for _ in range(500):
        name = f"s{rng.integers(200)}"
        entries = [
            (f"f{f}", int(v)) for f, v in rng.integers(0, 60, (rng.integers(8), 2))
        ]
        lines.append(f"{name}\t" + ":".join(f"{f},{v}" for f, v in entries))
        expected[name] = [(f, float(v)) for f, v in entries]
        features |= dict.fromkeys(f for f, _ in entries)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        samples = read("\n".join(lines), analog=True)
    assert rows_of(samples) == expected
    assert samples.features.tolist() == list(features)
    assert samples.dataset().size == (128,)


def test_index_files(tmp_path):
    path = tmp_path / "index"
    path.write_text(index_files.index_text(["b", "ä c", "a"]))
    assert path.read_text() == "b\t0\nä c\t1\na\t2\n"
    assert index_files.read_index(path).tolist() == ["b", "ä c", "a"]
    path.write_text("x\t1\ny\t0")
    assert index_files.read_index(path).tolist() == ["y", "x"]
    path.write_text("x\t1\ny\t4\n")
    found = index_files.read_index(path)
    assert found.tolist()[1::3] == ["x", "y"] and len(found) == 5
    assert index_files.holes(found).tolist() == [0, 2, 3]
    longer = [*found.tolist(), "new"]
    assert index_files.index_text(longer) == "x\t1\ny\t4\nnew\t5\n"
    with pytest.raises(ValueError, match="contains '\\\\t'"):
        index_files.index_text(["a\tb"])


BAD_INDICES = {
    "holds no names": "",
    "index:1: expected 'name<TAB>number', got 'a 0'": "a 0\n",
    "index:2: expected 'name<TAB>number'": "a\t0\n\nb\t1\n",
    "index:1: '-1' is not a number": "a\t-1\n",
    "index:1: '99999999999' is not a number": "a\t99999999999\n",
    "index:2: '' is not a number": "a\t0\nb\t\n",
    "index:1: the name is empty": "\t0\n",
    "index:3: the number 0 occurs twice": "a\t0\nb\t1\nc\t0\n",
    "499 of the numbers 0 to 500 have no name": "a\t0\nb\t500\n",
    "index names must be unique.*'a'": "a\t0\na\t1\n",
}


@pytest.mark.parametrize("message", BAD_INDICES)
def test_bad_index_files(tmp_path, message):
    path = tmp_path / "index"
    path.write_text(BAD_INDICES[message])
    with pytest.raises(DataError, match=message):
        index_files.read_index(path)


@pytest.mark.parametrize(("features", "width"), [(1, 128), (128, 128), (129, 256)])
def test_widths(features, width):
    assert index_files.padded_width(features) == width


@pytest.mark.parametrize("seed", range(2))
def test_random_bytes_changed(tmp_path, seed):
    """Whatever a file holds, it is read or one line says why not."""
    rng = np.random.default_rng(seed)
    marks = np.frombuffer(b'\t\n\r:,0-.e\x00\xff\xc3\xa4\xe2\\"', np.uint8)
    path = tmp_path / "file"
    reads = {
        INDICATORS: text.read_samples,
        ANALOG: lambda path: text.read_samples(path, analog=True),
        "b\t0\n\xc3\xa4 c\t1\na\t2\n": index_files.read_index,
    }
    refused = 0
    for whole, read in reads.items():
        for _ in range(150):
            damaged = np.frombuffer(whole.encode(), np.uint8).copy()
            at = rng.integers(0, len(damaged), rng.integers(1, 6))
            damaged[at] = rng.choice(marks, len(at))
            path.write_bytes(damaged[rng.integers(0, 3) :].tobytes())
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    read(path)
            except DataError as error:
                assert str(error).startswith(str(path)) and "\n" not in str(error)
                refused += 1
    assert refused > 100
