"""Values as every database takes them: text from users may hold what SQL text cannot."""

from __future__ import annotations

from typing import overload

MAX_TEXT_CHARS = 512


@overload
def clean(text: str) -> str: ...
@overload
def clean(text: None) -> None: ...
def clean(text: str | None) -> str | None:
    """Text of bounded length without NULs and lone surrogates. Filters clean what they look for, so it is found."""
    if text is None:
        return None
    cut = text[:MAX_TEXT_CHARS]
    if cut.isascii() and "\0" not in cut:
        return cut
    return cut.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")
