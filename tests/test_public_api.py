"""A public name or signature that changes shows in the diff of `public_api.txt`."""

import difflib
import operator
import pathlib
import re

import public_api
import pytest

import sparsejax as sj

EARLIER = pathlib.Path(__file__).parents[1] / "docs" / "deprecations.md"


def test_public_names_and_signatures_are_those_of_the_snapshot():
    before = public_api.SNAPSHOT.read_text().splitlines()
    changes = list(difflib.unified_diff(before, public_api.lines(), n=0, lineterm=""))
    assert not changes, (
        "public names or signatures have changed; if that is meant, run "
        "`PYTHONPATH=. python tests/public_api.py`, and say it in CHANGELOG.md:\n"
        + "\n".join(changes[2:])
    )


def test_earlier_names_work_and_say_the_new_ones():
    rows = re.findall(
        r"^\| `(sj[\w.]+)` \| `(sj[\w.]+)` \|", EARLIER.read_text(), re.MULTILINE
    )
    assert len(rows) > 50
    for earlier, now in rows:
        name = earlier.removeprefix("sj.")
        assert name not in dir(sj)
        with pytest.warns(
            FutureWarning, match=rf"{earlier[3:]} is sparsejax\.{now[3:]} now"
        ):
            value = getattr(sj, name)
        assert value is operator.attrgetter(now.removeprefix("sj."))(sj)


def test_a_name_that_never_was_is_an_error():
    with pytest.raises(AttributeError, match="nowhere"):
        operator.attrgetter("nowhere")(sj)
