"""Entry point: all commands by name, and every failure as an exit code with a line on stderr."""

from __future__ import annotations

from copy import copy
from typing import Annotated

import typer

from kvferry import __version__
from kvferry.app.cli import (
    apply,
    audit,
    blocks,
    breaks,
    config,
    db,
    demo,
    doctor,
    events,
    evictions,
    get,
    policy,
    pool,
    pools,
    record,
    replay,
    requests,
    reset,
    rules,
    serve,
    sessions,
    stats,
    tenants,
    tiers,
    top,
    vllm_config,
    what_if,
)
from kvferry.app.cli.console import ExitCode, Failed, complain, err, note, out, print_lines

# Depending on its version Typer depends on click or brings a copy; this is the base of either's usage errors.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="kvferry",
    help="Offloads KV-cache blocks of LLM engines to host memory and tiers, with an admin API.",
    epilog="Exit codes: 0 done, 1 refused by the server, 2 bad usage or setting, 3 server not reachable.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("vllm-config")(vllm_config.vllm_config)
app.command("stats")(stats.stats)
app.command("top")(top.top)
app.command("requests")(requests.requests)
app.command("why")(requests.why)
app.add_typer(sessions.app, name="sessions")
app.command("blocks")(blocks.blocks)
app.command("pin")(blocks.pin)
app.command("unpin")(blocks.unpin)
app.command("reset")(reset.reset)
app.command("apply")(apply.apply)
app.add_typer(policy.app, name="policy")
app.add_typer(rules.app, name="rules")
app.command("evictions")(evictions.evictions)
app.command("get")(get.get)
app.command("events")(events.events)
app.command("audit")(audit.audit)
app.add_typer(config.app, name="config")
app.add_typer(db.app, name="db")
app.add_typer(pool.app, name="pool")
app.add_typer(pools.app, name="pools")
app.add_typer(tenants.app, name="tenants")
app.add_typer(tiers.app, name="tiers")
app.command("what-if")(what_if.what_if)
app.command("breaks")(breaks.breaks)
app.command("record")(record.record)
app.command("replay")(replay.replay)


def _version(asked: bool) -> None:
    if asked:
        out.print(f"kvferry {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Offload KV-cache blocks of LLM engines to host memory and tiers, with an admin API."""


def run_command(args: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        code = _with_only(args[:1])(args=args, standalone_mode=False, prog_name="kvferry")
    except _UsageError as error:
        return _explain_usage(error)
    except typer.Abort:
        return ExitCode.REFUSED
    except BrokenPipeError:
        return ExitCode.OK
    except Exception as error:  # noqa: BLE001  last resort: users get a line, never a traceback
        return _explain(error)
    return int(code or 0)


def _with_only(names: list[str]) -> typer.Typer:
    """Return the app with the named command alone, or with all: Typer reads the options of all, which takes 45 ms."""
    chosen = copy(app)
    chosen.registered_commands = [command for command in app.registered_commands if command.name in names]
    chosen.registered_groups = [group for group in app.registered_groups if group.name in names]
    return chosen if chosen.registered_commands or chosen.registered_groups else app


def _explain_usage(error: Exception) -> int:
    message = str(getattr(error, "format_message", lambda: error)())
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # has shown the help, or holds it
        print_lines(message, err)
    else:
        complain(" ".join(message.split()))
        if context is not None:
            note(f"see {context.command_path} --help")
    return ExitCode.USAGE


def _explain(error: Exception) -> int:
    from kvferry.app.client import ClientError, Unreachable
    from kvferry.app.settings import BadSettings
    from kvferry.core.errors import StartError

    if isinstance(error, Unreachable):
        complain(f"{error}; is it running? Set KVFERRY_URL or --url if it has another address")
        return ExitCode.UNREACHABLE
    if isinstance(error, (BadSettings, StartError, Failed)):
        for line in str(error).splitlines():
            complain(line)
        return error.code if isinstance(error, Failed) else ExitCode.USAGE
    complain(str(error) if isinstance(error, ClientError) else f"{type(error).__name__}: {error}")
    return ExitCode.REFUSED
