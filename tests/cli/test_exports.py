"""`kvferry export` and `kvferry import`: places, selection, what is printed, and Ctrl-C."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, command_environment
from tests.harness.commands import start_command
from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import start_service
from tests.harness.tier_slots import SlotArray
from tests.harness.waiting import DEADLINE_S, wait_until


def test_export_and_import_print_what_they_copied(ask: Run) -> None:
    exported = ask("export", "--to", "printed")
    assert exported.code == 0, exported.err
    assert exported.out == "export done: 16 of 16 blocks (64.0 KiB)\n"
    imported = ask("import", "--from", "printed")
    assert (imported.code, imported.out) == (
        0,
        "import done: 0 of 16 blocks (0 B)\n16 blocks in the pool already\n",
    )
    again = ask("export", "--to", "printed")
    assert (again.code, "there is a whole export" in again.err) == (1, True)
    shown = ask("import", "--from", '{"type": "fs", "path": "printed"}', "--max-bytes", "8KiB", "--json")
    assert (shown.code, shown.json["status"], shown.json["max_bytes"]) == (0, "done", 8192)
    nothing = ask("import", "--from", "nothing")
    assert (nothing.code, "there is no export" in nothing.err) == (1, True)


def test_export_by_tenant_and_bytes_selects_blocks(ask: Run) -> None:
    options = ("--tenant", "0123*", "--request", "r3", "--max-bytes", "12KiB")
    exported = ask("export", "--to", "some", *options, "--json").json
    assert (exported["copied_blocks"], exported["match"]["tenant"]) == (3, "0123*")
    assert ask("export", "--to", "none", "--lora", "other", "--json").json["total_blocks"] == 0


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("export", "--to", "{"), 2, "is not JSON"),
        (("export", "--to", "x", "--max-bytes", "much"), 2, "must be a size"),
        (("export",), 2, "--to"),
        (("export", "--to", "../x"), 1, "is not below"),
        (("import", "--from", "s3://key@bucket/x"), 1, "must not contain credentials"),
    ],
)
def test_bad_options_are_refused(ask: Run, words: Sequence[str], code: int, text: str) -> None:
    done = ask(*words)
    assert done.code == code, done.err
    assert text in done.err.replace("\n", " ")


def test_ctrl_c_cancels_the_export(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    may_copy, views = threading.Event(), SlotArray.views

    def held(self: SlotArray, slot: int, num_bytes: int) -> Any:
        may_copy.wait(DEADLINE_S)
        return views(self, slot, num_bytes)

    monkeypatch.setattr(SlotArray, "views", held)
    with start_service(tmp_path / "state") as service:
        service.engine.answer(LoopRequest("r", 128))
        service.settle()

        def tasks() -> Any:
            return service.shared_client.get("/admin/v1/tasks").json()["items"]

        with (tmp_path / "out").open("w") as out:
            words = ["export", "--to", "held", "--json"]
            command = start_command(words, command_environment(URL=service.url), tmp_path, out, out)
            wait_until(lambda: tasks() and tasks()[0]["total_blocks"], "the export has begun")
            command.send_signal(signal.SIGINT)
            wait_until(lambda: not service.engine.manager.counts().pinned, "its slots are free")
            may_copy.set()
            assert command.wait(DEADLINE_S) == 1
        assert tasks()[0]["status"] == "canceled"
        assert json.loads((tmp_path / "out").read_text())["status"] == "canceled"
