"""`/export`, `/import` and `/tasks`: what is begun, refused, shown, canceled and audited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import READ, Service
from tests.harness.waiting import wait_until

EXPORT, IMPORT, TASKS = "/admin/v1/export", "/admin/v1/import", "/admin/v1/tasks"
PLACE = {"type": "fs", "path": "warm"}


def ended(client: httpx.Client, begun: httpx.Response) -> Any:
    assert begun.status_code == 202, begun.text
    path = f"{TASKS}/{begun.json()['id']}"
    wait_until(lambda: client.get(path).json()["status"] != "running", "the end of a task")
    return client.get(path).json()


def fill(service: Service, num_requests: int = 2) -> None:
    for number in range(num_requests):
        service.engine.answer(LoopRequest(f"r{number}", 128, seed=number, tenant=f"{number}" * 16))
    service.settle()


def test_export_and_import_are_tasks_with_progress(fresh: Service, client: httpx.Client) -> None:
    fill(fresh)
    num_blocks = client.get("/admin/v1/stats").json()["pool"]["ready"]
    exported = ended(client, client.post(EXPORT, json={"to": PLACE}))
    assert (exported["kind"], exported["status"], exported["notes"]) == ("export", "done", [])
    assert exported["total_blocks"] == exported["copied_blocks"] == num_blocks
    assert exported["copied_bytes"] == exported["total_bytes"] > 0
    assert exported["place"]["path"] == str(fresh.context.settings.current.export_root / "warm")
    imported = ended(client, client.post(IMPORT, json={"from": PLACE}))
    assert (imported["present_blocks"], imported["copied_blocks"]) == (num_blocks, 0)
    assert client.get(TASKS).json() == {"items": [imported, exported], "next_cursor": None}
    pages = [client.get(TASKS, params={"limit": 1, "cursor": cursor}).json() for cursor in (0, 1)]
    assert [page["items"] for page in pages] == [[imported], [exported]]
    assert [page["next_cursor"] for page in pages] == ["1", None]
    audited = client.get("/admin/v1/audit").json()["items"]
    assert [(one["path"], one["status"], one["what"]) for one in audited] == [
        (IMPORT, 202, {"from": PLACE}),
        (EXPORT, 202, {"to": PLACE}),
    ]
    types = [event.type for event in fresh.context.feed.read(0, 1000)[1]]
    assert [str(one) for one in types if one in ("exported", "imported")] == ["exported", "imported"]


def test_import_counts_every_block_that_it_leaves_out(fresh: Service, client: httpx.Client) -> None:
    fill(fresh)
    exported = ended(client, client.post(EXPORT, json={"to": PLACE}))
    num_blocks, slot_bytes = exported["copied_blocks"], client.get("/admin/v1/stats").json()["pool"]["slot_bytes"]

    def imported(**body: Any) -> Any:
        assert client.post("/admin/v1/reset", json={}).status_code == 200
        return ended(client, client.post(IMPORT, json={"from": PLACE} | body))

    few = imported(max_bytes=3 * slot_bytes)
    assert (few["copied_blocks"], few["left_blocks"], len(few["notes"])) == (3, num_blocks - 3, 1)
    # In an empty pool a limit takes effect at once.
    assert client.post("/admin/v1/reset", json={}).status_code == 200
    limit = client.put(f"/admin/v1/tenants/{'0' * 16}", json={"max_pool_bytes": 2 * slot_bytes})
    assert limit.status_code == 200
    for may_evict in (False, True):
        found = imported(evict=may_evict)
        assert (found["copied_blocks"], found["left_blocks"]) == (num_blocks // 2 + 2, num_blocks // 2 - 2)
        assert found["notes"] == ["blocks beyond the limits of their tenants were left out"]
    for part in (Path(exported["place"]["path"]) / "parts").iterdir():
        part.unlink()
    assert imported()["damaged_blocks"] == num_blocks


def test_export_that_fails_is_logged_with_its_reason(
    fresh: Service, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(fresh)
    path = fresh.context.settings.current.export_root / "warm"
    path.mkdir(parents=True)
    (path / "parts").touch()
    failed = ended(client, client.post(EXPORT, json={"to": PLACE}))
    assert failed["status"] == "failed"
    assert f"export failed: {failed['notes'][-1]}" in caplog.messages


def test_export_by_tenant_copies_its_blocks_alone(fresh: Service, client: httpx.Client) -> None:
    fill(fresh)
    exported = ended(client, client.post(EXPORT, json={"to": PLACE, "match": {"tenant": "1" * 16}}))
    folder = Path(exported["place"]["path"])
    parts = [json.loads(path.read_text()) for path in (folder / "parts").iterdir()]
    assert 0 < sum(len(part["blocks"]) for part in parts) == exported["copied_blocks"]
    assert {json.loads(origin)[0] for part in parts for origin in part["origins"]} == {"r1"}
    assert exported["match"] == {"request": None, "tenant": "1" * 16, "lora": None}


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"type": "fs", "path": "../outside"}, "is not below"),
        ({"type": "fs", "path": "/etc/kvferry"}, "is not below"),
        ({"type": "fs", "path": "."}, "is not below"),
        ({"type": "fs", "path": "a\nb"}, "must be the path of a folder"),
        ({"type": "fs", "path": "x", "max_bytes": 1}, "max_bytes is no field of it"),
        ({"type": "fs"}, "path is missing"),
        ({"type": "tape", "path": "x"}, "type must be fs"),
        ({}, "type must be fs"),
        ({"type": "object", "url": "s3://key:secret@bucket/x"}, "must not contain credentials"),
        ({"type": "object", "url": "file:///etc"}, "must be s3://BUCKET/PREFIX"),
        ({"type": "object", "url": "s3://b/x", "ttl_s": 5}, "ttl_s is no field of it"),
    ],
)
def test_place_that_is_not_allowed_is_422(api: httpx.Client, place: dict[str, Any], words: str) -> None:
    for path, field in ((EXPORT, "to"), (IMPORT, "from")):
        answer = api.post(path, json={field: place})
        assert answer.status_code == 422
        (error,) = answer.json()["errors"]
        assert error["field"] == field
        assert words in error["message"]
        assert "secret" not in error["message"]
    assert api.get(TASKS).json() == {"items": [], "next_cursor": None}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"credentials_file": "/etc/hostname"}, "credentials_file=/etc/hostname is not below"),
        ({"endpoint": "http://127.0.0.1:9"}, "endpoint: without an admin token"),
    ],
)
def test_bucket_without_an_admin_token_gets_no_credentials(api: httpx.Client, more: dict[str, str], words: str) -> None:
    answer = api.post(EXPORT, json={"to": {"type": "object", "url": "az://b/x", "account": "a"} | more})
    assert answer.status_code == 422
    assert words in answer.json()["errors"][0]["message"]


def test_link_that_leads_out_of_the_folder_is_422(api: httpx.Client, service: Service, tmp_path: Path) -> None:
    root = service.context.settings.current.export_root
    root.mkdir(exist_ok=True)
    (root / "link").symlink_to(tmp_path)
    answer = api.post(EXPORT, json={"to": {"type": "fs", "path": "link/inner"}})
    assert answer.status_code == 422
    assert "is not below" in answer.json()["errors"][0]["message"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("body", "field"),
    [({}, "to"), ({"to": PLACE, "max_bytes": 0}, "max_bytes"), ({"to": PLACE, "match": {"user": "x"}}, "match.user")],
)
def test_bad_body_is_422(api: httpx.Client, body: dict[str, Any], field: str) -> None:
    answer = api.post(EXPORT, json=body)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)


def test_import_without_an_export_is_404(api: httpx.Client, service: Service) -> None:
    missing = api.post(IMPORT, json={"from": PLACE})
    assert (missing.status_code, "the folder does not exist" in missing.text) == (404, True)
    (service.context.settings.current.export_root / "empty").mkdir(parents=True)
    answer = api.post(IMPORT, json={"from": {"type": "fs", "path": "empty"}})
    assert (answer.status_code, "no export.json" in answer.text) == (404, True)
    assert api.get(TASKS).json() == {"items": [], "next_cursor": None}


def test_whole_export_is_not_overwritten(fresh: Service, client: httpx.Client) -> None:
    assert ended(client, client.post(EXPORT, json={"to": PLACE}))["status"] == "done"
    answer = client.post(EXPORT, json={"to": PLACE})
    assert (answer.status_code, "there is a whole export" in answer.json()["detail"]) == (409, True)


def test_export_of_another_fingerprint_is_409_and_names_the_field(fresh: Service, client: httpx.Client) -> None:
    folder = Path(ended(client, client.post(EXPORT, json={"to": PLACE}))["place"]["path"])
    head = json.loads((folder / "export.json").read_text())
    for is_whole in (True, False):
        other = head | {"fingerprint": {"model": "other"}, "is_whole": is_whole}
        (folder / "export.json").write_text(json.dumps(other))
        answer = client.post(IMPORT, json={"from": PLACE})
        assert (answer.status_code, "model was 'other', now 'tiny'" in answer.json()["detail"]) == (409, True)
    assert client.post(EXPORT, json={"to": PLACE}).status_code == 409


@pytest.mark.parametrize("head", ["", "[]", "{}", '{"version": 2}', '{"version": 1, "fingerprint": 1}', "x" * 2000])
def test_head_that_cannot_be_read_is_422(api: httpx.Client, service: Service, head: str) -> None:
    folder = service.context.settings.current.export_root / "damaged"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "export.json").write_text(head)
    answer = api.post(IMPORT, json={"from": {"type": "fs", "path": "damaged"}})
    assert answer.status_code == 422, answer.text


def test_folder_that_a_tier_uses_is_409(fresh: Service, client: httpx.Client, tmp_path: Path) -> None:
    from kvferry.app.tiers.fs.folder import Folder

    root = fresh.context.settings.current.export_root
    used = Folder(root / "used")
    try:
        answer = client.post(EXPORT, json={"to": {"type": "fs", "path": "used"}})
    finally:
        used.close()
    assert (answer.status_code, "another process" in answer.json()["detail"]) == (409, True)


def test_unknown_task_is_404_and_one_that_ended_stays(fresh: Service, client: httpx.Client) -> None:
    assert client.get(f"{TASKS}/none").status_code == client.post(f"{TASKS}/none/cancel").status_code == 404
    done = ended(client, client.post(EXPORT, json={"to": PLACE}))
    assert client.post(f"{TASKS}/{done['id']}/cancel").json() == done


def test_read_token_sees_tasks_and_begins_none(guarded: Service) -> None:
    with guarded.client(READ) as reader:
        assert reader.get(TASKS).status_code == 200
        assert reader.post(EXPORT, json={"to": PLACE}).status_code == 403
        assert reader.post(IMPORT, json={"from": PLACE}).status_code == 403
        assert reader.post(f"{TASKS}/any/cancel").status_code == 403
