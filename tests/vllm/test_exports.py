"""Export and import inside vLLM: what one engine has computed, the next one answers from its own pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.harness.waiting import wait_until
from tests.vllm.engines import InProcess, in_process, transfer_config
from tests.vllm.test_in_process import PROMPTS, assert_nothing_left, full_blocks
from tests.vllm.test_kept import recovered
from tests.vllm.workload import Answer, assert_same

FEW = 24


def copy(engine: InProcess, what: str, body: dict[str, Any]) -> Any:
    """Begin an export or import, and return it once it has ended, without a step of the engine."""
    with httpx.Client(base_url=f"{engine.connector._the_core().admin_url}/admin/v1/") as admin:
        begun = admin.post(what, json=body)
        assert begun.status_code == 202, begun.text
        path = f"tasks/{begun.json()['id']}"
        wait_until(lambda: admin.get(path).json()["status"] != "running", "the end of a task")
        return admin.get(path).json()


def test_engine_that_imported_answers_from_its_pool(llama: Path, tmp_path: Path, truth: list[Answer]) -> None:
    place = {"type": "fs", "path": "warm"}

    def given(name: str) -> dict[str, Any]:
        kept = {"pool_kind": "file", "pool_path": str(tmp_path / "pool"), "engine_name": name}
        return transfer_config(export_path=str(tmp_path / "exports"), load_decision="always", **kept)

    with in_process(llama, given("one")) as engine:
        assert_same(engine.generate(PROMPTS[:FEW]), truth[:FEW])
        engine.settle()
        exported = copy(engine, "export", {"to": place})
        assert (exported["status"], exported["copied_blocks"]) == ("done", full_blocks(PROMPTS[:FEW]))
        assert_nothing_left(engine)
    with in_process(llama, given("other")) as engine:
        imported = copy(engine, "import", {"from": place})
        assert (imported["status"], imported["copied_blocks"]) == ("done", exported["copied_blocks"])
        assert_same(engine.generate(PROMPTS[:FEW]), truth[:FEW])
        after = engine.settle()
        assert after.prompt_tokens.host_hit > 0
        assert after.store.stored == after.load.failed == after.load.corrupt == 0
        assert_nothing_left(engine)
    with in_process(llama, given("other")) as engine:
        assert recovered(engine) == imported["copied_blocks"]
