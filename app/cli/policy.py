"""`kvferry policy`: the default request policy, and overrides for single requests."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from kvferry.app.cli.console import note, out, print_answer, words
from kvferry.app.cli.remote import JsonOption, TtlOption, UrlOption, connect, path_to
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


@app.command("show")
def show(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show the runtime defaults and their sources."""
    with connect(url) as client:
        print_answer(client.get("policy"), as_json, _print_policy)


@app.command("set")
def change(fields: Fields, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Change runtime defaults until the next start; null restores the setting."""
    patch = parse_policy(fields)
    with connect(url) as client:
        print_answer(client.send("PATCH", "policy", patch), as_json, _print_policy)
    if not as_json:
        note_way_back("policy", patch)


@request_app.command("show")
def show_request(request_id: RequestId, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show the override of one request."""
    with connect(url) as client:
        print_answer(client.get(path_to("requests", request_id, "policy")), as_json, _print_policy)


@request_app.command("set")
def change_request(
    request_id: RequestId,
    fields: Fields,
    ttl_s: TtlOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Override fields for one request; replaces an earlier override."""
    patch = parse_policy(fields) | ({} if ttl_s is None else {"ttl_s": ttl_s})
    with connect(url) as client:
        print_answer(client.send("PUT", path_to("requests", request_id, "policy"), patch), as_json, _print_policy)


@request_app.command("clear")
def clear_request(request_id: RequestId, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Remove a request's override."""
    with connect(url) as client:
        client.send("DELETE", path_to("requests", request_id, "policy"))
    print_answer(
        {"request": request_id, "cleared": True},
        as_json,
        lambda done: out.print(f"override removed: {done['request']}"),
    )


def note_way_back(group: str, patch: Mapping[str, Any]) -> None:
    """Note how long changes hold that a command of the group has made, and how to take them back."""
    changed = " ".join(f"{name}=null" for name, value in patch.items() if value is not None)
    if changed:
        note(f"holds until the next start, or until: kvferry {group} set {changed}")


def parse_policy(fields: Sequence[str]) -> dict[str, Any]:
    """Parse the fields of a policy as `parse_fields` does, and refuse unknown ones with a suggestion."""
    from kvferry.core.policy import POLICY_FIELDS

    patch = parse_fields(fields)
    for name in patch:
        if name not in POLICY_FIELDS:
            near = difflib.get_close_matches(name, POLICY_FIELDS, n=1)
            advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(POLICY_FIELDS)}"
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
        patch[name] = _value(name, text)
    return patch


def _value(name: str, text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError:
        return [item.strip() for item in text.split(",")] if name == "tiers" else text


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _print_policy(answer: Mapping[str, Any]) -> None:
    items = [
        {"field": name, **item, **({"value": "all"} if name == "tiers" and item["value"] is None else {})}
        for name, item in answer.items()
        if isinstance(item, Mapping) and "value" in item
    ]
    show_items(items, "field", "value", "source")
    override = answer.get("override")
    if isinstance(override, Mapping):
        note(f"override of {words(answer.get('id'))} expires at {words(override.get('expires_at'))}")
