"""`kvferry apply`: a service's rules, limits and tiers become those of a file, and no more than differs is changed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Ran, Run
from tests.harness.service_process import Served, serving

ADMIN = "admin-token-of-this-test"
DIGEST, OTHER = "0123456789abcdef", "f" * 16
FILE = """
[rules.batch]
order = 10
match = {{request = "batch-*", prompt_tokens = {{min = 8192}}}}
policy = {{store = false, max_load_tokens = "unlimited"}}

[rules.rest]
order = 20
policy = {{priority = "low"}}

[tenants.{digest}]
max_pool_bytes = "64MiB"

[tiers.disk]
type = "fs"
path = "{folder}/disk"
max_bytes = "100MiB"
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("apply")
    own = {"type": "fs", "name": "own", "path": str(folder / "own"), "max_bytes": 1 << 20}
    tiers = str([own]).replace("'", '"')
    with serving(folder, engine="none", pool_bytes="1MiB", admin_token=ADMIN, tiers=tiers) as served:
        yield served


@pytest.fixture
def served(running: Served) -> Iterator[Served]:
    """The service, which has no rule, no limit of a tenant and no tier besides its own before and after a test."""
    yield running
    http, items = running.http, [("tenants", DIGEST)]
    items += [("rules", rule["name"]) for rule in running.get("/admin/v1/rules")["items"]]
    items += [("tiers", tier["name"]) for tier in running.get("/admin/v1/tiers")["items"] if tier["name"] != "own"]
    for collection, name in items:
        http.delete(f"/admin/v1/{collection}/{name}")


@pytest.fixture
def policies(tmp_path: Path) -> Path:
    path = tmp_path / "policies.toml"
    path.write_text(FILE.format(digest=DIGEST, folder=tmp_path))
    return path


@pytest.fixture
def command(run: Run, served: Served) -> Run:
    def ask(*words: str | Path) -> Ran:
        return run("apply", *map(str, words), URL=served.url, ADMIN_TOKEN=ADMIN)

    return ask


def mutations(served: Served) -> list[tuple[str, str]]:
    rows = served.get("/admin/v1/audit?limit=1000")["items"]
    return [(row["method"], row["path"].removeprefix("/admin/v1/")) for row in reversed(rows)]


def test_apply_twice_changes_what_differs_and_then_nothing(command: Run, policies: Path, served: Served) -> None:
    first = command("-f", policies)
    assert (first.code, first.err) == (0, "changes applied: 4\n")
    assert [line.split(":")[0] for line in first.out.splitlines()] == [
        "+ rule batch",
        "+ rule rest",
        f"+ tenant {DIGEST}",
        "+ tier disk",
    ]
    assert served.get("/admin/v1/rules/batch")["policy"] == {"store": False, "max_load_tokens": "unlimited"}
    assert served.get(f"/admin/v1/tenants/{DIGEST}")["max_pool_bytes"] == {"value": 64 << 20, "source": "tenant"}
    assert served.get("/admin/v1/tiers/disk")["definition"]["max_bytes"] == 100 << 20
    done = mutations(served)
    second = command("-f", policies)
    assert (second.code, second.out, second.err) == (0, "", "nothing differs\n")
    assert mutations(served) == done


def test_apply_of_a_changed_file_changes_only_what_changed(command: Run, policies: Path, served: Served) -> None:
    assert command("-f", policies).code == 0
    before = len(mutations(served))
    policies.write_text(policies.read_text().replace("order = 20", "order = 5").replace("100MiB", "200MiB"))
    shown = command("-f", policies, "--dry-run")
    assert shown.code == 1
    assert shown.out.splitlines() == [
        "~ rule rest: order 20 -> 5",
        "~ tier disk: max_bytes 100MiB -> 200MiB",
    ]
    assert len(mutations(served)) == before
    assert command("-f", policies).code == 0
    assert mutations(served)[before:] == [("PUT", "rules/rest"), ("DELETE", "tiers/disk"), ("PUT", "tiers/disk")]
    assert command("-f", policies, "--dry-run").code == 0


def test_apply_deletes_only_with_prune_and_no_tier_of_the_settings(
    command: Run, policies: Path, served: Served, tmp_path: Path
) -> None:
    assert command("-f", policies).code == 0
    policies.write_text("")
    assert command("-f", policies).err == "nothing differs\n"
    done = command("-f", policies, "--prune", "--json")
    assert [(one["action"], one["name"]) for one in done.json["differences"]] == [
        *(("delete", name) for name in sorted(["batch", "rest"])),
        ("delete", DIGEST),
        ("delete", "disk"),
    ]
    assert served.get("/admin/v1/rules")["items"] == []
    assert served.get(f"/admin/v1/tenants/{DIGEST}")["max_pool_bytes"]["source"] == "default"
    assert [tier["name"] for tier in served.get("/admin/v1/tiers")["items"]] == ["own"]


def test_apply_that_the_service_refuses_says_what_was_done_and_goes_on_when_repaired(
    command: Run, policies: Path, served: Served, tmp_path: Path
) -> None:
    (tmp_path / "disk").write_text("no folder")
    refused = command("-f", policies)
    assert refused.code == 1
    assert "3 of 4 changes were applied; refused: tier disk" in refused.err
    (tmp_path / "disk").unlink()
    again = command("-f", policies)
    assert (again.code, again.err) == (0, "changes applied: 1\n")
    shutil.rmtree(tmp_path / "disk")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[rule.x]\norder = 1", "rule: there is no such table"),
        ("rules = 5", "rules: must be a table of tables"),
        ("[rules]\nx = 5", "rules.x: must be a table"),
        ("[rules.x]\npolicy = {stor = true}", "rules.x: policy.stor"),
        ("[rules.x]\norder = true", "rules.x: order"),
        ('[rules."a b"]', "rules.a b: name"),
        ("[tenants.me]\nmax_pool_bytes = 1", "tenants.me: must be named by the digest"),
        (f"[tenants.{OTHER}]\nmax_pool_bytes = '9Gig'", "must be a size"),
        (f"[tenants.{OTHER}]\nmax_pool_bytes = -1", "must be a size"),
        ("[tiers.x]\ntype = 'nfs'", "did you mean fs?"),
        ("[tiers.x]\ntype = 'fs'\npath = '/x'\nmax_bytes = 1\nname = 'y'", "name must be that of the table"),
        ("[rules", "is not TOML"),
        ("\xff", "is not TOML"),
    ],
)
def test_apply_of_an_invalid_file_changes_nothing_and_exits_2(
    text: str, problem: str, command: Run, policies: Path, served: Served
) -> None:
    before = mutations(served)
    policies.write_bytes(f"{text}\n[tenants.{DIGEST}]\nmax_pool_bytes = 1\n".encode("latin-1"))
    done = command("-f", policies)
    assert (done.code, done.out) == (2, "")
    assert problem in done.err
    assert mutations(served) == before


def test_apply_without_a_service_or_a_file_exits_3_and_2(run: Run, policies: Path, tmp_path: Path) -> None:
    assert run("apply", "-f", str(policies), URL="http://127.0.0.1:9").code == 3
    assert run("apply", "-f", str(tmp_path / "none"), URL="http://127.0.0.1:9").code == 2
