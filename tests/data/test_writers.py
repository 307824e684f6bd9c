"""Files of interactions are read as what was written."""

import numpy as np
import pytest
import scipy.sparse
from contents import contents
from hypothesis import given
from hypothesis import strategies as st

from sparsejax.data import SparseDataset, read_text
from sparsejax.data.writers import write_text
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
