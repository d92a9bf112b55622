"""`kvferry export` and `kvferry import`: copies of the pool's blocks to a folder or an object store, and back."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvferry.app.cli.console import INTERRUPTS, ExitCode, count, err, note, out, print_answer, size
from kvferry.app.cli.remote import JsonOption, UrlOption, connect
from kvferry.app.cli.reset import LoraOption, RequestOption, TenantOption, match_of
from kvferry.app.cli.tenants import SaltFileOption

if TYPE_CHECKING:
    from kvferry.app.client import KVFerryClient

POLL_S = 0.5
_RUNNING = "running"
_PLACE_HELP = (
    "Folder below the service's KVFERRY_EXPORT_PATH, URL of a bucket (s3://BUCKET/PREFIX, gs://..., az://...), or JSON "
    'such as {"type": "object", "url": "s3://...", "credentials_file": "/etc/kvferry/s3"}.'
)
MaxBytes = Annotated[
    str | None, typer.Option("--max-bytes", help="Copy at most this much, such as 10GiB.", metavar="SIZE")
]


def export_blocks(
    to: Annotated[str, typer.Option("--to", metavar="PLACE", help=_PLACE_HELP)],
    tenant: TenantOption = None,
    cache_salt_file: SaltFileOption = None,
    lora: LoraOption = None,
    request: RequestOption = None,
    max_bytes: MaxBytes = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> int:
    """Copy the pool's blocks to a folder or bucket, those used last first. Ctrl-C cancels."""
    match = match_of(tenant, cache_salt_file, lora, request)
    body = {"to": _place(to, "--to"), "match": match or None, "max_bytes": _num_bytes(max_bytes)}
    return _run(url, "export", body, as_json)


def import_blocks(
    from_: Annotated[str, typer.Option("--from", metavar="PLACE", help=_PLACE_HELP)],
    tenant: TenantOption = None,
    cache_salt_file: SaltFileOption = None,
    lora: LoraOption = None,
    request: RequestOption = None,
    max_bytes: MaxBytes = None,
    evict: Annotated[
        bool,
        typer.Option("--evict", metavar="", help="Evict others if the pool is full, half of it at most."),
    ] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> int:
    """Copy an export's blocks into the pool of a running engine with the same fingerprint. Ctrl-C cancels."""
    match = match_of(tenant, cache_salt_file, lora, request)
    body = {"from": _place(from_, "--from"), "match": match or None, "max_bytes": _num_bytes(max_bytes), "evict": evict}
    return _run(url, "import", body, as_json)


def _place(text: str, option: str) -> dict[str, Any]:
    """Return a place as the API expects it."""
    if text.lstrip().startswith("{"):
        try:
            place: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise typer.BadParameter(f"is not JSON: {error}", param_hint=option) from None
        return place
    return {"type": "object", "url": text} if "://" in text else {"type": "fs", "path": text}


def _num_bytes(size: str | None) -> int | None:
    from kvferry.app.settings.types import parse_size

    try:
        return None if size is None else parse_size(size)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--max-bytes") from None


def _run(url: str | None, what: str, body: Mapping[str, Any], as_json: bool) -> int:
    """Begin a task, show its progress until it has ended, and print how it ended. A signal cancels it."""
    with connect(url) as client, _interrupts() as interrupted:
        task = _follow(client, client.send("POST", what, body), interrupted)
    print_answer(task, as_json, _print_end)
    return ExitCode.OK if task["status"] == "done" else ExitCode.REFUSED


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Yield an event that the first signal sets. The next one ends the command."""
    event = threading.Event()
    handlers = {number: signal.getsignal(number) for number in INTERRUPTS}

    def interrupt(signum: int, frame: FrameType | None) -> None:
        event.set()
        restore()

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    # Raised while the task is begun, an exception would leave it running.
    for number in INTERRUPTS:
        signal.signal(number, interrupt)
    try:
        yield event
    finally:
        restore()


def _follow(client: KVFerryClient, task: Mapping[str, Any], interrupted: threading.Event) -> Mapping[str, Any]:
    """Return a task once it has ended, and cancel it when the event is set."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    is_canceled = False
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        shown = bar.add_task(task["kind"], total=None)
        while task["status"] == _RUNNING:
            if is_canceled:
                time.sleep(POLL_S)
            elif interrupted.wait(POLL_S):
                client.send("POST", f"tasks/{task['id']}/cancel")
                is_canceled = True
            task = client.get(f"tasks/{task['id']}")
            bar.update(shown, total=task["total_bytes"], completed=task["copied_bytes"])
    return task


def _print_end(task: Mapping[str, Any]) -> None:
    of_total = f" of {count(task['total_blocks'])}" if task["total_blocks"] is not None else ""
    copied = f"{count(task['copied_blocks'])}{of_total} blocks ({size(task['copied_bytes'])})"
    out.print(f"{task['kind']} {task['status']}: {copied}")
    for name, words in (
        ("present_blocks", "in the pool already"),
        ("damaged_blocks", "damaged or missing in the export"),
        ("left_blocks", "left out"),
    ):
        if task[name]:
            out.print(f"{count(task[name])} blocks {words}")
    for text in task["notes"]:
        note(text)
