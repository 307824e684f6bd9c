"""The HTML page at `/`: health, versions, and a form for predictions.

The page only uses the protocol. Text from the service is shown as text, never as HTML.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
from collections.abc import Mapping, Sequence

from starlette.responses import Response

# A browser loads the whole page, so millions of titles are refused.
_MOST_BYTES = 2**23


def page(models: Sequence[str], titles: Mapping[str, str] | None = None) -> Response:
    """The response with the HTML page.

    Args:
      models: names of the models.
      titles: text to show next to the names of items.

    Raises:
      ValueError: the titles take more than 8 MiB.
    """
    # In JSON that is part of HTML, the character `<` could close the element.
    data = json.dumps(dict(titles or {}), ensure_ascii=False).replace("<", "\\u003c")
    if len(data.encode()) > _MOST_BYTES:
        raise ValueError(
            f"titles=... take {len(data.encode()):,} bytes, and the page carries at most "
            f"{_MOST_BYTES:,}: name a file with fewer items"
        )
    folder = importlib.resources.files(__package__)
    script = (folder / "page.js").read_text()
    text = (folder / "page.html").read_text()
    options = "".join(f"<option>{html.escape(name)}</option>" for name in models)
    # A model's name may look like a mark such as @SCRIPT@. Its "@" is escaped, so that it is not
    # replaced below.
    text = text.replace("@MODELS@", options.replace("@", "&#64;"))
    text = text.replace("@SCRIPT@", script)
    text = text.replace("@TITLES@", data)
    style = text.partition("<style>")[2].partition("</style>")[0]
    # The browser may run only this script and this style, and call only this service.
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
