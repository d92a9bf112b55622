"""Pages without resources of other hosts: the dashboard at `/ui/` and the API's documentation at `/docs`.

A browser cannot send a token with a navigation or with the import of a script. The dashboard's files have no data, so
they need no token; it asks for one and sends it with each call of the API. The documentation is sent with status 401 to
a browser without a token, and works likewise.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import mimetypes
import re
from functools import cache
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from kvferry.app.api.auth import READING
from kvferry.app.api.calls import from_app, header_values
from kvferry.app.api.errors import Problem
from kvferry.app.api.openapi import Document

_HTML = "text/html; charset=utf-8"
_SCRIPT = "text/javascript; charset=utf-8"
_STYLE = "text/css; charset=utf-8"
# Before Python 3.12, and on some systems, it is another one.
mimetypes.add_type("text/javascript", ".js")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_DOCS_ASSETS = {"swagger-ui-bundle.js": _SCRIPT, "swagger-ui.css": _STYLE}
UI = "/ui/"
PAGE_PATHS = frozenset({"/", "/ui", UI, "/docs"})


def _policy(script: str, style: str) -> str:
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class _Dashboard(StaticFiles):
    """The dashboard's files."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        # Revalidated on each use, so that the files of a page are of one version.
        response.headers["Cache-Control"] = "no-cache"
        response.headers["Content-Security-Policy"] = _policy("'self'", "'self'")
        return response


@cache
def _docs() -> tuple[bytes, str]:
    """Return the HTML of the documentation, and a content security policy that allows exactly its own scripts."""
    html = importlib.resources.files("kvferry.app.api").joinpath("docs.html").read_text("utf-8")
    # It runs the viewer's script from a blob, since it fetches it with a token.
    sources = {"script": "blob:", "style": "blob:"}
    for tag, text in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
        sources[tag] = f"'sha256-{digest}' {sources[tag]}"
    return html.encode("utf-8"), _policy(**sources)


def _docs_page(status: int = 200, headers: dict[str, str] | None = None) -> Response:
    html, policy = _docs()
    return Response(html, status, {**(headers or {}), "Content-Security-Policy": policy}, _HTML)


def sign_in_page(scope: Scope, refusal: Problem) -> Response | None:
    """Return the 401 for a browser that navigates to the documentation, or None for other calls."""
    is_navigation = scope["method"] in READING and "text/html" in ",".join(header_values(scope, b"accept"))
    return _docs_page(401, refusal.headers) if scope["path"] == "/docs" and is_navigation else None


router = APIRouter(include_in_schema=False)


@router.get("/")
@router.get("/ui")
async def root() -> Response:
    return RedirectResponse(UI, 307)


router.routes.append(Mount("/ui", _Dashboard(packages=[("kvferry.app.api", "ui")], html=True)))


@router.get("/openapi.json")
def openapi_json(document: Annotated[Document, from_app("openapi")]) -> Response:
    return Response(document.read(), media_type="application/json")


@router.get("/docs")
async def docs() -> Response:
    return _docs_page()


@router.get("/docs/{name}")
def docs_asset(name: str) -> Response:
    if name not in _DOCS_ASSETS:
        raise Problem(404, "the documentation has no such file")
    content = importlib.resources.files("fastapi_offline").joinpath("static", name).read_bytes()
    # Private, since a token may be required.
    return Response(content, headers={"Cache-Control": "private, max-age=3600"}, media_type=_DOCS_ASSETS[name])
