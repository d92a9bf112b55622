"""Whom stored blocks came from, and which of them are meant where an operator names them by that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Origin:
    """Whom a stored block came from: one object a request, shared by all its blocks. `tenant` is a digest.

    A block that an earlier process left may be nobody's: then `request_id` is empty.
    """

    request_id: str
    tenant: str | None = None
    lora: str | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OriginMatch:
    """Globs that must all match; one that is None is not asked. A request matches by its id or by any alias.

    A block whose origin is not known any more may be meant, so it is.
    """

    request: str | None = None
    tenant: str | None = None
    lora: str | None = None

    def matches(self, origin: Origin) -> bool:
        """Whether blocks of this origin are meant."""
        return not origin.request_id or (
            _any_matches(self.request, (origin.request_id, *origin.aliases))
            and _any_matches(self.tenant, (origin.tenant or "",))
            and _any_matches(self.lora, (origin.lora or "",))
        )


def _any_matches(glob: str | None, names: Sequence[str]) -> bool:
    return glob is None or any(fnmatchcase(name, glob) for name in names)
