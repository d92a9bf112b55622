"""Exports of one service and imports into another: a new replica answers the first one's prompts from its own pool."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.harness.identities import check_identities
from tests.harness.object_server import BUCKET, KEY_ID, SECRET, Answer, Call, ObjectServer, Proxy, object_server
from tests.harness.service_process import Served, serving
from tests.harness.waiting import DEADLINE_S, wait_until
from tests.service.test_answers import BLOCK, OUTPUT, turn_over
from tests.service.test_tiers import prompt_of

SETTINGS = {"dtype": "float64", "device_blocks": 90, "pool_bytes": "32MiB", "load_decision": "always"}
NUM_BLOCKS = 15
"""Whole blocks of a prompt."""


def begin(served: Served, what: str, place: dict[str, Any], **body: Any) -> Any:
    field = "to" if what == "export" else "from"
    answer = served.http.post(f"/admin/v1/{what}", json={field: place, **body})
    assert answer.status_code == 202, answer.text
    return answer.json()


def ended(served: Served, task: Any) -> Any:
    def is_over() -> bool:
        return served.get(f"/admin/v1/tasks/{task['id']}")["status"] != "running"

    wait_until(is_over, "the end of a task")
    return served.get(f"/admin/v1/tasks/{task['id']}")


def copy(served: Served, what: str, place: dict[str, Any], **body: Any) -> Any:
    found = ended(served, begin(served, what, place, **body))
    assert found["status"] == "done", found
    return found


def host_hit(served: Served, prompt: list[int], answer: list[int], name: str, **body: Any) -> int:
    """Ask, expect the answer, and return how many tokens came from the pool."""
    found = served.complete(prompt, name, max_tokens=OUTPUT, **body)
    assert found["choices"][0]["token_ids"] == answer
    served.settle()
    return int(served.get(f"/admin/v1/requests/{name}")["prompt_tokens"]["host_hit"])


def fill(served: Served, count: int = 3) -> list[tuple[list[int], list[int]]]:
    """Prompts and their answers; the pool has their blocks afterwards."""
    asked = [prompt_of(number) for number in range(count)]
    answers = [served.tokens(one, max_tokens=OUTPUT) for one in asked]
    served.settle()
    return list(zip(asked, answers, strict=True))


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with object_server() as running:
        yield running


def bucket_of(server_url: str, name: str, folder: Path) -> dict[str, Any]:
    """A definition whose credentials are where a service without tokens may be told to read: `folder` / exports."""
    path = folder / "exports" / "credentials"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"[default]\naws_access_key_id={KEY_ID}\naws_secret_access_key={SECRET}\n")
    about = {"endpoint": server_url, "region": "us-east-1", "credentials_file": str(path), "io_timeout_s": 60}
    return {"type": "object", "url": f"s3://{BUCKET}/{name}", **about}


class Gate:
    """A fault of a proxy that holds requests for blocks, once some have passed, until it is opened."""

    def __init__(self, num_passing: int) -> None:
        self._lock = threading.Lock()
        self._num_passing = num_passing
        self._is_open = threading.Event()
        self.has_held = threading.Event()

    def __call__(self, call: Call, forward: Callable[[], Answer]) -> Answer:
        if "/blocks/" in call.path:
            with self._lock:
                self._num_passing -= 1
                holds = self._num_passing < 0
            if holds:
                self.has_held.set()
                self._is_open.wait(DEADLINE_S)
        return forward()

    def open(self) -> None:
        self._is_open.set()


@pytest.mark.long
def test_replica_when_it_has_imported_answers_from_its_pool(tmp_path: Path, server: ObjectServer) -> None:
    given = SETTINGS | {"export_path": tmp_path / "exports"}
    folder, bucket = {"type": "fs", "path": "warm"}, bucket_of(server.url, "warm", tmp_path)
    with serving(tmp_path / "a", **given) as first:
        asked = fill(first)
        for place in (folder, bucket):
            exported = copy(first, "export", place)
            assert exported["copied_blocks"] == exported["total_blocks"] == 3 * NUM_BLOCKS
            assert exported["left_blocks"] == exported["damaged_blocks"] == 0
            assert first.http.post("/admin/v1/export", json={"to": place}).status_code == 409
        check_identities(first.settle())
        for number, place in enumerate((folder, bucket)):
            with serving(tmp_path / f"b{number}", **given) as second:
                imported = copy(second, "import", place)
                assert imported["copied_blocks"] == imported["total_blocks"] == 3 * NUM_BLOCKS
                for index, (prompt, answer) in enumerate(asked):
                    assert host_hit(second, prompt, answer, f"p{index}") == NUM_BLOCKS * BLOCK
                assert copy(second, "import", place)["present_blocks"] == 3 * NUM_BLOCKS
                check_identities(second.settle())
                assert "Traceback" not in second.log()
        assert SECRET not in json.dumps(first.get("/admin/v1/tasks"))
        assert "Traceback" not in first.log()


@pytest.mark.long
def test_import_takes_what_is_wanted_and_leaves_what_is_damaged(tmp_path: Path) -> None:
    given = SETTINGS | {"export_path": tmp_path / "exports"}
    prompt = prompt_of(0)
    with serving(tmp_path / "a", **given) as first:
        answer = first.tokens(prompt, max_tokens=OUTPUT, cache_salt="one")
        assert first.tokens(prompt, max_tokens=OUTPUT, cache_salt="two") == answer
        first.settle()
        by_tenant = {"match": {"cache_salt": "one"}}
        assert copy(first, "export", {"type": "fs", "path": "one"}, **by_tenant)["copied_blocks"] == NUM_BLOCKS
        assert copy(first, "export", {"type": "fs", "path": "both"})["copied_blocks"] == 2 * NUM_BLOCKS
    # Of the first tenant, the block in the middle of its prompt is damaged.
    parts = [json.loads(path.read_text()) for path in sorted((tmp_path / "exports/one/parts").iterdir())]
    blocks = sorted((block for part in parts for block in part["blocks"]), key=lambda block: block[2])
    damaged = next((tmp_path / "exports/both").rglob(blocks[7][0]))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with serving(tmp_path / "b", **given) as second:
        found = copy(second, "import", {"type": "fs", "path": "both"}, **by_tenant)
        assert (found["copied_blocks"], found["damaged_blocks"]) == (NUM_BLOCKS - 1, 1)
        assert host_hit(second, prompt, answer, "two", cache_salt="two") == 0
        assert host_hit(second, prompt, answer, "one", cache_salt="one") == 7 * BLOCK
    with serving(tmp_path / "c", **given) as third:
        assert copy(third, "import", {"type": "fs", "path": "one"})["copied_blocks"] == NUM_BLOCKS
        assert host_hit(third, prompt, answer, "other", cache_salt="two") == 0
        assert host_hit(third, prompt, answer, "one", cache_salt="one") == NUM_BLOCKS * BLOCK
    with serving(tmp_path / "d", **given | {"dtype": "float32"}) as other:
        refused = other.http.post("/admin/v1/import", json={"from": {"type": "fs", "path": "one"}})
        assert (refused.status_code, "dtype was" in refused.json()["detail"]) == (409, True)
        assert other.stats()["pool"]["ready"] == 0


@pytest.mark.long
def test_import_into_a_full_pool_uses_free_slots_unless_it_may_evict(tmp_path: Path) -> None:
    given = SETTINGS | {"export_path": tmp_path / "exports"}
    place = {"type": "fs", "path": "warm"}
    with serving(tmp_path / "a", **given) as first:
        asked = fill(first, 6)
        exported = copy(first, "export", place)
    with serving(tmp_path / "b", **given | {"pool_bytes": "4MiB"}) as second:
        num_slots = second.stats()["pool"]["slots"]
        assert num_slots < exported["copied_blocks"]
        second.tokens(prompt_of(20), max_tokens=1)
        second.settle()
        imported = copy(second, "import", place)
        assert imported["copied_blocks"] == num_slots - NUM_BLOCKS
        assert "no more space" in imported["notes"][-1]
        assert second.stats()["evictions"]["total"] == 0
        # What was used last was exported first: whole prompts.
        whole = (num_slots - NUM_BLOCKS) // NUM_BLOCKS
        for index, (prompt, answer) in list(enumerate(asked))[6 - whole :]:
            assert host_hit(second, prompt, answer, f"p{index}") == NUM_BLOCKS * BLOCK
        evicting = copy(second, "import", place, evict=True, match={"request": "*"})
        assert 0 < evicting["copied_blocks"] <= num_slots // 2
        assert second.stats()["evictions"]["by_reason"].keys() == {"capacity"}
        check_identities(second.settle())


@pytest.mark.long
@pytest.mark.parametrize("what", ["export", "import"])
def test_task_that_is_canceled_ends_and_holds_nothing(tmp_path: Path, server: ObjectServer, what: str) -> None:
    given = SETTINGS | {"export_path": tmp_path / "exports"}
    with serving(tmp_path / "a", **given) as served, closing(Proxy(server)) as proxy:
        asked = fill(served)
        place = bucket_of(proxy.url, f"canceled-{what}", tmp_path)
        if what == "import":
            copy(served, "export", place)
            assert served.http.post("/admin/v1/reset", json={}).status_code == 200
        gate = Gate(3)
        with proxy.faulty(gate):
            task = begin(served, what, place)
            assert gate.has_held.wait(DEADLINE_S)
            assert served.http.post("/admin/v1/export", json={"to": {"type": "fs", "path": "x"}}).status_code == 409
            # Requests are served meanwhile.
            prompt, answer = asked[0]
            assert served.tokens(prompt, max_tokens=OUTPUT) == answer
            assert served.http.post(f"/admin/v1/tasks/{task['id']}/cancel").status_code == 200
            gate.open()
            assert ended(served, task)["status"] == "canceled"
        served.settle()
        assert served.stats()["pool"]["pinned"] == 0
        check_identities(served.settle())
        if what == "export":
            # It is continued.
            again = copy(served, "export", place)
            assert again["copied_blocks"] == again["total_blocks"]
        assert "Traceback" not in served.log()


@pytest.mark.long
@pytest.mark.parametrize("match", [None, {"request": "*"}])
def test_reset_during_an_import_holds(tmp_path: Path, server: ObjectServer, match: dict[str, str] | None) -> None:
    given = SETTINGS | {"export_path": tmp_path / "exports"}
    with serving(tmp_path / "a", **given) as served, closing(Proxy(server)) as proxy:
        asked = fill(served)
        place = bucket_of(proxy.url, f"reset-{match is None}", tmp_path)
        copy(served, "export", place)
        assert served.http.post("/admin/v1/reset", json={}).status_code == 200
        turn_over(served)
        gate = Gate(20)
        with proxy.faulty(gate):
            task = begin(served, "import", place)
            assert gate.has_held.wait(DEADLINE_S)
            reset = served.http.post("/admin/v1/reset", json={"drain_timeout_s": 0, "match": match})
            assert reset.status_code == 202
            gate.open()
            found = ended(served, task)
        assert served.stats()["pool"]["ready"] == 0
        if match is None:
            assert (found["status"], found["notes"]) == ("failed", ["the pool was reset during the import"])
        else:
            assert found["status"] == "done"
            assert found["left_blocks"] + found["copied_blocks"] == 3 * NUM_BLOCKS
        prompt, answer = asked[0]
        assert host_hit(served, prompt, answer, "after") == 0
        # Another import is not concerned.
        assert copy(served, "import", place)["present_blocks"] == NUM_BLOCKS
        check_identities(served.settle())


@pytest.mark.long
def test_export_whose_process_is_killed_is_imported_as_far_as_it_goes(tmp_path: Path, server: ObjectServer) -> None:
    # A batch is an eighth of the pool, 16 blocks.
    given = SETTINGS | {"pool_bytes": "8MiB", "export_path": tmp_path / "exports"}
    place = bucket_of(server.url, "killed", tmp_path)
    with closing(Proxy(server)) as proxy, serving(tmp_path / "a", **given) as first:
        asked = fill(first, 4)
        gate = Gate(40)
        with proxy.faulty(gate):
            begin(first, "export", place | {"endpoint": proxy.url})
            assert gate.has_held.wait(DEADLINE_S)
            first.process.kill()
            first.process.wait(DEADLINE_S)
            gate.open()
    with serving(tmp_path / "b", **given) as second:
        found = copy(second, "import", place)
        assert "was interrupted" in found["notes"][0]
        assert 0 < found["copied_blocks"] < 4 * NUM_BLOCKS
        assert found["damaged_blocks"] == 0
        # The last prompt was exported first.
        prompt, answer = asked[-1]
        assert host_hit(second, prompt, answer, "last") == NUM_BLOCKS * BLOCK
        for index, (prompt, answer) in enumerate(asked):
            assert second.tokens(prompt, max_tokens=OUTPUT) == answer, index
        # The interrupted export is continued by any engine with the same fingerprint.
        second.settle()
        assert copy(second, "export", place)["left_blocks"] == 0
    with serving(tmp_path / "c", **given) as third:
        assert copy(third, "import", place)["notes"] == []
        for index, (prompt, answer) in enumerate(asked):
            assert host_hit(third, prompt, answer, f"p{index}") == NUM_BLOCKS * BLOCK


@pytest.mark.long
def test_recovered_blocks_are_exported_once_they_are_verified(tmp_path: Path) -> None:
    given = SETTINGS | {"export_path": tmp_path / "exports", "pool_kind": "file", "pool_path": tmp_path / "pool"}
    place = {"type": "fs", "path": "warm"}
    given |= {"engine_name": "kept"}
    with serving(tmp_path / "a", **given) as first:
        asked = fill(first)
        assert first.stop() == 0
    with serving(tmp_path / "a", **given) as again:
        assert again.stats()["pool"]["unverified"] == 3 * NUM_BLOCKS
        exported = copy(again, "export", place)
        assert (exported["copied_blocks"], exported["left_blocks"]) == (3 * NUM_BLOCKS, 0)
        assert again.stats()["pool"]["unverified"] == 0
    with serving(tmp_path / "b", **SETTINGS | {"export_path": tmp_path / "exports"}) as second:
        copy(second, "import", place)
        for index, (prompt, answer) in enumerate(asked):
            assert host_hit(second, prompt, answer, f"p{index}") == NUM_BLOCKS * BLOCK
