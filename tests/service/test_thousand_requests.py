"""A thousand requests over a small pool, while operators reset and switch, and clients go away: no answer is wrong."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.harness.identities import check_identities
from tests.harness.service_process import Served, serving
from tests.harness.waiting import DEADLINE_S

BLOCK = 16
OUTPUT = 6
NUM_REQUESTS = 1000
SLOT_BYTES, POOL_SLOTS = 65536, 128
ACTIONS = ["reset", "reset one", "mode", "eviction", "size", "prompt only", "override", "rule", "look", "look"]
SETTINGS = {"dtype": "float64", "max_running": 12, "load_decision": "always"}


def make_prompts(count: int) -> list[list[int]]:
    """Prompts of up to sixteen blocks that share their beginnings in families, some with a part of a block."""
    rng = random.Random(31)
    families = [[rng.randint(3, 249) for _ in range(BLOCK * 12)] for _ in range(6)]
    return [
        rng.choice(families)[: rng.randint(BLOCK, BLOCK * 12)]
        + [rng.randint(3, 249) for _ in range(rng.randint(1, 60))]
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[int], list[int]]]:
    """Prompts and their answers from a service that stores and loads nothing."""
    settings = SETTINGS | {"device_blocks": 400, "pool_bytes": "1MiB"}
    with serving(tmp_path_factory.mktemp("truth"), **settings) as served:
        served.http.patch("/admin/v1/policy", json={"store": False, "load": False}).raise_for_status()
        prompts = make_prompts(120)
        answers = [served.tokens(prompt, max_tokens=OUTPUT, ignore_eos=True) for prompt in prompts]
        assert served.settle()["store"]["stored"] == 0
    assert len({tuple(answer) for answer in answers}) > 100, "answers hardly differ, so they prove nothing"
    return list(zip(prompts, answers, strict=True))


class Operators:
    """Resets, mode switches, other sizes, policy changes and overrides, one after another: one for every five requests,
    however quick the machine is.
    """

    def __init__(self, served: Served, seed: int) -> None:
        self._due = threading.Semaphore(0)
        self._is_closed = False
        self.calls: Counter[str] = Counter()
        self._url = served.url
        self._rng = random.Random(seed)
        self._thread = ThreadPoolExecutor(1)
        self._work = self._thread.submit(self._run)

    def close(self) -> None:
        self._is_closed = True
        self._due.release()
        self._work.result(DEADLINE_S)
        self._thread.shutdown()

    def note_request(self, number: int) -> None:
        """A request is about to be sent."""
        if number % 5 == 0:
            self._due.release()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=DEADLINE_S, verify=False) as http:
            while self._due.acquire() and not self._is_closed:
                what = self._rng.choice(ACTIONS)
                self.calls[what] += 1
                if what == "reset" and self.calls["reset"] % 3:
                    what = "look"
                self._call(http, what)

    def _call(self, http: httpx.Client, what: str) -> None:
        number = self._rng.randrange(NUM_REQUESTS)
        if what == "reset":
            answer = http.post("/admin/v1/reset", json={"drain_timeout_s": 60, "reason": "test"})
        elif what == "reset one":
            answer = http.post("/admin/v1/reset", json={"match": {"request": f"*{number % 10}"}, "reason": "test"})
        elif what == "mode":
            answer = http.patch("/admin/v1/config", json={"store_mode": self._rng.choice(["eager", "lazy"])})
        elif what == "eviction":
            answer = http.patch("/admin/v1/config", json={"eviction_policy": self._rng.choice(["lru", "arc"])})
        elif what == "size":
            slots = self._rng.choice([POOL_SLOTS // 2, POOL_SLOTS])
            answer = http.patch("/admin/v1/config", json={"pool_bytes": slots * SLOT_BYTES})
        elif what == "rule":
            match = self._rng.choice([{"request": f"*{number % 10}"}, {"prompt_tokens": {"min": 200}}])
            policy = self._rng.choice([{"priority": "low"}, {"load": False}, {"max_offload_tokens": 64}, {}])
            answer = http.put(f"/admin/v1/rules/rule{number % 3}", json={"match": match, "policy": policy})
        elif what == "prompt only":
            answer = http.patch("/admin/v1/policy", json={"offload_prompt_only": self._rng.random() < 0.5})
        elif what == "override":
            patch = self._rng.choice([{"store": False}, {"load": False}, {"max_offload_tokens": 40}])
            answer = http.put(f"/admin/v1/requests/r{number}/policy", json={**patch, "ttl_s": 5})
        else:
            answer = http.get("/admin/v1/stats")
            check_identities(answer.json())
        assert answer.status_code in (200, 201, 202), answer.text


def ask(served: Served, operators: Operators, number: int, prompt: list[int]) -> list[int] | None:
    """The answer to one request, or None where its client went away."""
    operators.note_request(number)
    rng = random.Random(number)
    leaves_after = rng.choice([0, 1, 2]) if rng.random() < 0.12 else None
    if leaves_after is None:
        return served.tokens(prompt, request_id=f"r{number}", max_tokens=OUTPUT, ignore_eos=True)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 30, "stream": True, "ignore_eos": True}
    with (
        httpx.Client(base_url=served.url, timeout=120, verify=False) as http,
        http.stream("POST", "/v1/completions", json=body, headers={"X-Request-ID": f"r{number}"}) as answer,
    ):
        assert answer.status_code == 200
        for count, _ in enumerate(answer.iter_lines()):
            if count >= leaves_after:
                break
    return None


@pytest.mark.long
@pytest.mark.parametrize(("blocks_per_slot", "store_mode"), [(1, "eager"), (3, "lazy")])
def test_every_answer_is_the_one_without_offload(
    tmp_path: Path, truth: list[tuple[list[int], list[int]]], blocks_per_slot: int, store_mode: str
) -> None:
    """vllm#31210, sglang#39830, TensorRT-LLM#8813: fluent wrong text, without a warning."""
    settings = SETTINGS | {
        "device_blocks": 80,
        "pool_bytes": SLOT_BYTES * POOL_SLOTS,
        "blocks_per_slot": blocks_per_slot,
        "store_mode": store_mode,
    }
    rng = random.Random(blocks_per_slot)
    asked = [rng.choice(truth) for _ in range(NUM_REQUESTS // 2)]
    with serving(tmp_path, **settings) as served:
        operators = Operators(served, blocks_per_slot)
        try:
            with ThreadPoolExecutor(12) as threads:
                got = list(threads.map(lambda i: ask(served, operators, i, asked[i][0]), range(len(asked))))
        finally:
            operators.close()
        wrong = [i for i, answer in enumerate(got) if answer is not None and answer != asked[i][1]]
        assert not wrong, f"{len(wrong)} answers differ, first that of request {wrong[0]}"
        assert got.count(None) > 20
        assert min(operators.calls.values()) > 3, operators.calls
        stats = served.settle()
        check_identities(stats)
        assert stats["load"]["blocks"] > 100, "hardly anything was loaded, so nothing was shown"
        assert stats["evictions"]["total"] > 100
        assert stats["requests"]["seen"] == stats["requests"]["finished"] == len(asked)
        assert (stats["pool"]["pinned"], stats["pool"]["loading"], stats["pool"]["storing"]) == (0, 0, 0)
        assert served.get("/readyz") == {"ready": True, "reasons": [], "degraded": []}
        assert served.stop() == 0
        assert "ERROR" not in served.log()
