"""A newer version replaces the older one between two batches, and no request is lost."""

import asyncio
import contextlib
import gc
import json
import os
import pathlib
import re
import shutil
import socket
import threading
import time
import weakref
from typing import Any

import pytest
import uvicorn
from flax import nnx
from served import Client, listening, resident, tensor, until

import sparsejax as sj
from sparsejax.serving import app, logs
from sparsejax.serving import service as serving_service
from sparsejax.serving.connections import configured
from sparsejax.serving.engine import Engine, Shape
from sparsejax.serving.service import Service, Settings
from sparsejax.serving.versions import FILE, Versions, found_in


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[int, pathlib.Path]:
    """A predictor for even and one for odd versions. Their names show which one answered."""
    folder = tmp_path_factory.mktemp("versions")
    names = {0: ["even a", "even b", "same"], 1: ["same", "odd a", "odd b"]}
    for parity, items in names.items():
        config = sj.NetworkConfig.autoencoder((4,))
        model = sj.FeedForward(config, inputs=3, outputs=3, rngs=nnx.Rngs(parity))
        path = folder / str(parity)
        sj.export_predictor(model, path, k=2, names=items, batch_size=1)
    return {parity: folder / str(parity) for parity in names}


@pytest.fixture
def service(tmp_path):
    service = Service("films", Settings(shapes=(Shape(1, 256),)))
    yield service
    service.close()


def put(
    folder: pathlib.Path, number: int, file: pathlib.Path, *, damaged=False
) -> None:
    """Writes a version atomically."""
    content = bytearray(file.read_bytes())
    if damaged:
        content[len(content) // 2 :] = b""
    place = folder / str(number)
    place.mkdir(parents=True)
    (place / "new").write_bytes(content)
    os.replace(place / "new", place / FILE)


def count(service: Service, result: str) -> float:
    text = service.metrics.text().decode()
    found = re.search(
        rf'^sparsejax_reloads_total{{result="{result}"}} (.*)', text, re.MULTILINE
    )
    return float(found[1]) if found else 0


@pytest.mark.parametrize("swaps", [6, 100])
def test_swaps_under_load(tmp_path, files, service, swaps):
    """A damaged file comes each third, or each tenth time."""
    put(tmp_path, 1, files[1])
    versions = Versions(service, tmp_path)
    versions.first()
    wrong: list[object] = []
    answers: dict[str, int] = {}
    ended = threading.Event()

    def ask(client: Client) -> None:
        while not ended.is_set():
            status, found = client.infer(tensor("items", "BYTES", ["same"]))
            if status != 200:
                wrong.append(found)
                return
            first, second = sorted(found["items"]["data"])
            parity = {"even": 0, "odd": 1}[first.split()[0]]
            if [first, second] != [["even a", "even b"], ["odd a", "odd b"]][parity]:
                wrong.append(found)
            answers[first] = answers.get(first, 0) + 1

    each, before = 3 if swaps < 10 else 10, 0
    with listening(service, beside=lambda: versions.watch(0.01)) as port:
        threads = [threading.Thread(target=ask, args=(Client(port),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for number in range(2, swaps + 2):
            damaged = number % each == 0
            if number == swaps // 2 + 2:  # by now all is there that is kept
                before = resident()
            bad, had = count(service, "failed"), dict(answers)
            put(tmp_path, number, files[number % 2], damaged=damaged)
            if damaged:
                until(lambda bad=bad: count(service, "failed") == bad + 1)
            else:
                until(
                    lambda number=number: (
                        service.version("films", None).name == str(number)
                    )
                )
                first = ["even a", "odd a"][number % 2]
                until(
                    lambda first=first, had=had: (
                        wrong or answers.get(first, 0) > had.get(first, 0)
                    )
                )
        ended.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert resident() < before + 2**24  # after half of the swaps
    assert sum(isinstance(each, Engine) for each in gc.get_objects()) <= 4
    name = 'sparsejax_model_version{model="films",version='
    assert service.metrics.text().decode().count(name) == 1


def test_a_swap_while_rows_are_made(tmp_path, files, service, monkeypatch):
    """Rows of many names are made in another thread; another version may come meanwhile."""
    monkeypatch.setattr(serving_service, "_MANY", 0)
    service.load(files[1])
    begun, swapped = threading.Event(), threading.Event()
    form = service.version("films", None).form
    made = form.question

    def slow(*given):
        begun.set()
        assert swapped.wait(60)
        return made(*given)

    monkeypatch.setattr(form, "question", slow)

    async def swap() -> None:
        await asyncio.to_thread(begun.wait)
        newer = await asyncio.to_thread(service.made, files[0], "2")
        for older in service.swap(newer):
            older.close()
        swapped.set()

    with listening(service, beside=swap) as port:
        found = Client(port).infer(tensor("items", "BYTES", ["same"]))
    assert found[0] == 200
    assert sorted(found[1]["items"]["data"]) == ["even a", "even b"]


def test_the_first_version_is_the_newest_that_is_whole(tmp_path, files, service):
    put(tmp_path, 2, files[0])
    put(tmp_path, 10, files[0], damaged=True)
    put(tmp_path, 9, files[1])
    for name in ("010", "x", "-1", "11"):  # none of them is a version
        (tmp_path / name).mkdir()
    assert [each.number for each in found_in(tmp_path)] == [10, 9, 2]
    Versions(service, tmp_path).first()
    assert service.version("films", None).name == "9"
    assert (count(service, "failed"), count(service, "loaded")) == (1, 1)
    assert service.version("films", "9").name == "9"


def test_no_version(tmp_path, files, service):
    with pytest.raises(ValueError, match=f"expected a version like .*/1/{FILE}$"):
        Versions(service, tmp_path).first()
    put(tmp_path, 1, files[0], damaged=True)
    with pytest.raises(ValueError, match="the log says why none could be loaded"):
        Versions(service, tmp_path).first()


def test_what_is_removed_or_replaced(tmp_path, files, service, capfd):
    put(tmp_path, 1, files[1])
    put(tmp_path, 2, files[0])
    versions = Versions(service, tmp_path)
    versions.first()
    with listening(service, beside=lambda: versions.watch(0.01)) as port:
        client = Client(port)
        shutil.rmtree(tmp_path / "2")  # the version before serves again
        until(lambda: client.get("/v2/models/films/versions/1/ready")[0] == 200)
        shutil.rmtree(tmp_path / "1")  # nothing is left: what serves goes on
        time.sleep(0.05)
        _, found = client.infer(tensor("items", "BYTES", ["same"]))
        assert sorted(found["items"]["data"]) == ["odd a", "odd b"]
        put(tmp_path, 1, files[0])  # another file under the same number
        until(lambda: count(service, "loaded") == 3)
        until(
            lambda: (
                "even a"
                in client.infer(tensor("items", "BYTES", []))[1]["items"]["data"]
                or "even b"
                in client.infer(tensor("items", "BYTES", []))[1]["items"]["data"]
            )
        )
        shutil.rmtree(tmp_path)
        time.sleep(0.05)
        assert client.infer(tensor("items", "BYTES", []))[0] == 200
        tmp_path.mkdir()
    logs.flush()
    assert '"event":"reload"' in capfd.readouterr().err


def test_a_version_that_gives_nan_does_not_serve(tmp_path, files, service, monkeypatch):
    put(tmp_path, 1, files[1])
    run = Engine.run

    def broken(self, shape, packed):
        found = run(self, shape, packed)
        found[1] = found[1] * float("nan")
        return found

    monkeypatch.setattr(Engine, "run", broken)
    with pytest.raises(ValueError, match="none could be loaded"):
        Versions(service, tmp_path).first()
    assert count(service, "failed") == 1


def test_versions_that_are_kept(tmp_path, files):
    service = Service("films", Settings(shapes=(Shape(1, 256),), keep=1))
    put(tmp_path, 1, files[1])
    versions = Versions(service, tmp_path)
    versions.first()

    def answer(client: Client, number: int) -> object:
        body = json.dumps({"inputs": [tensor("items", "BYTES", ["same"])]}).encode()
        path = f"/v2/models/films/versions/{number}/infer"
        status, _, found = client.ask("POST", path, body)
        document = json.loads(found)
        if status != 200:
            return status, document["error"]
        return document["model_version"], sorted(document["outputs"][0]["data"])

    with contextlib.closing(service), listening(service) as port:
        client = Client(port)
        for number in (2, 3):
            put(tmp_path, number, files[number % 2])
            asyncio.run(versions.look())
            _, about = client.get("/v2/models/films")
            assert about["versions"] == [str(number), str(number - 1)]
        assert answer(client, 3) == ("3", ["odd a", "odd b"])
        assert answer(client, 2) == ("2", ["even a", "even b"])
        refused = answer(client, 1)
        assert isinstance(refused, tuple) and refused[0] == 404
        assert "has '3', '2'" in refused[1]
        assert service.version("films", None).name == "3"
        shutil.rmtree(tmp_path / "3")
        put(tmp_path, 3, files[0])  # another file: only its own version is replaced
        asyncio.run(versions.look())
        assert client.get("/v2/models/films")[1]["versions"] == ["3", "2"]
        assert answer(client, 3) == ("3", ["even a", "even b"])
        shutil.rmtree(tmp_path / "3")  # version 2 is here, and is not loaded again
        asyncio.run(versions.look())
        assert client.get("/v2/models/films")[1]["versions"] == ["2"]
        assert answer(client, 2) == ("2", ["even a", "even b"])
        assert count(service, "loaded") == 4
        put(tmp_path, 3, files[1])
        asyncio.run(versions.look())
        assert client.get("/v2/models/films")[1]["versions"] == ["3", "2"]
        shutil.rmtree(tmp_path / "2")
        asyncio.run(versions.look())
        assert client.get("/v2/models/films")[1]["versions"] == ["3"]
        assert answer(client, 3) == ("3", ["odd a", "odd b"])


def test_what_cannot_be_made_leaves_no_threads(tmp_path, files, monkeypatch):
    engines = []

    class Third(Engine):
        def __init__(self, *given, **options):
            super().__init__(*given, **options)
            engines.append(self)
            if len(engines) == 3:
                raise RuntimeError("out of memory")

    monkeypatch.setattr(serving_service, "Engine", Third)
    service = Service("films", Settings(shapes=(Shape(1, 256),), similar=True))
    before = threading.active_count()
    with contextlib.closing(service), pytest.raises(RuntimeError, match="of memory"):
        service.made(files[0], "1")
    assert len(engines) == 3 and threading.active_count() == before


def test_an_error_that_passes_is_tried_again(tmp_path, files, service, monkeypatch):
    put(tmp_path, 1, files[1])
    versions = Versions(service, tmp_path)
    versions.first()
    put(tmp_path, 2, files[0])

    def full(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(service, "made", full)
        asyncio.run(versions.look())
    assert service.version("films", None).name == "1"
    asyncio.run(versions.look())
    assert service.version("films", None).name == "2"
    put(tmp_path, 3, files[1], damaged=True)
    for _ in range(2):
        asyncio.run(versions.look())
    assert (count(service, "failed"), count(service, "loaded")) == (2, 2)


def test_a_version_that_is_drained_leaves_before_the_next_one_comes(
    tmp_path, files, monkeypatch
):
    settings = Settings(shapes=(Shape(1, 256),), swap="drain")
    service, alive = Service("films", settings), []
    put(tmp_path, 1, files[1])
    versions, make = Versions(service, tmp_path), service.made
    versions.first()
    first = weakref.ref(service.version("films", None).batcher.engine)

    def made(path, name):
        alive.append(first() is not None)
        if len(alive) == 1:
            raise RuntimeError("out of memory")
        return make(path, name)

    monkeypatch.setattr(service, "made", made)
    with contextlib.closing(service), listening(service) as port:
        client = Client(port)
        put(tmp_path, 2, files[0], damaged=True)
        asyncio.run(versions.look())  # seen without the device
        assert not alive and count(service, "failed") == 1
        assert client.infer(tensor("items", "BYTES", ["same"]))[0] == 200
        put(tmp_path, 3, files[0])
        asyncio.run(versions.look())  # it finds no memory, so the first one is back
        assert alive == [False, False] and client.get("/v2/health/ready")[0] == 200
        assert client.get("/v2/models/films")[1]["versions"] == ["1"]
        asyncio.run(versions.look())
        assert client.get("/v2/models/films")[1]["versions"] == ["3"]
        assert client.infer(tensor("items", "BYTES", ["same"]))[0] == 200
    gc.unfreeze()


@contextlib.contextmanager
def administered(service, versions):
    """Runs the service's application and the operator's while the context is open; yields a client
    of each.
    """
    with socket.create_server(("127.0.0.1", 0)) as bound:
        admin = uvicorn.Server(configured(service, app.admin(service, versions)))

        async def beside():
            await admin.serve(sockets=[bound])

        with listening(service, beside=beside) as port:
            until(lambda: admin.started)
            yield Client(port), Client(bound.getsockname()[1])
            admin.should_exit = True


def test_the_repository_extension(tmp_path, files, service):
    put(tmp_path, 1, files[1])
    versions = Versions(service, tmp_path)

    def told(admin: Client, path: str, **document) -> tuple[int, Any]:
        body = json.dumps(document).encode() if document else b""
        status, _, found = admin.ask("POST", f"/v2/repository/{path}", body)
        return status, json.loads(found)

    one = {"name": "films", "version": "1", "state": "READY", "reason": ""}
    with administered(service, versions) as (client, admin):
        status, found = told(admin, "models/films/load")
        assert status == 503 and "is being loaded" in found["error"]
        versions.first()
        assert told(admin, "index") == (200, [one])
        put(tmp_path, 2, files[0])
        assert told(admin, "index", ready=True) == (200, [one])
        two = one | {"version": "2", "state": "UNAVAILABLE"}
        assert told(admin, "index") == (200, [two, one])
        assert told(admin, "models/films/load") == (200, {})
        assert client.get("/v2/models/films")[1]["versions"] == ["2"]
        assert told(admin, "models/films/unload") == (200, {})
        assert client.get("/v2/health/ready")[0] == 503
        status, found = client.infer(tensor("items", "BYTES", ["same"]))
        assert status == 503 and "not loaded" in found
        assert told(admin, "index", ready=True) == (200, [])
        put(tmp_path, 3, files[1], damaged=True)
        status, found = told(admin, "models/films/load")
        assert status == 400 and "version 3: " in found["error"]
        assert client.get("/v2/models/films")[1]["versions"] == ["2"]
        status, found = told(admin, "index")
        assert "damaged" in found[0]["reason"]
        for path, document, status, message in (
            ("models/series/load", {}, 404, "unknown model 'series'"),
            ("models/films/load", {"parameters": {}}, 422, "unknown field"),
            ("index", {"ready": 1}, 422, "ready must be true or false"),
            ("nothing", {}, 404, "unknown path"),
        ):
            found = told(admin, path, **document)
            assert found[0] == status and message in found[1]["error"]
        for body, status in ((b"{", 400), (b"[]", 422)):
            assert admin.ask("POST", "/v2/repository/index", body)[0] == status
        unload = "/v2/repository/models/films/unload"
        page = {"origin": "http://example.org"}
        status, _, found = admin.ask("POST", unload, b"", page)
        assert status == 403 and "a web page must not" in json.loads(found)["error"]
        assert client.get("/v2/health/ready")[0] == 200
        shutil.rmtree(tmp_path)  # an error that nobody foresaw is JSON, too
        status, found = told(admin, "index")
        assert status == 500 and "its log says why" in found["error"]
        # Nobody else is told so.
        assert client.ask("POST", "/v2/repository/models/films/unload")[0] == 404


def test_what_is_unloaded_stays_so(tmp_path, files, service):
    put(tmp_path, 1, files[1])
    versions = Versions(service, tmp_path)
    versions.first()
    asyncio.run(versions.unload())
    put(tmp_path, 2, files[0])
    asyncio.run(versions.look())
    assert not service.is_ready and count(service, "loaded") == 1
    asyncio.run(versions.load())
    assert service.version("films", None).name == "2"


def test_an_error_that_lasts_is_tried_less_and_less_often(
    tmp_path, files, service, monkeypatch
):
    put(tmp_path, 1, files[1])
    versions = Versions(service, tmp_path)
    versions.first()
    put(tmp_path, 2, files[0])
    looks, tries = 0, list[int]()

    def unreadable(path, name):
        tries.append(looks)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(service, "made", unreadable)
    while looks < 20:
        asyncio.run(versions.look())
        looks += 1
    assert tries == [0, 1, 3, 7, 15]


def test_a_pipe_or_a_device_is_passed_over(tmp_path, files, service, capfd):
    put(tmp_path, 1, files[1])
    versions = Versions(service, tmp_path)
    versions.first()
    for number in (2, 3):
        (tmp_path / str(number)).mkdir()
    os.mkfifo(tmp_path / "2" / FILE)
    (tmp_path / "3" / FILE).symlink_to("/dev/zero")
    asyncio.run(versions.look())
    logs.flush()
    assert capfd.readouterr().err.count("is not a regular file") == 2
    put(tmp_path, 4, files[0])
    asyncio.run(versions.look())
    assert service.version("films", None).name == "4"


def test_each_change_of_what_serves_is_a_line(tmp_path, files, capfd):
    service = Service("films", Settings(shapes=(Shape(1, 256),), keep=1))
    put(tmp_path, 1, files[1])
    put(tmp_path, 2, files[0])
    with contextlib.closing(service):
        versions = Versions(service, tmp_path)

        def told() -> list[tuple]:
            asyncio.run(versions.look())
            logs.flush()
            lines = map(json.loads, capfd.readouterr().err.splitlines())
            kinds = "event", "version", "before", "result", "serves"
            return [tuple(line[k] for k in kinds if k in line) for line in lines]

        versions.first()
        assert told() == [("reload", "2", "loaded")]
        shutil.rmtree(tmp_path / "2")  # back to the version before
        back = [("reload", "1", "loaded"), ("swap", "1", "2"), ("removed", "2")]
        assert told() == back
        put(tmp_path, 3, files[0])
        assert told() == [("reload", "3", "loaded"), ("swap", "3", "1")]
        shutil.rmtree(tmp_path / "3")  # the version before is kept: it is not loaded
        assert told() == [("swap", "1", "3"), ("removed", "3")]
        shutil.rmtree(tmp_path / "1")
        assert told() == [("removed", "1", True)]
        assert told() == []
