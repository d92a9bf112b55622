"""`kvferry apply`: rules, limits of tenants and tiers as a file says, shown as a difference before they are changed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from kvferry.app.cli.console import ExitCode, Failed, as_written, note, out, print_json
from kvferry.app.cli.remote import JsonOption, Service, connected, path_to

SECTIONS = ("rules", "tenants", "tiers")
"""Tables of the file, by the resources of the API that they describe, in the order in which they are applied."""
_KINDS = {"rules": "rule", "tenants": "tenant", "tiers": "tier"}

Items = dict[str, dict[str, Any]]
"""Resources of one section by name, in the form in which they are compared."""


class Action(StrEnum):
    """What happens to a resource."""

    ADD = "add"
    CHANGE = "change"
    DELETE = "delete"


_SIGNS = {Action.ADD: ("+", "green"), Action.CHANGE: ("~", "yellow"), Action.DELETE: ("-", "red")}


@dataclass(frozen=True, slots=True)
class Difference:
    """A resource that differs between file and service. `before` and `after` are None where there is none."""

    action: Action
    section: str
    name: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None

    def __str__(self) -> str:
        before, after = self.before or {}, self.after or {}
        if self.action is Action.CHANGE:
            names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
            fields = (f"{it} {as_written(it, before.get(it))} -> {as_written(it, after.get(it))}" for it in names)
        else:
            fields = (f"{key}={as_written(key, it)}" for key, it in (after or before).items() if it not in (None, {}))
        return f"{_KINDS[self.section]} {self.name}: {'; '.join(fields) or 'no fields'}"


@connected
def apply(
    service: Service,
    file: Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="TOML with rules, tenants and tiers.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Change nothing; exit code 1 if something differs.")
    ] = False,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            metavar="",
            help="Delete rules, limits and tiers that are not in the file; no tiers of the settings.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Make rules, limits of tenants and tiers those of a file, and show the difference first.

    Applying it again changes nothing. A tier whose definition differs is detached and attached again.
    """
    from kvferry.app.client import ClientError

    wanted, bodies = _read(file)
    differences = list(_differences(service, wanted, prune))
    for difference in [] if as_json else differences:
        sign, style = _SIGNS[difference.action]
        out.print(Text.assemble((f"{sign} ", style), str(difference)), soft_wrap=True)
    for number, difference in enumerate([] if dry_run else differences):
        try:
            _change(service, difference, bodies)
        except ClientError:
            note(f"{number} of {len(differences)} changes were applied; refused: {difference}")
            raise
    if as_json:
        print_json({"applied": not dry_run, "differences": [asdict(one) for one in differences]})
    elif not differences:
        note("nothing differs")
    elif not dry_run:
        note(f"changes applied: {len(differences)}")
    return ExitCode.REFUSED if dry_run and differences else ExitCode.OK


# --- the file -----------------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[dict[str, Items], dict[str, Items]]:
    """Return the resources of a file: as the service shows them, and as they are sent. Raises `Failed`."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Failed(f"{path}: cannot be read: {error.strerror}", ExitCode.USAGE) from error
    except ValueError as error:
        raise Failed(f"{path}: is not TOML: {error}", ExitCode.USAGE) from error
    problems = [
        f"{name}: there is no such table; a file has {', '.join(SECTIONS)}" for name in given if name not in SECTIONS
    ]
    wanted: dict[str, Items] = {}
    bodies: dict[str, Items] = {}
    for section, parse in zip(SECTIONS, (_rule, _limit, _tier), strict=True):
        wanted[section], bodies[section] = {}, {}
        items = given.get(section, {})
        if not isinstance(items, dict):
            problems.append(f"{section}: must be a table of tables, such as [{section}.NAME]")
            continue
        for name, fields in items.items():
            try:
                if not isinstance(fields, dict):
                    raise ValueError("must be a table")
                wanted[section][name], bodies[section][name] = parse(name, fields)
            except ValueError as error:
                problems.append(f"{section}.{name}: {error}")
    if problems:
        raise Failed("\n".join(f"{path}: {problem}" for problem in problems), ExitCode.USAGE)
    return wanted, bodies


def _rule(name: str, fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    from pydantic import ValidationError

    from kvferry.app.common.call_errors import error_text
    from kvferry.app.operations.policy_json import NamedRuleBody, rule_to_json

    try:
        rule = rule_to_json(NamedRuleBody.model_validate({"name": name, **fields}).to_core(name))
    except ValidationError as error:
        raise ValueError(error_text(error, "rule")) from None
    return _compared_rule(rule), fields


def _compared_rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    match = {name: value for name, value in rule["match"].items() if value is not None}
    return {"order": rule["order"], "match": match, "policy": dict(rule["policy"])}


def _limit(name: str, fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    from kvferry.app.settings.types import parse_limit
    from kvferry.core.keys import is_tenant_digest

    if not is_tenant_digest(name):
        raise ValueError("must be named by the digest of a tenant, 16 hex digits as in `kvferry tenants list`")
    if fields.keys() != {"max_pool_bytes"}:
        raise ValueError("has the field max_pool_bytes, and no other")
    try:
        body = {"max_pool_bytes": parse_limit(fields["max_pool_bytes"])}
    except ValueError as error:
        raise ValueError(f"max_pool_bytes={fields['max_pool_bytes']}: {error}") from None
    return body, body


def _tier(name: str, fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    from kvferry.app.settings.tiers import read_tiers

    if fields.get("name", name) != name:
        raise ValueError("name must be that of the table, or omitted")
    (entry,) = read_tiers([{**fields, "name": name}])
    return entry.shown(), fields


# --- the service --------------------------------------------------------------------------------------------------


def _differences(service: Service, wanted: Mapping[str, Items], prune: bool) -> Iterator[Difference]:
    """Yield what differs, in the order in which it is applied."""
    for section in SECTIONS:
        present, kept = _present(service, section)
        for name, after in wanted[section].items():
            before = present.get(name)
            if before is None:
                yield Difference(Action.ADD, section, name, None, after)
            elif before != after:
                yield Difference(Action.CHANGE, section, name, before, after)
        if prune:
            for name, before in present.items():
                if name not in wanted[section] and name not in kept:
                    yield Difference(Action.DELETE, section, name, before, None)


def _present(service: Service, section: str) -> tuple[Items, set[str]]:
    """Return what the service has, and names that are never deleted: tiers of the settings return at each start."""
    items = list(_pages(service, section))
    if section == "rules":
        return {one["name"]: _compared_rule(one) for one in items}, set()
    if section == "tenants":
        own = (one for one in items if one["max_pool_bytes"]["source"] == "tenant")
        return {one["tenant"]: {"max_pool_bytes": one["max_pool_bytes"]["value"]} for one in own}, set()
    return (
        {one["name"]: dict(one["definition"]) for one in items},
        {one["name"] for one in items if one["source"] == "settings"},
    )


def _pages(service: Service, path: str) -> Iterator[Mapping[str, Any]]:
    cursor = None
    while True:
        page = service.get(path, limit=1000, cursor=cursor)
        yield from page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return


def _change(service: Service, difference: Difference, bodies: Mapping[str, Items]) -> None:
    section, path = difference.section, path_to(difference.section, difference.name)
    if difference.action is Action.DELETE or (difference.action is Action.CHANGE and section == "tiers"):
        service.send("DELETE", path)
    if difference.action is not Action.DELETE:
        service.send("PUT", path, bodies[section][difference.name])
