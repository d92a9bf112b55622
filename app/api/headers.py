"""Reading a call's headers from its ASGI scope, without an object in between: every call's are read several times."""

from __future__ import annotations

from starlette.types import Scope


def values_of(scope: Scope, name: bytes) -> list[str]:
    """All values sent under a name, which is given in lower case, as servers hand it over."""
    return [value.decode("latin-1") for sent, value in scope["headers"] if sent == name]
