"""The page for a person at `/`: health, versions, and a form that asks.

It asks by the protocol alone. What comes from the service is shown as text, never as HTML.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
from collections.abc import Sequence

from starlette.responses import Response


def page(models: Sequence[str]) -> Response:
    """The page.

    Args:
      models: their names.
    """
    folder = importlib.resources.files(__package__)
    script = (folder / "page.js").read_text()
    text = (folder / "page.html").read_text()
    options = "".join(f"<option>{html.escape(name)}</option>" for name in models)
    # The script last, so that a name cannot stand for it.
    text = text.replace("@MODELS@", options.replace("@", "&#64;"))
    text = text.replace("@SCRIPT@", script)
    style = text.partition("<style>")[2].partition("</style>")[0]
    # Only this script and this style count, and only this service is asked.
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }
    return Response(text, 200, headers, "text/html; charset=utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
