"""Request ids in paths: clients choose them, so one may hold a slash, sent as %2F.

Servers decode a path before it is routed, and a decoded id could end in `/policy`. Under `/admin/v1/requests/` routes
therefore see the path as it was sent, and the id is decoded here.
"""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import unquote

from fastapi import Depends, Path
from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.app.api.problems import invalid_field

_PREFIX = "/admin/v1/requests/"
MAX_ID_CHARS = 512
# No control, format or line separator characters.
_PRINTABLE = (
    r"[^\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)


class RawIds:
    """ASGI middleware that routes calls on single requests by their undecoded path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_PREFIX):
            raw = scope.get("raw_path", b"").decode("ascii", "replace")
            if raw.startswith(_PREFIX):
                scope = {**scope, "path": raw}
        await self._app(scope, receive, send)


def _decode(
    id: Annotated[  # noqa: A002
        str,
        Path(
            description="the request's id, percent-encoded; a slash in it may stay as it is",
            # Described and not checked here: the path is still percent-encoded.
            json_schema_extra={"minLength": 1, "maxLength": MAX_ID_CHARS, "pattern": f"^{_PRINTABLE}+$"},
        ),
    ],
) -> str:
    try:
        request_id = unquote(id, errors="strict")
    except UnicodeDecodeError:
        raise invalid_field("id", "must be UTF-8, percent-encoded") from None
    if len(request_id) > MAX_ID_CHARS or re.fullmatch(f"{_PRINTABLE}+", request_id) is None:
        raise invalid_field("id", f"must be 1 to {MAX_ID_CHARS} printable characters")
    return request_id


RequestId = Annotated[str, Depends(_decode)]
