"""A public name or signature that changes shows in the diff of `public_api.txt`."""

import difflib
import inspect
import operator
import pathlib
import re

import public_api
import pytest

import sparsejax as sj

DOCS = pathlib.Path(__file__).parents[1] / "docs"
KINDS = (
    (sj.SparseDataset, sj.read, sj.FeedForward),
    (sj.SequenceDataset, sj.read_sequences, sj.sequence.SASRec),
    (sj.ClickDataset, sj.read_clicks, sj.clicks.DLRM),
)


def test_public_names_and_signatures_are_those_of_the_snapshot():
    before = public_api.SNAPSHOT.read_text().splitlines()
    changes = list(difflib.unified_diff(before, public_api.lines(), n=0, lineterm=""))
    assert not changes, (
        "public names or signatures have changed; if that is meant, run "
        "`PYTHONPATH=. python tests/public_api.py`, and say it in CHANGELOG.md:\n"
        + "\n".join(changes[2:])
    )


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
