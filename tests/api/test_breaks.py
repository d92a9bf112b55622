"""`GET /admin/v1/breaks`: what makes prompts miss, as text for the admin and in figures for readers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import ADMIN, READ, Service
from tests.harness.waiting import wait_until

PATH = "/admin/v1/breaks"
SPAN = (60, 64)
TAIL = [500 + at % 300 for at in range(400)]


def answer_with_clock(service: Service, count: int) -> list[int]:
    """Answer prompts that differ in a few tokens near their front; return the head that they share."""
    head = LoopRequest("head", SPAN[0], seed=7).tokens[: SPAN[0]]
    for number in range(count):
        clock = [1000 + number] * (SPAN[1] - SPAN[0])
        tokens = [*head, *clock, *TAIL]
        service.engine.answer(LoopRequest(f"at{number}", len(tokens), head=tokens, num_output_tokens=1))
        service.settle()
    return head


def ask(service: Service, token: str | None = None, **query: Any) -> dict[str, Any]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    answer = service.shared_client.get(PATH, params=query, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def start(service: Service, headers: dict[str, str] | None = None) -> None:
    service.context.prompts.start()
    done = service.shared_client.patch("/admin/v1/config", json={"explain_bytes": "16MiB"}, headers=headers or {})
    assert done.status_code == 200, done.text


def test_a_clock_near_the_front_is_shown_with_its_price(fresh: Service) -> None:
    start(fresh)
    head = answer_with_clock(fresh, 4)
    wait_until(lambda: bool(ask(fresh)["items"]) and ask(fresh)["items"][0]["requests"] == 3, "all are compared")
    answer = ask(fresh)
    assert set(answer) == {"since", "computed_tokens", "explained_bytes", "next_cursor", "items"}
    (one,) = answer["items"]
    assert (one["position"], one["exact"], one["estimated"], one["shared_tokens"]) == (60, True, False, 48)
    # Of the 400 equal tokens behind the span, whole blocks: from token 64 on.
    assert one["tokens"] == 3 * 400
    assert one["share"] == pytest.approx(one["tokens"] / answer["computed_tokens"])
    assert one["token_ids"] == [[1000] * 4, [1001] * 4]
    assert one["token_ids_before"] == list(head[-16:])
    assert (one["texts"], one["text_before"]) == (None, None), "this engine has no tokenizer"
    assert one["examples"] == ["at0", "at1"]
    assert "move it behind what stays" in one["advice"]
    assert 0 < answer["explained_bytes"] <= 16 << 20
    shown = fresh.shared_client.get("/admin/v1/requests/at3").json()["prefix"]
    assert (shown["outcome"], shown["position"], shown["exact"]) == ("parted", 60, True)


def test_prompts_of_two_kinds_in_turn_are_shown_as_one_break(fresh: Service) -> None:
    start(fresh)
    head = LoopRequest("head", SPAN[0], seed=7).tokens[: SPAN[0]]
    for number in range(6):
        tokens = [*head, *[1000 + number] * 4, *(TAIL if number % 2 else TAIL[::-1])]
        fresh.engine.answer(LoopRequest(f"at{number}", len(tokens), head=tokens, num_output_tokens=1))
        fresh.settle()
    wait_until(lambda: bool(ask(fresh)["items"]) and ask(fresh)["items"][0]["requests"] == 4, "all are compared")
    (one,) = ask(fresh)["items"]
    assert (one["position"], one["estimated"], one["tokens"]) == (60, False, 4 * 400)


def test_texts_need_the_admin_token_and_figures_the_read_token(guarded: Service) -> None:
    admin = {"Authorization": f"Bearer {ADMIN}"}
    start(guarded, admin)
    assert guarded.shared_client.get(PATH).status_code == 401
    answer_with_clock(guarded, 2)
    wait_until(lambda: bool(ask(guarded, ADMIN)["items"]), "it is compared")
    (shown,) = ask(guarded, ADMIN)["items"]
    (hidden,) = ask(guarded, READ)["items"]
    assert shown["token_ids"] == [[1000] * 4, [1001] * 4]
    secret = {name: shown[name] for name in ("token_ids", "token_ids_before", "texts", "text_before")}
    assert {name: hidden[name] for name in secret} == dict.fromkeys(secret)
    assert {**hidden, **secret} == shown


@pytest.mark.parametrize(
    "change",
    [
        lambda client: client.post("/admin/v1/reset", json={}),
        lambda client: client.post("/admin/v1/reset", json={"match": {"tenant": "0123456789abcdef"}}),
        lambda client: client.patch("/admin/v1/config", json={"explain_bytes": 0}),
    ],
)
def test_a_reset_or_zero_bytes_forgets_everything(fresh: Service, change: Any) -> None:
    start(fresh)
    answer_with_clock(fresh, 2)
    wait_until(lambda: bool(ask(fresh)["items"]), "it is compared")
    assert change(fresh.shared_client).status_code == 200
    wait_until(lambda: (ask(fresh)["items"], ask(fresh)["explained_bytes"]) == ([], 0), "all is forgotten")


def test_without_bytes_nothing_is_kept(fresh: Service) -> None:
    fresh.context.prompts.start()
    answer_with_clock(fresh, 2)
    wait_until(lambda: fresh.context.prompts.num_queued_keys == 0, "they are read")
    answer = ask(fresh)
    assert (answer["items"], answer["explained_bytes"], answer["computed_tokens"]) == ([], 0, 0)


@pytest.mark.parametrize("window_s", [0, 3601, "x"])
def test_windows_out_of_range_are_refused(client: httpx.Client, window_s: object) -> None:
    assert client.get(PATH, params={"window_s": window_s}).status_code == 422
