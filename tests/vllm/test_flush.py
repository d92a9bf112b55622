"""A flush inside vLLM, while the engine sleeps: the next engine with that tier answers from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.harness.waiting import DEADLINE_S, wait_until
from tests.vllm.engines import InProcess, in_process, transfer_config
from tests.vllm.test_in_process import PROMPTS, assert_nothing_left, full_blocks
from tests.vllm.workload import Answer, assert_same

FEW = 24


def flush(engine: InProcess) -> Any:
    """Flush the tier, and return the flush once it has ended, without a step of the engine."""
    with httpx.Client(
        base_url=f"{engine.connector._the_core().admin_url}/admin/v1/tiers/", timeout=DEADLINE_S
    ) as admin:
        begun = admin.post("disk/flush", json={})
        assert begun.status_code == 202, begun.text
        wait_until(lambda: admin.get("disk").json()["flush"]["state"] != "running", "the end of the flush")
        return admin.get("disk").json()["flush"]


def test_engine_with_a_flushed_tier_answers_from_it(llama: Path, tmp_path: Path, truth: list[Answer]) -> None:
    # Given to the tier before an eviction only, so that the flush is what writes.
    tier = {"type": "fs", "name": "disk", "path": str(tmp_path / "tier"), "max_bytes": "1GiB", "when": "evict"}
    given = transfer_config(tiers=[tier], load_decision="always")
    with in_process(llama, given) as engine:
        assert_same(engine.generate(PROMPTS[:FEW]), truth[:FEW])
        engine.settle()
        flushed = flush(engine)
        assert (flushed["state"], flushed["stored_blocks"]) == ("done", full_blocks(PROMPTS[:FEW]))
        assert_nothing_left(engine)
    with in_process(llama, given) as engine:
        assert_same(engine.generate(PROMPTS[:FEW]), truth[:FEW])
        after = engine.settle()
        assert sum(after.prompt_tokens.tier_hit.values()) > 0
        assert after.load.failed == after.load.corrupt == 0
        assert_nothing_left(engine)
