"""HTML pages without resources of other hosts: the dashboard at `/ui/` and the API's documentation at `/docs`.

A browser cannot send a token with a navigation. With tokens set, it receives the page with status 401; the page has no
data, asks for a token, and fetches everything else with it.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import re
from functools import cache

from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response
from starlette.types import Scope

from kvferry.app.api.errors import Problem
from kvferry.app.api.middleware import header_values

_HTML = "text/html; charset=utf-8"
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_DOCS_ASSETS = {
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "swagger-ui.css": "text/css; charset=utf-8",
}


@cache
def _load(name: str) -> tuple[bytes, str]:
    """Return a page's HTML, and a content security policy that allows exactly its own scripts and styles."""
    html = importlib.resources.files("kvferry.app.api").joinpath("ui", name).read_text("utf-8")
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for tag, text in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
        hashes[tag].append(f"'sha256-{digest}'")
    # The documentation page runs the viewer's script from a blob, since it fetches it with a token.
    blob = " blob:" if name == "docs.html" else ""
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}{blob}; "
        f"style-src {' '.join(hashes['style'])}{blob}; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html.encode("utf-8"), policy


def _page(name: str, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    html, policy = _load(name)
    return Response(html, status, {**(headers or {}), "Content-Security-Policy": policy}, _HTML)


_PAGES = {"/ui/": "index.html", "/docs": "docs.html"}
PAGE_PATHS = frozenset({"/", "/ui", *_PAGES})


def sign_in_page(scope: Scope, refusal: Problem) -> Response | None:
    """Return the 401 for a browser that navigates to a page, or None for other calls."""
    name = _PAGES.get(scope["path"])
    if scope["path"] == "/":
        name = "index.html"
    if name is None or scope["method"] != "GET" or "text/html" not in ",".join(header_values(scope, b"accept")):
        return None
    return _page(name, 401, refusal.headers)


def pages_router() -> APIRouter:
    """Return the routes `/`, `/ui/` and `/docs`, which are not part of the API's description."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    @router.get("/ui")
    async def root() -> Response:
        return RedirectResponse("/ui/", 307)

    @router.get("/ui/")
    async def ui() -> Response:
        return _page("index.html")

    @router.get("/docs")
    async def docs() -> Response:
        return _page("docs.html")

    @router.get("/docs/{name}")
    def docs_asset(name: str) -> Response:
        if name not in _DOCS_ASSETS:
            raise Problem(404, "the documentation has no such file")
        content = importlib.resources.files("fastapi_offline").joinpath("static", name).read_bytes()
        # Private, since a token may be required.
        return Response(content, headers={"Cache-Control": "private, max-age=3600"}, media_type=_DOCS_ASSETS[name])

    return router
