"""A version is not served if its answer to the example in its file differs from the stored
answer.
"""

import asyncio
import dataclasses
import json
import math
import zipfile

import jax
import numpy as np
import pytest
from flax import nnx

import sparsejax as sj
from sparsejax.predictors.stored_answer import StoredAnswer
from sparsejax.serving import logs
from sparsejax.serving.engine import Shape
from sparsejax.serving.service import Service, Settings
from sparsejax.serving.versions import FILE, Versions
from sparsejax.verbs import export

STORED = StoredAnswer(
    platform="cpu", narrow=False, example=(), ids=(4, 2, 7), scores=(8.0, 5.0, 4.999)
)


def damage(source, target) -> None:
    """Writes a copy whose largest array of weights is 0, with correct checksums."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        parts = {each: old.read(each) for each in old.namelist()}
        weights = [name for name in parts if name.startswith("weights/")]
        largest = max(weights, key=lambda name: len(parts[name]))
        parts[largest] = bytes(len(parts[largest]))
        for name, content in parts.items():
            new.writestr(name, content)


@pytest.mark.parametrize("kind", ["items", "histories", "clicks"])
def test_a_damaged_weight_with_the_right_checksum(kinds, tmp_path, capfd, kind):
    for number in "12":
        (tmp_path / number).mkdir()
    sj.load_predictor(kinds / kind).save(tmp_path / "1" / FILE)
    settings = Settings(shapes=(Shape(1, 256),))
    if kind == "items":  # what is left out comes after the comparison
        predictor = sj.load_predictor(tmp_path / "1" / FILE)
        assert predictor.answer is not None and predictor.answer.ids is not None
        sold_out = tmp_path / "sold-out.txt"
        sold_out.write_text(f"{predictor.items[predictor.answer.ids[0]]}\n")
        settings = dataclasses.replace(settings, exclude_file=str(sold_out))
    service = Service("films", settings)
    versions = Versions(service, tmp_path)
    versions.first()
    damage(tmp_path / "1" / FILE, tmp_path / "2" / FILE)
    asyncio.run(versions.look())
    assert service.version("films", None).name == "1"
    service.close()
    assert b'reloads_total{result="failed"} 1.0' in service.metrics.text()
    logs.flush()
    told = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    (error,) = (each["error"] for each in told if "error" in each)
    assert "for the example in its file the predictor gives the " in error
    # Without an answer nothing is compared.
    assert sj.load_predictor(kinds / kind).answer is None


def test_no_room_for_the_predictor_beside_the_model(tmp_path, monkeypatch):
    config = sj.NetworkConfig.autoencoder((4,))
    model = sj.FeedForward(config, inputs=9, outputs=9, rngs=nnx.Rngs(0))

    def full(_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(export, "load_predictor", full)
    path = tmp_path / "model.predictor"
    with pytest.warns(UserWarning, match="no room for the predictor beside the model"):
        export.export_with_answer(model, path, k=3, batch_size=1)
    assert sj.load_predictor(path).answer is None


def outputs(*pairs: tuple[int, float]) -> list[np.ndarray]:
    ids, scores = zip(*pairs, strict=True)
    return [np.array([ids], np.int32), np.array([scores], np.float32)]


@pytest.mark.parametrize(
    "found",
    [
        outputs((4, 8), (2, 5), (7, 4.999)),
        outputs((4, 8.005), (7, 5), (2, 4.998)),  # a tie
        outputs((4, 8), (2, 5), (3, 5.001)),  # one that was as good as the last
        outputs((4, 8), (2, 5), (7, 4.999), (-1, -math.inf)),
    ],
)
def test_rounding_is_no_fault(found):
    STORED.check(found)


@pytest.mark.parametrize(
    "found",
    [
        outputs((4, 8.1), (2, 5), (7, 4.999)),
        outputs((2, 8), (4, 5), (7, 4.999)),
        outputs((3, 8), (4, 8), (2, 5)),
        outputs((4, 8), (2, 5), (7, math.nan)),
        outputs((4, 8), (2, 5), (-1, -math.inf)),
    ],
)
def test_other_answers_are_refused(found):
    with pytest.raises(ValueError, match=r"expected \{4: 8, 2: 5, 7: 4.999\}"):
        STORED.check(found)


def test_another_platform_or_16_bits_round_more():
    found = outputs((4, 8.1), (2, 5), (7, 4.9))
    dataclasses.replace(STORED, platform="gpu").check(found)
    dataclasses.replace(STORED, narrow=True).check(found)


def test_an_answer_that_does_not_fit(kinds):
    signature = sj.load_predictor(kinds / "items").signature
    document = StoredAnswer.of(sj.load_predictor(kinds / "items").model).to_json()
    StoredAnswer.from_json(document, signature)
    first, *others = document["example"]
    for wrong in (
        {"example": others},
        {"example": [{**first, "indices": [1, 2, 9]}, *others]},
        {"example": [{**first, "indptr": [0, 2]}, *others]},
        {"example": [{**first, "indices": None}, *others]},
        {"ids": None},
        {"scores": []},
    ):
        with pytest.raises(ValueError, match="the stored answer"):
            StoredAnswer.from_json({**document, **wrong}, signature)
