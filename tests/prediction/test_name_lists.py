"""Lists of names as rows of a matrix, compared with Python sets."""

import hypothesis
import hypothesis.strategies as st
import pyarrow as pa
import pytest

from sparsejax.engine.rank.name_lists import matrix_of_histories

ITEMS = ["b", "a", "d", "ü"]
HISTORIES = st.lists(
    st.none() | st.lists(st.none() | st.sampled_from([*ITEMS, "x", ""])), min_size=1
)


@hypothesis.given(
    histories=HISTORIES, start=st.integers(0, 3), long=st.booleans(), none=st.booleans()
)
def test_rows_are_the_known_names_of_histories(histories, start, long, none):
    items = [] if none else ITEMS
    kind = pa.large_list(pa.large_string()) if long else pa.list_(pa.string())
    given = pa.array(histories, kind)[start:]  # its offsets do not begin at 0
    found = matrix_of_histories(given, pa.array(items, pa.large_string()))
    expected = [
        sorted({items.index(name) for name in history or [] if name in items})
        for history in histories[start:]
    ]
    bounds = zip(found.indptr, found.indptr[1:], strict=False)
    assert [found.indices[a:b].tolist() for a, b in bounds] == expected
    assert found.shape == (len(expected), len(items)) and found.data is None


def test_unknown_names_are_an_error_if_they_should_be():
    items = pa.array(ITEMS, pa.large_string())
    given = pa.array([["a", "x"], ["y", "d"]])
    with pytest.raises(ValueError, match="2 of 4 names are not items .*: 'x', 'y'$"):
        matrix_of_histories(given, items, unknown="error")
