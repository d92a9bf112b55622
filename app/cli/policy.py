"""`kvferry policy`: the default request policy, and overrides for single requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from kvferry.app.cli.console import as_written, note, words
from kvferry.app.cli.remote import Answer, Service, TtlOption, answers, path_to
from kvferry.app.cli.tables import show_items

app = typer.Typer(
    no_args_is_help=True,
    help="What requests may store and load: the runtime defaults, and overrides for single requests.",
)
request_app = typer.Typer(no_args_is_help=True, help="The override of one request, before it arrives or while it runs.")
app.add_typer(request_app, name="request")

Fields = Annotated[
    list[str],
    typer.Argument(metavar="FIELD=VALUE...", help="Such as offload_prompt_only=false max_offload_tokens=unlimited."),
]
RequestId = Annotated[str, typer.Argument(metavar="ID", help="The X-Request-ID that the client sends.")]


def show_sourced(answer: Mapping[str, Any], name_of: Callable[[str], str] = str) -> None:
    """Print values with their sources as a table; `name_of` spells their names."""
    items = [
        {"name": name_of(name), "value": as_written(name, view["value"]), "from": view.get("place") or view["source"]}
        for name, view in answer.items()
        if isinstance(view, Mapping) and "value" in view
    ]
    show_items(items, "name", "value", "from")


def _print_policy(answer: Mapping[str, Any]) -> None:
    tiers = answer["tiers"]
    show_sourced(answer if tiers["value"] is not None else {**answer, "tiers": {**tiers, "value": "all"}})
    override = answer.get("override")
    if override is not None:
        note(f"override of {words(answer.get('id'))} expires at {words(override['expires_at'])}")


@app.command("show")
@answers(show=_print_policy)
def show(service: Service) -> Answer:
    """Show the runtime defaults and their sources."""
    return service.get("policy")


@app.command("set")
@answers(show=_print_policy)
def change(service: Service, fields: Fields) -> Answer:
    """Change runtime defaults until the next start; null restores the setting."""
    patch = parse_policy(fields)
    answer = service.send("PATCH", "policy", patch)
    note_way_back("policy", patch)
    return answer


@request_app.command("show")
@answers(show=_print_policy)
def show_request(service: Service, request_id: RequestId) -> Answer:
    """Show the override of one request."""
    return service.get(path_to("requests", request_id, "policy"))


@request_app.command("set")
@answers(show=_print_policy)
def change_request(service: Service, request_id: RequestId, fields: Fields, ttl_s: TtlOption = None) -> Answer:
    """Override fields for one request; replaces an earlier override."""
    patch = parse_policy(fields) | ({} if ttl_s is None else {"ttl_s": ttl_s})
    return service.send("PUT", path_to("requests", request_id, "policy"), patch)


@request_app.command("clear")
@answers()
def clear_request(service: Service, request_id: RequestId) -> Answer:
    """Remove a request's override."""
    service.send("DELETE", path_to("requests", request_id, "policy"))
    return {"request": request_id, "cleared": True}


def note_way_back(group: str, patch: Mapping[str, Any]) -> None:
    """Note how long changes hold that a command of the group has made, and how to take them back."""
    changed = " ".join(f"{name}=null" for name, value in patch.items() if value is not None)
    if changed:
        note(f"holds until the next start, or until: kvferry {group} set {changed}")


def parse_policy(fields: Sequence[str]) -> dict[str, Any]:
    """Parse the fields of a policy as `parse_fields` does, and refuse unknown ones with a suggestion."""
    from kvferry.app.settings.errors import suggestion
    from kvferry.core.policy import POLICY_FIELDS

    patch = parse_fields(fields)
    for name in patch:
        if name not in POLICY_FIELDS:
            advice = suggestion(name, POLICY_FIELDS, "there are")
            raise typer.BadParameter(f"{name} is no field of a policy; {advice}", param_hint="FIELD=VALUE")
    return patch


def parse_fields(fields: Sequence[str]) -> dict[str, Any]:
    """Parse `name=value` words as a policy patch: values as JSON where possible, `tiers` as comma-separated names."""
    patch: dict[str, Any] = {}
    for word in fields:
        name, equals, text = word.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name or not text:
            raise typer.BadParameter(f"{word!r}: must be {name or 'FIELD'}=VALUE", param_hint="FIELD=VALUE")
        if name in patch:
            raise typer.BadParameter(f"{name} is given twice", param_hint="FIELD=VALUE")
        try:
            patch[name] = json.loads(text)
        except ValueError:
            patch[name] = [item.strip() for item in text.split(",")] if name == "tiers" else text
    return patch
