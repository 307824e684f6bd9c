"""The service's page in a browser: it runs only its own script, and names are escaped in HTML."""

import base64
import contextlib
import hashlib
import html
import json
import re

import pytest
from served import Client, listening

from sparsejax.serving.page import page
from sparsejax.serving.service import Service, Settings


def test_the_page(client):
    status, headers, body = client.ask("GET", "/")
    text = body.decode()
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    assert "<option>films</option>" in text
    policy = dict(
        part.split(" ", 1) for part in headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for name in ("script", "style"):
        (content,) = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{name}-src"] == f"'sha256-{digest}'"
    # Nothing else that a browser would run or load; titles are data.
    assert re.findall(r"<script ([^>]*)>", text) == [
        'type="application/json" id="titles"'
    ]
    assert not re.search(r"\son\w+=|src=|href=|javascript:|innerHTML|eval\(", text)
    # It asks what the protocol offers.
    paths = {*re.findall(r'"(/v2[^"]*)"', text)}
    assert paths == {"/v2/models/", "/v2/health/ready"}


def test_names_of_models_are_text():
    name = "</option></select><script>alert(1)</script>@SCRIPT@"
    text = bytes(page([name]).body).decode()
    assert "<script>alert" not in text and text.count("<script>") == 1
    (shown,) = re.findall("<option>(.*?)</option>", text)
    assert html.unescape(shown) == name


def test_titles_are_data():
    titles = {"tea": "</script><script>alert(1)</script>@SCRIPT@", "rye": "Bread"}
    text = bytes(page(["films"], titles).body).decode()
    assert text.count("<script>") == 1 and "alert(1)<" not in text
    (data,) = re.findall(r'id="titles">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data) == titles
    with pytest.raises(ValueError, match="titles=... take 9,.* at most 8,388,608"):
        page(["films"], {"tea": "x" * 9_000_000})


def test_no_page():
    service = Service("films", Settings(page=False))
    with contextlib.closing(service), listening(service) as port:
        status, found = Client(port).get("/")
    assert status == 404 and "paths of the protocol" in found["error"]
