"""Files of interactions are read back as they were written."""

import io

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse
from contents import contents
from hypothesis import given
from hypothesis import strategies as st

from sparsejax.data import SparseDataset, from_arrow, read, read_text
from sparsejax.data.sets.writers import write_adjacency, write_pairs, write_text
from sparsejax.whole_files import whole_text_file

# Names full of what the text form gives a meaning; a zero byte it cannot hold.
NAMES = st.lists(
    st.text(
        st.sampled_from('\\,:\t\n\rtnr" ä\ufeff') | st.characters(codec="utf-8"),
        min_size=1,
    ).filter(lambda name: "\0" not in name),
    min_size=1,
    max_size=6,
    unique=True,
)


@given(NAMES, NAMES, st.booleans(), st.integers(0, 2**32 - 1))
def test_text_is_read_as_it_was_written(tmp_path_factory, rows, features, valued, seed):
    rows = [row.replace("\ufeff", "") or "row" for row in rows]
    rows = list(dict.fromkeys(rows))
    rng = np.random.default_rng(seed)
    dense = rng.random((len(rows), len(features))) < 0.6
    dense[0, 0] = True
    data = SparseDataset.from_scipy(
        scipy.sparse.csr_array(dense.astype(np.float32) if valued else dense),
        row_names=rows,
        feature_names=features,
    )
    path = tmp_path_factory.getbasetemp() / "any.txt"
    with whole_text_file(path) as file:
        write_text(file, data)
    assert contents(read_text(path)) == contents(data)


def test_other_backslashes_stand_for_themselves(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text(r"a\b<TAB>C\D\\,1:x\:y,2:\z\,,3".replace("<TAB>", "\t"))
    data = read_text(path, indicator=True)
    assert data.row_names.tolist() == ["a\\b"]
    assert set(data.feature_names.tolist()) == {"C\\D\\", "x:y", "\\z,"}


def test_errors_show_what_the_file_means(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("a\tb\nno\\:tab\n")
    with pytest.raises(ValueError, match=r"data.txt:2: no TAB.*'no:tab'"):
        read_text(path)
    path.write_text("a\tb,x\\,y\n")
    with pytest.raises(ValueError, match="data.txt:1: value 'x,y' is not a number"):
        read_text(path)


TIMES = {
    "integers": [5, -(2**62), 5, 5, 2**62 + 1],
    "floats": [0.1 + 0.2, 1e300, 0.30000000000000004, -2.0, 5.0],
    "days": np.array(["2024-05-02", "1600-01-01", "9999-12-31"] * 2)[:5].astype(
        "M8[D]"
    ),
    "seconds": np.array(["2024-05-02T17:30"] * 4 + ["1960-01-01T00:00:01"], "M8[s]"),
    "micros": np.array(["2024-05-02T17:30:00.000001"] * 4 + ["1960-01-01"], "M8[us]"),
}


@pytest.mark.parametrize("valued", [False, True])
@pytest.mark.parametrize("kind", TIMES)
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_pairs_keep_the_times(kind, valued, ending, tmp_path):
    table = {"user": ["b", "b", "b", "a", "a"], "item": ["z", "x", "y", "y", "z"]}
    table |= {"rating": [0.1, 2, 3, 4, 5]} if valued else {}
    data = from_arrow(pa.table(table | {"time": TIMES[kind]}))
    with (tmp_path / f"pairs.{ending}").open("w") as file:
        write_pairs(file, data, delimiter="," if ending == "csv" else "\t")
    again = read(tmp_path / f"pairs.{ending}", format="pairs")
    assert contents(again) == contents(data)
    assert again.times is not None and data.times is not None
    assert again.times.dtype == data.times.dtype
    np.testing.assert_array_equal(again.times, data.times)
    # Of equal times, too, the same entry is the last.
    held, wanted = again.split_last().heldout, data.split_last().heldout
    assert contents(held) == contents(wanted)


def test_forms_that_cannot_hold_times_say_so():
    table = pa.table({"user": ["a"], "item": ["x"], "time": [5]})
    data = from_arrow(table)
    for write, name in ((write_text, "text"), (write_adjacency, "adjacency")):
        file = io.TextIOWrapper(io.BytesIO())
        with pytest.warns(UserWarning, match=f"times are left out: the format {name}"):
            write(file, data)
        write(file, from_arrow(table, time=None))  # and no warning
    far = np.array(["12000-01-01"], "M8[us]")
    far = from_arrow(pa.table({"user": ["a"], "item": ["x"], "time": far}))
    with pytest.raises(ValueError, match="dates before the year 0 or after 9999"):
        write_pairs(io.TextIOWrapper(io.BytesIO()), far)
