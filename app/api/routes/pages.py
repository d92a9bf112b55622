"""Pages without resources of other hosts: the dashboard at `/ui/` and the API's documentation at `/docs`.

A browser cannot send a token with a navigation or with the import of a script. The dashboard's files have no data, so
they need no token; it asks for one and sends it with each call of the API. The documentation is sent with status 401 to
a browser without a token, and works likewise.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from starlette.types import Scope

from kvferry.app.api.auth import READING
from kvferry.app.api.calls import from_app, header_values
from kvferry.app.api.errors import Problem
from kvferry.app.api.openapi import Document

_HTML = "text/html; charset=utf-8"
_SCRIPT = "text/javascript; charset=utf-8"
_STYLE = "text/css; charset=utf-8"
_MEDIA_TYPES = {".css": _STYLE, ".html": _HTML, ".js": _SCRIPT, ".svg": "image/svg+xml"}
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_DOCS_ASSETS = {"swagger-ui-bundle.js": _SCRIPT, "swagger-ui.css": _STYLE}
_UI = "/ui/"
PAGE_PATHS = frozenset({"/", "/ui", _UI, "/docs"})


def _policy(script: str, style: str) -> str:
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the dashboard."""

    content: bytes
    media_type: str
    etag: str

    def response(self, known_etags: str) -> Response:
        """Return the file, or 304 for a client that has it."""
        # Revalidated on each use, so that the files of a page are of one version.
        headers = {"ETag": self.etag, "Cache-Control": "no-cache"}
        if self.etag in known_etags:
            return Response(status_code=304, headers=headers)
        headers["Content-Security-Policy"] = _policy("'self'", "'self'")
        return Response(self.content, headers=headers, media_type=self.media_type)


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry


@cache
def _ui_files() -> dict[str, _File]:
    """Return the files of the dashboard by path."""
    files = {}
    for path, entry in _walk(importlib.resources.files("kvferry.app.api").joinpath("ui"), _UI):
        media_type = _MEDIA_TYPES.get(PurePosixPath(path).suffix)
        if media_type is not None:
            content = entry.read_bytes()
            files[path] = _File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    files[_UI] = files.pop(f"{_UI}index.html")
    return files


def static_paths() -> frozenset[str]:
    """Return the paths that need no token: the dashboard's files, and the redirects to them."""
    return frozenset({"/", "/ui", *_ui_files()})


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
    return RedirectResponse(_UI, 307)


@router.get("/ui/{path:path}")
async def ui(request: Request, path: str) -> Response:
    file = _ui_files().get(_UI + path)
    if file is None:
        raise Problem(404, "the dashboard has no such file")
    return file.response(request.headers.get("if-none-match", ""))


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
