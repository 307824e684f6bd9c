"""CSV and TSV files of pairs."""

import gzip
import lzma
import pathlib

import numpy as np
import pytest
from contents import contents
from hypothesis import given
from hypothesis import strategies as st

from sparsejax.data import DataError, read_pairs
from sparsejax.data.events.block import Check
from sparsejax.data.events.pair_layout import find_layout
from sparsejax.data.events.records import record_cells
from sparsejax.data.files.columns import Chosen
from sparsejax.data.files.opening import open_data
from sparsejax.data.sets.assemble import assemble


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes, name: str = "data.csv") -> pathlib.Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def read_in_blocks(path: pathlib.Path, **options: int):
    """Calls `read_pairs` with blocks of another size."""
    layout = find_layout(path, Chosen())
    with open_data(path) as stream:
        encoded = "user", "item"
        cells = record_cells(stream, path, layout, layout.places, encoded, **options)
        blocks = Check(layout.columns, encoded=False).blocks(cells)
        return assemble(blocks, path, features=None, columns=layout.columns)


ONES = {"ann": {"milk": 1, "tea": 1}, "bob": {"tea": 1}}
VALUES = {"ann": {"milk": 2.5, "tea": 3}, "bob": {"tea": 0}}


@pytest.mark.parametrize(
    "text",
    [
        "ann,milk\nann,tea\nbob,tea\n",
        "ann,milk\r\nann,tea\r\n\r\nbob,tea",
        "\n\nann,milk\n   \nann,tea\nbob,tea\n\n",
        "\ufeffann,milk\nbob,tea\nann,tea\n",
        "\ufeffuser,item\nann,milk\nbob,tea\nann,tea\n",
        "ann;milk\nann;tea\nbob;tea\n",
        "ann|milk\nann|tea\nbob|tea\n",
        "ann\tmilk\nann\ttea\nbob\ttea\n",
        "ann,milk\nann,tea\nbob,tea\nann,milk\n",
        "ann,milk,\nann,tea,\nbob,tea,\n",
        "user_id,item_id\nann,milk\nann,tea\nbob,tea\n",
        "User ID;Item-Id\nann;milk\nann;tea\nbob;tea\n",
        "itemId,userId\nmilk,ann\ntea,ann\ntea,bob\n",
        "timestamp,movie,customer\n7,milk,ann\n7,tea,ann\n7,tea,bob\n",
        "userId,movieId,timestamp\nann,milk,7\nann,tea,8\nbob,tea,9\n",
        '"ann","milk"\n"ann",tea\nbob,"tea"\n',
    ],
)
def test_indicator(write, text):
    dataset = read_pairs(write(text))
    assert contents(dataset) == ONES
    assert dataset.matrix.data is None
    # The most frequent feature comes first.
    assert dataset.feature_names.tolist() == ["tea", "milk"]


@pytest.mark.parametrize(
    "text",
    [
        "user,item,count\nann,milk, 2.5\nann,tea,3 \nbob,tea,+0e1\n",
        "user,item,count\nann,milk,2\nann,tea,3\nbob,tea,0\nann,milk,0.5\n",
        "user\titem\trating\tts\nann\tmilk\t2.5\t978\nann\ttea\t3\t979\nbob\ttea\t0\t980\n",
        "userId,movieId,rating,timestamp\nann,milk,2.5,7\nann,tea,3,8\nbob,tea,0,9\n",
        "user,item,time,price,score\nann,milk,7,1,2.5\nann,tea,8,1,3\nbob,tea,9,1,0\n",
        "much;Product Codes;QTY;ID_customer\n1;milk;2.5;ann\n1;tea;3;ann\n1;tea;0;bob\n",
    ],
)
def test_values(write, text):
    dataset = read_pairs(write(text))
    assert contents(dataset) == VALUES
    assert np.asarray(dataset.matrix.data).dtype == np.float32
    assert contents(read_pairs(write(text), indicator=True)) == ONES


def test_columns_by_name_and_number(write):
    path = write("a,b,c,d\n1,ann,2.5,milk\n1,ann,3,tea\n1,bob,0,tea\n")
    for user, item, value in (("b", "d", "c"), (1, 3, 2), ("b", 3, 2)):
        dataset = read_pairs(path, user=user, item=item, value=value, header=True)
        assert contents(dataset) == VALUES
    assert contents(read_pairs(path, user="b", item="d", value="c")) == VALUES
    # No header: the first line is data, and so are words of headers.
    path = write("user,item\nann,milk\n")
    assert contents(read_pairs(path, header=False)) == {
        "user": {"item": 1},
        "ann": {"milk": 1},
    }
    path = write("9,8\nann,milk\n")
    options = {"user": 0, "item": 1, "header": True}
    assert contents(read_pairs(path, **options)) == {"ann": {"milk": 1}}
    path = write("ann milk\nann tea\nbob tea\n")
    assert contents(read_pairs(path, delimiter=" ")) == ONES


@pytest.mark.parametrize("blank", ["\n", "\r\n\n", "  \n"])
def test_blank_lines_before_the_header(write, blank):
    expected = {"ann": {"milk": 3}, "bob": {"tea": 2}}
    text = "user,item,rating\nann,milk,3\n\nbob,tea,2\n"
    assert contents(read_pairs(write(blank + text))) == expected
    with pytest.raises(DataError, match="csv:3: .* got 2"):
        read_pairs(write("\nuser,item,rating\nann,milk\n"))


def test_no_header_is_guessed_from_names_of_users(write):
    """Text over numbers in the user column is no header: names may look like that."""
    dataset = read_pairs(write("ann,12\n17,12\n"))
    assert contents(dataset) == {"ann": {"12": 1}, "17": {"12": 1}}


def test_quotes(write):
    text = '"Smith, J","say ""hi"""\n"two\nlines",5" disk\n'
    expected = {"Smith, J": {'say "hi"': 1}, "two\nlines": {'5" disk': 1}}
    assert contents(read_pairs(write(text))) == expected
    # In TSV a quote is an ordinary character, so an unclosed quote does not join lines.
    text = 'u\t"Heroes" - Bowie\nv\t"open\nw\tclosed"\n'
    assert contents(read_pairs(write(text))) == {
        "u": {'"Heroes" - Bowie': 1},
        "v": {'"open': 1},
        "w": {'closed"': 1},
    }


@pytest.mark.parametrize("block_bytes", [2**20, 500])
def test_quotes_that_are_not_closed(write, block_bytes):
    """Else one would swallow what follows, up to the next quote or the end."""
    rows = "".join(f'u{i},"item {i}"\n' for i in range(100))

    def read(text):
        return read_in_blocks(write(text), block_bytes=block_bytes)

    assert read(rows).num_entries == 100
    for bad, line in (('x,"y\n', 101), ('"x,y\n', 101), ('x,"y""\n', 101)):
        for behind in (rows, ""):
            with pytest.raises(DataError, match=f"csv:{line}: a quote opens here"):
                read(rows + bad + behind)
    # Line breaks within quotes, and quotes within a field, are kept.
    found = read(rows + 'x,"a\n""b""\nc"\n' + 'x,5" disk\n' + 'y,""""\n' + rows)
    found = contents(found)
    assert set(found["x"]) == {'a\n"b"\nc', '5" disk'} and set(found["y"]) == {'"'}


def test_a_record_has_an_end(write):
    path = write("u,v\n" * 100 + 'x,"y\n' + "u,v\n" * 1000)
    with pytest.raises(
        DataError, match="csv:101: a quote opens here .* within 1,000 b"
    ):
        read_in_blocks(path, block_bytes=500, max_record_bytes=1000)


def test_names_that_look_like_something_else(write):
    text = "NA,null\nnan,1.0\n1.0,007\ntrue, x\n2001-01-01,\u3042\n"
    assert contents(read_pairs(write(text))) == {
        "NA": {"null": 1},
        "nan": {"1.0": 1},
        "1.0": {"007": 1},
        "true": {" x": 1},
        "2001-01-01": {"\u3042": 1},
    }


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_compressed(write, pack):
    assert contents(read_pairs(write(pack(b"ann,milk\nann,tea\nbob,tea\n")))) == ONES


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("ann\nbob\n", 1, "at least two columns separated by ','.*'ann'"),
        ("1:1193:5\n", 1, "at least two columns"),
        ("a,x\n\nb\n", 3, "expected 2 columns.*got 1"),
        ("a,x\nb,y,z\n", 2, "expected 2 columns.*got 3"),
        ("a,x\n,y\n", 2, "user .* is empty"),
        ("a,x\nb,\n", 2, "item .* is empty"),
        ("a,x\n,\n", 2, "user .* is empty"),
        (
            "user,item,value\na,x,1\nb,y,two\n",
            3,
            "value 'two' is not a number.*indicator=True",
        ),
        ("user,item,value\na,x,1\r\n\r\nb,y,nan\r\n", 4, "value 'nan' is not finite"),
        ("user,item,value\na,x,1\nb,y,1e39\n", 3, "too large"),
        (
            "user,item,value\na,x,1\nb,y,\n",
            3,
            "has no value but earlier entries have one",
        ),
        (
            "user,item,value\na,x,\nb,y,1\n",
            3,
            "has a value but earlier entries have none",
        ),
        ("user,item,count\na,x,funny\n", 2, "value 'funny' is not a number"),
        ('"a\nb",x\n\nc\n', 4, "expected 2 columns"),
        ("a\tx\nb\t\n", 2, "item .* is empty"),
    ],
)
def test_errors(write, text, line, message):
    path = write(text)
    with pytest.raises(DataError, match=message) as caught:
        read_pairs(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")


def test_errors_far_into_a_file(write):
    rows = "".join(f"user {i},item {i % 7},{i}\n" for i in range(2, 500))
    good = f"user,item,value\n{rows}"
    assert read_in_blocks(write(good), block_bytes=100).num_entries == 498
    for bad in ("u,i,x", "u,i,", "u,i", ",i,1", "u,,1"):
        path = write(f"{good}{bad}\n{rows}")
        with pytest.raises(DataError, match=f"{path}:500: "):
            read_in_blocks(path, block_bytes=100)
    path = write(good.encode() + b"u,\xff,1\n")
    with pytest.raises(DataError, match=f"{path}:500: byte 0xff"):
        read_in_blocks(path, block_bytes=100)


def test_only_a_header(write):
    with pytest.raises(DataError, match="holds no data"):
        read_pairs(write("user,item\n"))


def test_wrong_options(write):
    path = write("user,item,rating\na,x,1\n")
    with pytest.raises(
        DataError, match="no column 'buyer'; name another: user=.*0 'user'.*2 'rating'"
    ):
        read_pairs(path, user="buyer")
    with pytest.raises(DataError, match="there is no column 3; name another: value="):
        read_pairs(path, value=3)
    with pytest.raises(ValueError, match="user is 1, item is 1, value is 2"):
        read_pairs(path, user=1, item=1, value=2)
    with pytest.raises(ValueError, match="'item' is a name, but with header=False"):
        read_pairs(path, item="item", header=False)
    with pytest.raises(
        ValueError, match="delimiter must be one or two characters.*got ':::'"
    ):
        read_pairs(path, delimiter=":::")


cell = st.text(st.characters(codec="utf-8", exclude_characters='\t\n\r,;|"\0\ufeff'))
pair = st.tuples(*[cell.filter(lambda text: text.strip())] * 2)


@given(st.lists(pair, min_size=1, max_size=12), st.sampled_from("\t,;|"))
def test_oracle(tmp_path_factory, rows, delimiter):
    path = tmp_path_factory.mktemp("pairs", numbered=True) / "data"
    path.write_bytes("\n".join(delimiter.join(row) for row in rows).encode())
    expected: dict[str, dict[str, float]] = {}
    for user, item in rows:
        expected.setdefault(user, {})[item] = 1
    dataset = read_pairs(path, header=False, delimiter=delimiter)
    assert contents(dataset) == expected
    assert dataset.row_names.tolist() == list(expected)


def test_a_message_does_not_have_all_of_very_many_columns(tmp_path):
    path = tmp_path / "wide.csv"
    path.write_text(",".join(["user"] * 3000) + ",item\n")
    with pytest.raises(
        DataError, match="which column is the user.* and 2,901 more"
    ) as e:
        read_pairs(path)
    assert len(str(e.value)) < 10_000


def test_very_many_columns_are_refused(tmp_path):
    path = tmp_path / "wide.csv.gz"
    # The compressed file is a thousand times smaller than its text.
    with gzip.open(path, "wt") as file:
        file.write(",".join(["user"] * 70_000) + ",item\n")
    with pytest.raises(DataError, match=r"70,001 columns, but at most 65,536 are read"):
        read_pairs(path)


@pytest.mark.parametrize("block_bytes", [1, 4, 100])
def test_records_of_empty_quotes_are_blank(block_bytes, write):
    text = 'user,item,rating\nann,tea,1\n""\n"   "\nbob,rye,2\n""\n'
    data = read_in_blocks(write(text), block_bytes=block_bytes)
    assert contents(data) == {"ann": {"tea": 1}, "bob": {"rye": 2}}
