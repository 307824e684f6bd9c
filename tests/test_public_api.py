"""A public name or signature that changes shows in the diff of `public_api.txt`."""

import difflib
import inspect
import operator
import pathlib
import re
from typing import Any

import public_api
import pytest

import sparsejax as sj

DOCS = pathlib.Path(__file__).parents[1] / "docs"
EARLIER = DOCS / "deprecations.md"
KINDS = (
    (sj.SparseDataset, sj.read, sj.FeedForward),
    (sj.SequenceDataset, sj.read_sequences, sj.sequence.SASRec),
    (sj.ClickDataset, sj.read_clicks, sj.embeddings.DLRM),
)


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


def test_arguments_and_methods_by_earlier_names(tmp_path, pytestconfig):
    schema = sj.ClickSchema("click", ids={"user": sj.data.VocabularyColumn()})
    path = tmp_path / "clicks.csv"
    path.write_text("click,user\n1,ann\n0,eve\n")
    train = sj.read_clicks([{"click": 1, "user": "eve"}], schema)
    earlier: dict[str, Any] = {"vocabulary": train}
    with pytest.warns(FutureWarning, match="vocabulary= is features= now") as told:
        found = sj.read_clicks(path, schema, **earlier)
    assert found.num_ids == {"user": 3}
    if not pytestconfig.getoption("--check-annotations"):  # a wrapper is called then
        assert told[0].filename == __file__
    with pytest.warns(FutureWarning, match="vocabulary= is features= now"):
        assert sj.data.scan_clicks(path, schema, **earlier).num_ids == {"user": 3}
    with pytest.warns(FutureWarning, match="append_vocabulary is append_features now"):
        assert sj.read_clicks(path, schema).append_vocabulary(train).num_ids == {
            "user": 4
        }
    with pytest.raises(TypeError, match="vocabulary is the earlier name of features"):
        sj.read_clicks(path, schema, features=train, **earlier)


def test_the_words_of_the_three_kinds_are_there():
    text = (DOCS / "concepts.md").read_text().partition("## The words of the three")[2]
    rows = re.findall(r"^\| ([^|]+) \|(.+)\|$", text, re.MULTILINE)[1:]
    assert len(rows) > 12
    for concept, cells in rows:
        for cell, (data, read, model) in zip(cells.split("|"), KINDS, strict=True):
            for word in re.findall(r"`([\w.=]+)`", cell):
                owner, _, name = word.partition(".")
                if word == "features=train":
                    assert "features" in inspect.signature(read).parameters
                    continue
                known = {"sj": sj, "data": data, "model": model}[owner]
                assert operator.attrgetter(name)(known), concept


def test_a_name_that_never_was_is_an_error():
    with pytest.raises(AttributeError, match="nowhere"):
        operator.attrgetter("nowhere")(sj)
