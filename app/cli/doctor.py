"""`kvferry doctor`: whether this machine and environment are fit for kvferry."""

from __future__ import annotations

from dataclasses import asdict

from rich.text import Text

from kvferry.app.cli.console import ExitCode, note, out, print_json
from kvferry.app.cli.remote import JsonOption

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor(as_json: JsonOption = False) -> int:
    """Check settings, memory, disk, port, driver, clock and vLLM here. Changes nothing; exit code 1 with an error."""
    # Imported late: these take long, and the other commands do not need them.
    from kvferry.app.serve.doctor import State, examine

    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            state = Text(f"{finding.state:<8}", style=_STYLES[finding.state])
            out.print(Text.assemble(state, f"{finding.check}: {finding.text}"), soft_wrap=True)
    states = [finding.state for finding in findings]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        note(f"errors: {states.count(State.ERROR)}, warnings: {states.count(State.WARNING)}")
    return ExitCode.REFUSED if State.ERROR in states else ExitCode.OK
