"""The setting TIERS: the tiers below the pool, each entry parsed by the settings of its type.

A type of tier is an entry point in the group `kvferry.tiers`; see `TierType`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from kvferry.app.settings.errors import MASK, advice_of, is_secret_field, mask_url, show, suggestion
from kvferry.app.settings.types import NUMBER, WHOLE, AnyCase, Name, Size, json_list
from kvferry.core.policy import Level
from kvferry.core.tiers.base import HOST, CascadeWhen

GROUP = "kvferry.tiers"
BUILT_IN = (
    EntryPoint("fs", "kvferry.app.tiers.fs:FileTier", GROUP),
    EntryPoint("redis", "kvferry.app.tiers.redis:RedisTier", GROUP),
    EntryPoint("object", "kvferry.app.tiers.object:ObjectTier", GROUP),
    EntryPoint("mooncake", "kvferry.app.tiers.mooncake:MooncakeTier", GROUP),
)
"""The types in pyproject.toml, for a kvferry that runs from a folder and is not installed."""
MAX_TIERS = 16
_ADDRESSES = ("url", "endpoint")
"""Secret fields of the built-in types that operators may read: these types refuse addresses with credentials."""


def _tier_name(name: str) -> str:
    if name == HOST:
        raise ValueError(f"must not be {HOST}, the name of the pool")
    return name


class TierSettings(BaseModel):
    """Fields of every entry of TIERS. A type adds fields, each with a type of `kvferry.app.settings.types`."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

    type: Name = Field(description="type of tier")
    name: Annotated[Name, AfterValidator(_tier_name)] = Field(description="name of the tier; its type, if not given")
    max_bytes: Size = Field(description="limit of its size in bytes")
    timeout_s: Annotated[float, Field(ge=0.01, le=3600), NUMBER] = Field(
        default=10.0, description="seconds after which a job has failed"
    )
    level: Annotated[Level, AnyCase] = Field(
        default=Level.BLOCK, description="`block`: new blocks only; `request`: every block of every request"
    )

    when: Annotated[CascadeWhen, AnyCase] = Field(
        default=CascadeWhen.STORE,
        description="`store`: receives blocks when they are stored in the pool; `evict`: before the pool evicts them",
    )
    threads: Annotated[int, Field(ge=1, le=64), WHOLE] = Field(
        default=4, description="threads that read and write; one more only loads and looks up"
    )
    queue_blocks: Annotated[int, Field(ge=1, le=1_000_000), WHOLE] = Field(
        default=1024, description="blocks that may wait to be stored; further ones are dropped"
    )
    batch_bytes: Size = Field(
        default=16 << 20, description="size of each thread's buffer, for blocks that are stored or loaded together"
    )

    def shown(self) -> dict[str, Any]:
        """Return the entry as JSON, with secrets masked."""
        plain = self.model_dump(mode="json")
        addresses = _ADDRESSES if self.type in {entry_point.name for entry_point in BUILT_IN} else ()
        for name in plain:
            value = getattr(self, name)
            if isinstance(value, SecretStr):
                plain[name] = mask_url(value.get_secret_value()) if name in addresses else MASK
        return plain


class ExpiringSettings(TierSettings):
    """Fields of a tier whose store can drop blocks by age: it is bounded by `max_bytes`, by `ttl_s`, or by both."""

    max_bytes: Size | None = Field(  # type: ignore[assignment]
        default=None, description="limit of its size in bytes"
    )
    ttl_s: Annotated[int | None, Field(ge=1, le=366 * 86400), WHOLE] = Field(
        default=None, description="seconds after which a block is dropped"
    )

    @model_validator(mode="after")
    def _check_bounded(self) -> Self:
        if self.max_bytes is None and self.ttl_s is None:
            raise ValueError("max_bytes and ttl_s are both missing: without one of them nothing bounds the tier")
        return self


class ServerSettings(ExpiringSettings):
    """Fields of a tier on a server that others write to as well, so that no client can enforce `max_bytes`."""

    place: ClassVar[str] = "a server"
    """Where others write to, for messages."""
    limits: ClassVar[str] = "ttl_s"
    """What to set instead of `max_bytes`, for messages."""

    connect_timeout_s: Annotated[float, Field(ge=0.01, le=60), NUMBER] = Field(
        default=2.0, description="seconds after which a connection attempt has failed"
    )
    io_timeout_s: Annotated[float, Field(ge=0.01, le=600), NUMBER] = Field(
        default=5.0, description="seconds that the server may be silent during a call"
    )

    @model_validator(mode="after")
    def _check_bounded(self) -> Self:
        """Replaces that of the base. A subclass checks that something else bounds the tier."""
        if self.max_bytes is not None:
            raise ValueError(f"max_bytes cannot be enforced in {self.place} that others write to: set {self.limits}")
        return self


class TierType(Protocol):
    """What an entry point names: the fields of an entry of TIERS, and how the store of an entry is opened.

    Optional, as static methods: `check(settings, slot_bytes)` raises `TierRefused` for settings with which no store
    could be opened, and creates nothing; `slot_bytes` is None where the model is not known yet. `notices(settings)`
    returns texts for operators. `kvferry config check` calls both.
    """

    Settings: type[TierSettings]

    def open(self, settings: Any, context: Any) -> Any:
        """Return a `BlockStore` for a `TierContext`. Raises `TierRefused`; see `kvferry.app.tiers.block_store`."""


def installed_types() -> dict[str, EntryPoint]:
    """Return the installed types of tier by name; the built-in ones cannot be replaced."""
    return {entry_point.name: entry_point for entry_point in (*entry_points(group=GROUP), *BUILT_IN)}


def load_type(name: str) -> TierType:
    """Load a type of tier. Raises `ValueError` with the problem and what to do."""
    installed = installed_types()
    if name not in installed:
        hint = suggestion(name, sorted(installed), "installed are")
        raise ValueError(f"there is no type of tier called {show(name)}; {hint}")
    where = installed[name].value
    try:
        loaded = installed[name].load()
    except Exception as error:
        raise ValueError(
            f"the type {name} ({where}) cannot be loaded: {type(error).__name__}: {error}; repair its package"
        ) from error
    settings = getattr(loaded, "Settings", None)
    is_made_so = isinstance(settings, type) and issubclass(settings, TierSettings)
    if not is_made_so or not callable(getattr(loaded, "open", None)):
        raise ValueError(
            f"the type {name} ({where}) lacks the method open, which returns its store, or Settings made from "
            "kvferry.app.settings.tiers.TierSettings: install a version of it that has both (docs/writing-a-tier.md "
            "says how), or take it out of KVFERRY_TIERS"
        )
    kind: TierType = loaded
    return kind


def read_tiers(value: object) -> tuple[TierSettings, ...]:
    """Parse TIERS, a list of objects or JSON text of one. Raises `ValueError` with all problems."""
    rule = 'must be a JSON list of objects such as [{"type": "fs", "path": "/var/kvferry", "max_bytes": "100GiB"}]'
    items = json_list(value, rule) if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, (dict, TierSettings)) for item in items):
        raise ValueError(rule)
    if len(items) > MAX_TIERS:
        raise ValueError(f"must be at most {MAX_TIERS} tiers, and these are {len(items)}")
    problems: list[str] = []
    entries: list[TierSettings] = []
    for number, item in enumerate(items, start=1):
        try:
            entries.append(item if isinstance(item, TierSettings) else _read_entry(item))
        except ValueError as error:
            problems.append(f"tier {number}{_title(item)}: {error}")
    problems += [
        f"{count} tiers are called {name}: give each a name of its own"
        for name, count in Counter(entry.name for entry in entries).items()
        if count > 1
    ]
    if problems:
        raise ValueError("; ".join(problems))
    return tuple(entries)


def _read_entry(item: Mapping[str, Any]) -> TierSettings:
    if not isinstance(item.get("type"), str):
        raise ValueError("type is missing: it names the type of tier, such as fs")
    settings = load_type(item["type"]).Settings
    try:
        return settings.model_validate({"name": item["type"], **item})
    except ValidationError as error:
        lines = [_problem_text(settings, problem) for problem in error.errors(include_url=False, include_context=False)]
        raise ValueError("; ".join(lines)) from error


def check_without_token(entry: object, root: Path) -> None:
    """Raise `ValueError` for an entry that may be given over HTTP with an admin token only.

    Without one, files and folders are below `root`, links followed, and an endpoint gets no credentials of the
    environment.
    """
    top = Path(os.path.realpath(root))
    for name, value in vars(entry).items():
        if isinstance(value, Path) and top not in Path(os.path.realpath(value)).parents:
            raise ValueError(
                f"{name}={value} is not below {top}: without an admin token, only files and folders there may be named "
                "over HTTP; name one there, or set KVFERRY_ADMIN_TOKEN"
            )
    if getattr(entry, "endpoint", None) is not None and getattr(entry, "credentials_file", None) is None:
        raise ValueError(
            "endpoint: without an admin token, no server may be named over HTTP that would get credentials of the "
            "environment; name a credentials_file, or set KVFERRY_ADMIN_TOKEN"
        )


def _title(item: object) -> str:
    """Return an entry's name for a message, empty if it has none."""
    name = item.get("name", item.get("type")) if isinstance(item, Mapping) else None
    return f" ({show(name)})" if isinstance(name, str) else ""


def _problem_text(settings: type[BaseModel], problem: Mapping[str, Any]) -> str:
    """Return the text of one problem of an entry. The value of an unknown field may be a misspelled secret."""
    known = settings.model_fields
    if not problem["loc"]:
        return str(problem["msg"].removeprefix("Value error, "))
    field = ".".join(str(part) for part in problem["loc"])
    name = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        return f"{show(field)} is no field of it; {suggestion(field, known, 'it has')}"
    if problem["type"] == "missing":
        return f"{field} is missing; it is the {known[name].description}"
    secret = name not in known or is_secret_field(known[name])
    given = MASK if secret else show(problem["input"])
    if name in known:
        return f"{field}={given} {advice_of(known[name], problem['msg'])}"
    return f"{field}={given} {problem['msg']}"
