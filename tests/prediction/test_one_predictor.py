"""Predictors of every kind have one class and one file format."""

import json
import os
import subprocess
import sys
import zipfile

import exported_kinds
import numpy as np
import pytest
import scipy.sparse
from exported_kinds import export

import sparsejax as sj

pytestmark = pytest.mark.usefixtures("symbolic_sizes")

KINDS = ["items", "histories", "clicks"]
ITEMS = scipy.sparse.csr_array(np.eye(3, 9, dtype=np.float32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, symbolic_sizes):
    return tmp_path_factory.mktemp("predictors")


@pytest.fixture(scope="module")
def shown(folder):
    """Writes predictors; returns input data for each."""
    histories, clicks = export(folder)
    return {"items": ITEMS, "histories": histories, "clicks": clicks}


def answer(predictor: sj.Predictor, shown) -> bytes:
    if predictor.signature.kind == "clicks":
        return predictor.predict(shown).tobytes()
    found = predictor.recommend(shown)
    return found.ids.tobytes() + found.scores.tobytes()


def test_the_signature_is_data(folder, shown):
    found = {kind: sj.load_predictor(folder / kind).signature for kind in KINDS}
    assert {kind: s.kind for kind, s in found.items()} == {kind: kind for kind in KINDS}
    names = {kind: [i.name for i in s.inputs] for kind, s in found.items()}
    assert names["items"] == [None, "exclude"]
    assert names["histories"] == ["histories", "times", "exclude"]
    assert names["clicks"][0] == "dense"
    outputs = {kind: [o.name for o in s.outputs] for kind, s in found.items()}
    assert outputs["items"] == outputs["histories"] == ["ids", "scores"]
    assert outputs["clicks"] == ["logits"]
    assert found["items"].inputs[0].shape == (9,)
    assert found["items"].outputs[1].shape == (3,)
    for kind in KINDS:
        with zipfile.ZipFile(folder / kind) as parts:
            document = json.loads(parts.read("predictor.json"))
            assert {"predictor.json", "names.json"} < set(parts.namelist())
        assert document == json.loads(json.dumps(found[kind].to_json()))
        assert document["version"] == 5


def test_two_exports_are_the_same_bytes(folder, shown, tmp_path):
    export(tmp_path)
    for kind in KINDS:
        assert (tmp_path / kind).read_bytes() == (folder / kind).read_bytes(), kind


def test_another_process_writes_the_same_bytes(folder, shown, tmp_path):
    subprocess.run(
        [sys.executable, exported_kinds.__file__, str(tmp_path)],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        check=True,
    )
    for kind in KINDS:
        assert (tmp_path / kind).read_bytes() == (folder / kind).read_bytes(), kind


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_kind_has_no_use_for_is_an_error(kind, folder, shown):
    predictor = sj.load_predictor(folder / kind)
    records = {"age": [1.0], "city": ["c1"], "user": [None]}
    calls = {
        "recommend": lambda: predictor.recommend(shown[kind]),
        "recommend_names": lambda: predictor.recommend_names(["item 1"]),
        "names": lambda: predictor.names(sj.Recommendations(*np.zeros((2, 1, 1), int))),
        "predict": lambda: predictor.predict(shown["clicks"]),
        "predict_records": lambda: predictor.predict_records(records),
        "max_items": lambda: predictor.warm_up(max_items=1),
    }
    of_clicks = {"predict", "predict_records"}
    refused = calls.keys() - of_clicks if kind == "clicks" else of_clicks
    for name in refused:
        with pytest.raises(
            ValueError, match=f"{name} .*clicks|of {kind} has no {name}"
        ):
            calls[name]()
    facts = {"num_dense", "schema", "vocabularies"}
    others = {"k", "num_features", "num_items", "items"}
    for name in facts | others:
        if (name in facts) == (kind == "clicks"):
            assert getattr(predictor, name) is not None
        else:
            with pytest.raises(
                AttributeError, match=f"of {kind} has no {name}; it has"
            ):
                getattr(predictor, name)
            assert not hasattr(predictor, name)
    assert repr(predictor).startswith(f"Predictor({kind}, ")


def test_files_of_earlier_commits_are_refused(folder, tmp_path):
    with zipfile.ZipFile(folder / "items") as old:
        parts = {name: old.read(name) for name in old.namelist()}
    document = json.loads(parts["predictor.json"]) | {"version": 4}
    parts["predictor.json"] = json.dumps(document).encode()
    for name, settings in (("four", "predictor.json"), ("clicks", "clicks.json")):
        with zipfile.ZipFile(tmp_path / name, "w") as new:
            for part, content in parts.items():
                new.writestr(settings if part == "predictor.json" else part, content)
    with pytest.raises(ValueError, match='"version" is 4; .* version 5; write it anew'):
        sj.load_predictor(tmp_path / "four")
    with pytest.raises(
        ValueError, match=r"clicks: is not a predictor.*predictor\.json"
    ):
        sj.load_predictor(tmp_path / "clicks")
