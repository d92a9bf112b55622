"""Answers are the same whatever kvferry does with the blocks behind them, and it says truly where they came from."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.harness.effort import LONG
from tests.harness.identities import check_identities
from tests.harness.service_process import Served, serving
from tests.harness.waiting import DEADLINE_S

BLOCK = 16
OUTPUT = 12


def prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts of up to some 30 blocks that share prefixes in families."""
    rng = random.Random(seed)
    families = [[rng.randint(3, 249) for _ in range(BLOCK * 20)] for _ in range(4)]
    made = []
    for _ in range(count):
        shared = rng.choice(families)[: BLOCK * rng.randint(2, 20) + rng.choice((0, 0, 5))]
        made.append(shared + [rng.randint(3, 249) for _ in range(rng.randint(1, BLOCK * 8))])
    return made


def ask_all(served: Served, asked: list[list[int]], **body: object) -> list[list[int]]:
    with ThreadPoolExecutor(10) as threads:
        return list(
            threads.map(lambda prompt: served.tokens(prompt, max_tokens=OUTPUT, ignore_eos=True, **body), asked)
        )


def turn_over(served: Served, seed: int = 0) -> None:
    """Fill the device cache with something else."""
    rng = random.Random(f"turn over {seed}")
    for _ in range(4):
        served.complete(
            [rng.randint(3, 249) for _ in range(BLOCK * 30)], max_tokens=1, kv_transfer_params={"store": False}
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = {"dtype": "float64", "device_blocks": 90, "pool_bytes": "64MiB", "load_decision": "always"}
    with serving(tmp_path_factory.mktemp("served"), **settings) as running:
        yield running
        assert running.stop() == 0
        assert "ERROR" not in running.log()
        assert "Traceback" not in running.log()


@pytest.fixture(scope="module")
def truth(served: Served) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and their answers without any offload, one after another, in a pool nothing was stored into."""
    asked = prompts(7, 12)
    before = served.stats()["store"]["stored"]
    answers = [
        served.tokens(prompt, max_tokens=OUTPUT, ignore_eos=True, kv_transfer_params={"store": False, "load": False})
        for prompt in asked
    ]
    assert served.settle()["store"]["stored"] == before
    assert len({tuple(answer) for answer in answers}) > 10, "answers hardly differ, so they prove nothing"
    return asked, answers


def test_second_request_is_served_from_the_host_and_counted(served: Served) -> None:
    prompt = [(i * 37) % 240 + 3 for i in range(BLOCK * 25 + 3)]
    first = served.complete(prompt, max_tokens=OUTPUT)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    served.settle()
    before = served.stats()
    turn_over(served)
    second = served.complete(prompt, "second-time", max_tokens=OUTPUT)
    assert second["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == BLOCK * 25
    after = served.settle()
    assert after["load"]["blocks"] - before["load"]["blocks"] == 25
    about = served.get("/admin/v1/requests/second-time")
    assert about["prompt_tokens"] == {
        "total": BLOCK * 25 + 3, "device_hit": 0, "host_hit": BLOCK * 25, "tier_hit": {}, "recomputed": 3,
    }  # fmt: skip
    third = served.complete(prompt, "third-time", max_tokens=OUTPUT)
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] == BLOCK * 25
    assert served.get("/admin/v1/requests/third-time")["prompt_tokens"]["device_hit"] == BLOCK * 25


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({}, id="on"),
        pytest.param({"load": False}, id="no-load", marks=pytest.mark.long),
        pytest.param({"store": False}, id="no-store", marks=pytest.mark.long),
        pytest.param({"offload_prompt_only": False}, id="decode-too"),
        pytest.param({"max_offload_tokens": 100}, id="capped"),
    ],
)
def test_answers_are_equal_under_every_policy(served: Served, truth, params: dict[str, object]) -> None:
    asked, answers = truth
    for repetition in range(2):
        turn_over(served, repetition)
        assert ask_all(served, asked, kv_transfer_params=params) == answers
    check_identities(served.settle())


@pytest.mark.sampled
def test_answers_are_equal_while_resets_come_in_mid_flight(served: Served, truth) -> None:
    asked, answers = truth
    done = threading.Event()
    epochs: list[int] = []

    def reset_again_and_again() -> None:
        with httpx.Client(base_url=served.url, timeout=DEADLINE_S, verify=False) as http:
            while not done.is_set():
                body = {"match": {"request": "*a*"}} if len(epochs) % 3 == 2 else {}
                answer = http.post("/admin/v1/reset", json={"reason": "test", "drain_timeout_s": 60, **body})
                assert answer.status_code == 200, answer.text
                epochs.append(answer.json()["epoch"])
                check_identities(http.get("/admin/v1/stats").json())
                done.wait(0.05)

    resetter = ThreadPoolExecutor(1)
    resets = resetter.submit(reset_again_and_again)
    try:
        for repetition in range(3 if LONG else 2):
            turn_over(served, repetition)
            assert ask_all(served, asked) == answers
    finally:
        done.set()
        resets.result(DEADLINE_S)
    assert len(epochs) > 3
    # A reset by match begins no epoch.
    whole = [epoch for number, epoch in enumerate(epochs) if number % 3 != 2]
    assert whole == sorted(set(whole))
    assert epochs == sorted(epochs)
