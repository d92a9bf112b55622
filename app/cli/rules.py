"""`kvferry rules`: named policies for matching requests."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from kvferry.app.cli.policy import parse_policy
from kvferry.app.cli.remote import Answer, Service, answers, path_to
from kvferry.app.cli.tenants import LoraGlob, RequestGlob, SaltFileOption, SessionGlob, TenantGlob, tenant_of

app = typer.Typer(
    no_args_is_help=True, help="Named policies for matching requests; only the first matching rule applies."
)

Name = Annotated[str, typer.Argument(metavar="NAME")]
Fields = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FIELD=VALUE]...",
        help="Such as store=false priority=low; none makes matching requests skip later rules.",
    ),
]
COLUMNS = ("order", "name", "match", "policy")
"""A match without a condition is that of every request."""
_SPAN = re.compile(r"(-?\d{1,16})?\.\.(-?\d{1,16})?|(-?\d{1,16})", re.ASCII)


def _span(text: str | None) -> int | dict[str, int] | None:
    """Parse `5`, `5..`, `..9` or `5..9` to the API's representation."""
    if text is None:
        return None
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r}: must be a number or a span such as 8192.. or 1..100")
    if match[3]:
        return int(match[3])
    return {name: int(end) for name, end in (("min", match[1]), ("max", match[2])) if end}


@app.command("list")
@answers(*COLUMNS, empty="no rules")
def list_rules(service: Service) -> Answer:
    """Show all rules, in the order in which they are evaluated."""
    # As many as a service can have (`MAX_RULES`).
    return {"items": service.get("rules", limit=1000)["items"]}


@app.command("show")
@answers()
def show(service: Service, name: Name) -> Answer:
    """Show one rule."""
    return service.get(path_to("rules", name))


@app.command("set")
@answers()
def change(
    service: Service,
    name: Name,
    fields: Fields = None,
    order: Annotated[int, typer.Option(metavar="N", help="Position; the lowest is evaluated first.")] = 0,
    request: RequestGlob = None,
    lora: LoraGlob = None,
    session: SessionGlob = None,
    tenant: TenantGlob = None,
    cache_salt_file: SaltFileOption = None,
    priority: Annotated[
        str | None, typer.Option(callback=_span, metavar="N|MIN..MAX", help="Only requests of this priority.")
    ] = None,
    prompt_tokens: Annotated[
        str | None, typer.Option(callback=_span, metavar="N|MIN..MAX", help="Only prompts of this length.")
    ] = None,
) -> Answer:
    """Set a rule: what it matches, and its policy fields. Replaces a rule with the same name."""
    given = {"request": request, "lora": lora, "session": session, "priority": priority, "prompt_tokens": prompt_tokens}
    given["tenant"] = tenant_of(tenant, cache_salt_file)
    match = {condition: value for condition, value in given.items() if value is not None}
    body = {"order": order, "match": match, "policy": parse_policy(fields or [])}
    return service.send("PUT", path_to("rules", name), body)


@app.command("delete")
@answers()
def delete(service: Service, name: Name) -> Answer:
    """Delete a rule."""
    service.send("DELETE", path_to("rules", name))
    return {"name": name, "deleted": True}
