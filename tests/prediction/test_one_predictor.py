"""Predictors of every kind: one class, one form of file, which reads the earlier ones."""

import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys
import zipfile

import exported_kinds
import numpy as np
import pytest
import scipy.sparse
from exported_kinds import export

import sparsejax as sj
from sparsejax.kinds import portable

pytestmark = pytest.mark.usefixtures("symbolic_sizes")

KINDS = ["items", "histories", "clicks"]
ITEMS = scipy.sparse.csr_array(np.eye(3, 9, dtype=np.float32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, symbolic_sizes):
    return tmp_path_factory.mktemp("predictors")


@pytest.fixture(scope="module")
def shown(folder):
    """What each predictor is asked; they are written before."""
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


def earlier_form(path: pathlib.Path, to: pathlib.Path, version: int) -> None:
    """Writes a predictor as an earlier release did: version 2 had two forms."""
    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    names = {}
    for number, name in enumerate(json.loads(parts.pop("names.json"))):
        text = parts.pop(f"names/{number}/text").decode()
        ends = np.cumsum(np.frombuffer(parts.pop(f"names/{number}/lengths"), "<u4"))
        names[name] = [text[a:b] for a, b in itertools.pairwise([0, *ends])]
    for part in [part for part in parts if part.startswith("names/")]:
        del parts[part]  # the index
    signature = json.loads(parts.pop("predictor.json"))
    if version < 4:
        assert signature.pop("layer") is None
    if version > 2:
        documents = {"predictor.json": signature | {"version": version}}
        documents["names.json"] = names
        more = {name: json.dumps(each).encode() for name, each in documents.items()}
        return _write(parts | more, to)
    same = {key: signature[key] for key in ("calling_convention", "jax", "weights")}
    same["programs"] = signature["rows"]
    *inputs, exclude = signature["inputs"]
    if signature["kind"] == "clicks":
        same |= {key: signature[key] for key in ("stacks", "schema")}
        same |= {"version": 1, "num_dense": signature["inputs"][0]["shape"][0]}
        more = {"clicks.json": same, "vocabularies.json": names}
    else:
        k, num_items = signature["outputs"][0]["shape"][0], exclude["shape"][0]
        stated = [
            {"num_features": i["shape"][0]}
            if i["sparse"]
            else {key: i[key] for key in ("name", "dtype", "shape")}
            for i in inputs
        ]
        same |= {"version": 2, "k": k, "num_items": num_items, "inputs": stated}
        more = {"predictor.json": same, "items.json": names.get("items")}
    return _write(parts | {n: json.dumps(d).encode() for n, d in more.items()}, to)


def _write(parts: dict[str, bytes], to: pathlib.Path) -> None:
    with zipfile.ZipFile(to, "w") as new:
        for name, content in parts.items():
            new.writestr(name, content)


@pytest.fixture(scope="module")
def ranking_programs(tmp_path_factory, symbolic_sizes):
    """Predictors whose programs rank themselves, as all did."""
    folder = tmp_path_factory.mktemp("earlier")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(portable, "_ends_in_its_layer", lambda model: False)
        export(folder)
    return folder


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_files_of_earlier_releases_are_read(
    kind, version, folder, shown, ranking_programs, tmp_path
):
    written = ranking_programs if version < 4 else folder
    earlier_form(written / kind, tmp_path / "earlier", version)
    earlier, now = map(sj.load_predictor, (tmp_path / "earlier", folder / kind))
    layer = None if version < 4 else now.signature.layer
    assert earlier.signature == dataclasses.replace(now.signature, layer=layer)
    assert (now.signature.layer is None) == (kind == "clicks")
    assert answer(earlier, shown[kind]) == answer(now, shown[kind])
    if kind != "clicks":
        assert earlier.items is not None and now.items is not None
        assert earlier.items.tolist() == now.items.tolist()
