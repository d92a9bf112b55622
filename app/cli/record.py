"""`kvferry record`: write live traffic as a trace without its contents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from kvferry.app.cli.console import ExitCode, Failed, complain, count, end_on_signals, note
from kvferry.app.cli.remote import Service, connected


@connected
def record(
    service: Service,
    path: Annotated[Path, typer.Option("--out", metavar="FILE", help="The trace; an existing file is replaced.")],
    requests: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="End after N requests.", show_default="Ctrl-C")
    ] = None,
) -> int:
    """Record the requests that end as a trace in Mooncake's format, until Ctrl-C, without text, names or hashes.

    A line has the time at which the request ended, from the first one on, its lengths, and numbers for the blocks of
    its prompt, in the order of their first appearance: equal numbers mean equal prefixes. A block has as many tokens as
    a slot of the engine's pool, which each line says.
    """
    from kvferry.app.client import ClientError

    # `timeout 1h` and a lost terminal end a recording as Ctrl-C does.
    end_on_signals()
    lines = TraceLines()
    problem: str | None = None
    try:
        with closing(service.events("events", type=["prompt"])) as stream:
            # The first event says that the stream is open.
            next(stream, None)
            with path.open("w", buffering=1, encoding="utf-8") as file:
                note(f"recording to {path}; Ctrl-C ends it")
                for event in stream:
                    if event["type"] == "gap":
                        lines.add_gap(event["missed"])
                    elif event["type"] == "prompt":
                        file.write(lines.next(event) + "\n")
                        lines.num_requests += 1
                        if lines.num_requests == requests:
                            break
                else:
                    problem = "stream ended by the server"
    except KeyboardInterrupt:
        pass
    except OSError as error:
        raise Failed(f"{path}: {error.strerror or error}; its last line may be incomplete") from error
    except ClientError as error:
        if not lines.num_requests:
            raise
        problem = str(error)
    if not lines.num_requests:
        raise Failed(f"no request ended while it was recorded; {path} is empty")
    note(f"{count(lines.num_requests)} requests, {count(lines.num_blocks)} different blocks: {path}")
    if lines.num_missed:
        note(f"{count(lines.num_missed)} events were lost, so that up to as many requests are missing")
    if problem is not None:
        complain(problem)
        return ExitCode.UNREACHABLE
    return ExitCode.OK


class TraceLines:
    """Lines of a trace, made of events, with numbers for blocks instead of hashes."""

    def __init__(self) -> None:
        self.num_requests = 0
        """Lines that were written."""
        self.num_blocks = 0
        self.num_missed = 0
        self._numbers: dict[bytes, int] = {}
        self._first_s: float | None = None

    def add_gap(self, num_missed: int | None) -> None:
        """Count events that were lost, and note the first ones."""
        if not self.num_missed:
            note("events were lost: this computer or the network is too slow, or requests end too fast")
        self.num_missed += num_missed or 1

    def next(self, event: Mapping[str, Any]) -> str:
        """Return the line of a prompt."""
        time_s = datetime.fromisoformat(event["time"]).timestamp()
        if self._first_s is None:
            self._first_s = time_s
        length, block_size = event["input_length"], event["block_size"]
        ids = [self._number(bytes.fromhex(hash_)) for hash_ in event.get("hashes", ())]
        # Nothing is known to share a block that is not full.
        ids += [self._new() for _ in range(-(-length // block_size) - len(ids))]
        line = {
            "timestamp": max(round(1000 * (time_s - self._first_s)), 0),
            "input_length": length,
            "output_length": event["output_length"],
            "hash_ids": ids,
            "block_size": block_size,
        }
        return json.dumps(line)

    def _number(self, key: bytes) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._new()
        return number

    def _new(self) -> int:
        self.num_blocks += 1
        return self.num_blocks - 1
