"""A file names items that are recommended to nobody; it changes while the service runs."""

import contextlib
import json
import os
import pathlib

import numpy as np
import pytest
from served import NAMES, Client, listening, tensor

import sparsejax as sj
from sparsejax.data.files.opening import DataError
from sparsejax.serving import logs
from sparsejax.serving.engine import Shape
from sparsejax.serving.service import Service, Settings

ITEMS = tensor("items", "BYTES", ["item 1"])
CANDIDATES = tensor("candidates", "BYTES", NAMES)


def write(path: pathlib.Path, *names: str) -> None:
    """Writes a new file and renames it to its final name."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{name}\n" for name in names))
    os.replace(new, path)


@pytest.fixture
def listed(tmp_path) -> pathlib.Path:
    path = tmp_path / "sold-out.txt"
    write(path, "item 0", "jalapeño", "newer than the model")
    return path


def made(listed: pathlib.Path, **settings) -> Service:
    shapes = (Shape(4, 256),)
    return Service(
        "films", Settings(shapes=shapes, exclude_file=str(listed), **settings)
    )


def look(service: Service) -> None:
    assert service.excluded is not None
    service.excluded.look()


def of(answer: tuple[int, dict]) -> dict[str, float]:
    """The items in an answer, with their scores."""
    status, found = answer
    assert status == 200, found
    return dict(zip(found["items"]["data"], found["scores"]["data"], strict=True))


def compilations(client: Client) -> str:
    lines = client.ask("GET", "/metrics")[2].decode().splitlines()
    return next(l for l in lines if l.startswith("sparsejax_compilations_total"))


def test_no_model_recommends_them_from_when_they_are_in_the_file(
    listed, file, predictor, capsys
):
    service = made(listed, similar=True)
    service.load(file)
    lists = ["item 0", "jalapeño"], ["item 7"], []
    expected = [
        predictor.recommend_names(["item 1"], exclude_items=names) for names in lists
    ]
    with contextlib.closing(service), listening(service) as port:
        client = Client(port)
        before = compilations(client)
        for out, wanted in zip(lists, expected, strict=True):
            if out is not lists[0]:
                write(listed, *out)
                look(service)
            best = of(client.infer(ITEMS))
            assert [*best] == wanted
            ranked = of(client.infer(ITEMS, CANDIDATES))
            assert [*ranked] == [*best]
            like = of(client.infer(ITEMS, model="similar"))
            assert len(like) == 5
            assert not {*out} & {*like}
        # A file of which nothing is left, or that is gone: what it had before counts.
        write(listed, "item 7")
        look(service)
        write(listed, *NAMES)
        look(service)
        look(service)
        listed.unlink()
        look(service)
        assert "item 7" not in of(client.infer(ITEMS))
        write(listed, "item 7")
        look(service)
        assert compilations(client) == before
    logs.flush()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    told = [line for line in lines if line["event"] == "exclude"]
    unknown = [
        told.pop(i) for i in (0, 0)
    ]  # of the model, and of that of similar items
    for line in unknown:
        assert line["result"] == "unknown"
        assert line["message"] == (
            "exclude_items: 1 of 3 names are not items of the model, and have no effect: "
            "'newer than the model'"
        )
    results = ["loaded", "loaded", "loaded", "failed", "loaded"]
    assert [line["result"] for line in told] == results
    assert "no item is left" in told[3]["error"]


def test_the_scores_of_others_keep_their_bits(listed, file, predictor):
    service = made(listed)
    service.prepare()
    assert service.excluded is not None
    denying = service.excluded.denying(sj.load_predictor(file))
    service.excluded.tell(denying.model.programs, denying.items)
    rows = [["item 1", "item 2"], [], ["item 7"]]
    given, _ = predictor.model.rows_of_names(rows)
    plain = predictor.model.programs.run(4, given, 256)
    found = denying.model.programs.run(4, given, 256)
    for ids, scores, had, before in zip(*found, *plain, strict=True):
        before = dict(zip(had.tolist(), before.tolist(), strict=True))
        kept = [item for item in had.tolist() if item not in (0, 8)]
        now = dict(zip(ids.tolist(), scores.tolist(), strict=True))
        assert [*now][: len(kept)] == kept
        assert not {0, 8} & now.keys()
        np.testing.assert_array_equal(
            [now[item] for item in kept], [before[item] for item in kept]
        )


def test_a_version_that_comes_later_follows(listed, file):
    service = made(listed, keep=1)
    service.load(file)
    service.swap(service.made(file, "2"))
    write(listed, "item 3")
    look(service)
    with contextlib.closing(service), listening(service) as port:
        client = Client(port)
        for path in ("", "/versions/1"):
            body = json.dumps({"inputs": [ITEMS]}).encode()
            where = f"/v2/models/films{path}/infer"
            outputs = json.loads(client.ask("POST", where, body)[2])["outputs"]
            items = next(each for each in outputs if each["name"] == "items")["data"]
            assert len(items) == 5
            assert "item 3" not in items


def test_what_cannot_be_served_says_why(listed, kinds, file, tmp_path):
    service = made(listed)
    service.prepare()
    with pytest.raises(ValueError, match="a model of clicks recommends no items"):
        service.made(kinds / "clicks", "1")
    write(listed, *NAMES)
    with pytest.raises(ValueError, match="no item is left"):
        made(listed).load(file)
    listed.write_bytes(b"\0")
    with pytest.raises(DataError, match="sold-out"):
        made(listed).prepare()
    listed.unlink()
    with pytest.raises(FileNotFoundError):
        made(listed).prepare()
