"""Commands that need no service: checking settings, their documentation, the database, help."""

from __future__ import annotations

import json
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvferry.app.store import claim_name, upgrade
from kvferry.app.tiers.fs.folder import Folder
from kvferry.cuda_ops.persistent.lock import PoolLock
from tests.cli.conftest import ROOT, Run, command_environment
from tests.harness.effort import LONG


def test_help_is_quick_since_it_imports_little(clean_world: Path) -> None:
    code = (
        "import sys\nfrom kvferry.app.cli import main\nassert main(['--help']) == 0\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'sqlalchemy', 'numpy', 'httpx', 'uvicorn', 'pydantic'}\n"
        "sys.exit(f'imported {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=command_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in ("serve", "stats", "reset", "policy", "evictions", "config", "db", "replay"):
        assert command in done.stdout


@pytest.mark.parametrize("words", [("--help",), ("stats", "-h"), ("policy", "request", "--help"), ("--version",)])
def test_asking_for_help_is_no_error(words: tuple[str, ...], run: Run) -> None:
    done = run(*words)
    assert (done.code, done.err) == (0, "")
    assert "kvferry" in done.out


@pytest.mark.parametrize("words", [(), ("policy",), ("config",), ("db",)])
def test_group_without_a_command_shows_its_usage(words: tuple[str, ...], run: Run) -> None:
    done = run(*words)
    assert done.code == 2
    assert (done.out + done.err).count("Usage:") == 1


def test_config_check_shows_every_setting_and_its_place(run: Run, clean_world: Path) -> None:
    (clean_world / ".env").write_text("KVFERRY_POOL_BYTES=8MiB\nPATH_TO_OTHERS=1\n")
    done = run("config", "check", ADMIN_TOKEN="hunter2-hunter2!", HOST="0.0.0.0", PORT="0", ENGINE="none")
    assert done.code == 0
    assert "8MiB" in done.out
    assert "KVFERRY_POOL_BYTES (.env)" in done.out
    assert "hunter2" not in done.out + done.err
    views = run("config", "check", "--json", ADMIN_TOKEN="hunter2-hunter2", PORT="0", ENGINE="none").json
    assert views["pool_bytes"]["value"] == 8 << 20
    assert views["pool_bytes"]["source"] == "file"
    assert views["admin_token"] == views["admin_token"] | {"value": "***", "source": "env", "secret": True}


def test_config_check_when_a_tier_exceeds_its_disk_says_so(run: Run, clean_world: Path) -> None:
    def tiers(name: str, max_bytes: str) -> str:
        return json.dumps([{"type": "fs", "path": str(clean_world / name), "max_bytes": max_bytes}])

    (clean_world / "old").mkdir()
    for name in ("old", "new"):
        done = run("config", "check", PORT="0", ENGINE="none", TIERS=tiers(name, "1000000TiB"))
        assert done.code == 0
        assert "tier fs: max_bytes=1099511627776000000 is more than the disk of" in done.err
        fits = run("config", "check", PORT="0", ENGINE="none", TIERS=tiers(name, "16MiB"))
        assert "more than the disk" not in fits.err
        assert '[{"type":' in fits.out, "JSON, as the setting is written"


def test_bad_settings_refuse_with_every_reason(run: Run, run_process: Run) -> None:
    for start, *words in ((run_process, "serve"), (run, "config", "check"), (run, "db", "upgrade")):
        done = start(*words, POL_BYTES="1", HOST="0.0.0.0", PORT="http")
        assert (done.code, done.out) == (2, "")
        assert done.err.splitlines() == [
            "kvferry: KVFERRY_PORT=http (environment variable): must be a whole number from 0 to 65535",
            "kvferry: KVFERRY_POL_BYTES=1 (environment variable): no such setting; did you mean KVFERRY_POOL_BYTES?",
            "kvferry: KVFERRY_HOST=0.0.0.0 (environment variable): without a token the service listens on loopback "
            "only; set KVFERRY_ADMIN_TOKEN, or KVFERRY_HOST=127.0.0.1",
        ]


def test_config_check_when_serve_would_refuse_names_every_reason(run: Run, run_process: Run, clean_world: Path) -> None:
    (clean_world / "file").write_text("not a folder")
    tier = {"type": "fs", "path": str(clean_world / "file" / "tier"), "max_bytes": "1MiB"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = {
            "PORT": str(taken.getsockname()[1]),
            "MODEL": "/nowhere/at/all",
            "POOL_KIND": "file",
            "POOL_PATH": str(clean_world / "file" / "pool"),
            "DATABASE_URL": f"sqlite:///{clean_world}/file/kvferry.db",
            "TIERS": json.dumps([tier]),
        }
        checked, served = run("config", "check", **given), run_process("serve", **given)
    assert (checked.code, checked.out) == (2, "")
    for words in ("KVFERRY_PORT=", "KVFERRY_MODEL=", "KVFERRY_POOL_PATH=", "kvferry.db", "tier fs"):
        assert words in checked.err
    assert served.code == 2
    assert served.err.strip().splitlines()[-1] in checked.err.splitlines()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"BLOCK_SIZE": "1025"}, "KVFERRY_BLOCK_SIZE=1025"),
        ({"ENGINE": "none", "DATABASE_URL": "postgresql://kvferry@127.0.0.1:1/none"}, "KVFERRY_DATABASE_URL"),
        ({"POOL_KIND": "file", "POOL_PATH": "/" + "a" * 300}, f"KVFERRY_POOL_PATH=/{'a' * 300}: "),
        ({"MODEL": "/" + "a" * 300}, f"KVFERRY_MODEL=/{'a' * 300}: "),
        ({"STATE_DIR": "/dev/null/state"}, "KVFERRY_STATE_DIR=/dev/null/state: "),
        # Root has the permissions.
        ({"STATE_DIR": "/proc/kvferry", "ENGINE": "none"}, "/proc"),
    ],
)
def test_config_check_when_a_value_does_not_fit_here_refuses(
    run: Run, clean_world: Path, settings: dict[str, str], words: str
) -> None:
    done = run("config", "check", **{"STATE_DIR": str(clean_world / "state"), "PORT": "0"} | settings)
    assert done.code == 2
    assert words in done.err
    assert not (clean_world / "state").exists()


def test_config_check_when_the_schema_or_the_name_is_not_ours_refuses(run: Run, clean_world: Path) -> None:
    url = f"sqlite:///{clean_world}/kvferry.db"
    upgrade(url)
    given = {"STATE_DIR": str(clean_world), "PORT": "0", "ENGINE": "none", "ENGINE_NAME": "mine"}
    claim = claim_name(url, "mine")
    taken = run("config", "check", **given)
    claim.close()
    assert taken.code == 2
    assert "another process (pid " in taken.err
    assert run("config", "check", **given).code == 0
    with closing(sqlite3.connect(clean_world / "kvferry.db", isolation_level=None)) as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    newer = run("config", "check", **given)
    assert newer.code == 2
    assert "written by a newer version" in newer.err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param({"MODEL": "/tmp"}, "KVFERRY_MODEL=/tmp does not load: ", marks=pytest.mark.long),
        ({"DEVICE_BLOCKS": "1000000000"}, "KVFERRY_DEVICE_BLOCKS asks for 32,768,000,000,000 bytes "),
        pytest.param(
            {"POOL_BYTES": "1KiB"},
            "KVFERRY_POOL_BYTES=1024: holds no slot, which takes 32,768 bytes",
            marks=pytest.mark.long,
        ),
        ({"POOL_BYTES": "1KiB", "ENGINE": "none"}, "KVFERRY_POOL_BYTES=1024: holds no slot, which takes 65,536 bytes"),
        (
            {"ENGINE": "none", "TIERS": '[{"type": "fs", "path": "tier", "max_bytes": "1KiB"}]'},
            "tier fs: max_bytes=1024 holds no block",
        ),
    ],
)
def test_config_check_when_the_model_does_not_fit_refuses_as_serve(
    run: Run, run_process: Run, clean_world: Path, settings: dict[str, str], words: str
) -> None:
    given = {"STATE_DIR": str(clean_world / "state"), "POOL_BYTES": "16MiB", "PORT": "0"} | settings
    checked = run("config", "check", **given)
    assert list(clean_world.iterdir()) == []
    assert checked.code == 2
    assert f"kvferry: {words}" in checked.err or f"kvferry: KVFERRY_TIERS: {words}" in checked.err
    # With a model, the start of a process takes seconds.
    if LONG or "ENGINE" in settings:
        served = run_process("serve", **given)
        assert (served.code, words in served.err) == (2, True)


def test_config_check_when_a_tier_cannot_be_locked_refuses_as_serve(
    run: Run, run_process: Run, clean_world: Path
) -> None:
    # Stands for the lock of another user, which root could open.
    (clean_world / "tier" / "lock").mkdir(parents=True)
    given = {
        "STATE_DIR": str(clean_world / "state"),
        "PORT": "0",
        "ENGINE": "none",
        "TIERS": json.dumps([{"type": "fs", "path": str(clean_world / "tier"), "max_bytes": "1MiB"}]),
    }
    for start, *command in ((run, "config", "check"), (run_process, "serve")):
        refused = start(*command, **given)
        assert refused.code == 2
        assert f"tier fs: path={clean_world}/tier cannot be used: Is a directory" in refused.err


def test_config_check_when_folders_are_in_use_refuses_as_serve(run: Run, run_process: Run, clean_world: Path) -> None:
    pool = PoolLock(clean_world / "pools" / "mine.pool")
    (clean_world / "pools" / "mine.pool").touch()
    tier = Folder(clean_world / "tier")
    given = {
        "STATE_DIR": str(clean_world / "state"),
        "PORT": "0",
        "ENGINE": "none",
        "ENGINE_NAME": "mine",
        "POOL_KIND": "file",
        "POOL_PATH": str(clean_world / "pools"),
        "TIERS": json.dumps([{"type": "fs", "path": str(clean_world / "tier"), "max_bytes": "1MiB"}]),
    }
    before = sorted(clean_world.rglob("*"))
    checked = run("config", "check", **given)
    assert sorted(clean_world.rglob("*")) == before
    served = run_process("serve", **given)
    assert (checked.code, served.code) == (2, 2)
    problems = [line for line in checked.err.splitlines() if "another process" in line]
    assert len(problems) == 2
    assert set(problems) <= set(served.err.splitlines())
    pool.close()
    tier.close()
    free = run("config", "check", **given)
    assert free.code == 0, free.err


@pytest.mark.parametrize("is_own", [True, False])
def test_config_check_when_another_pool_exists_checks_the_memory(run: Run, clean_world: Path, is_own: bool) -> None:
    (clean_world / "pools").mkdir()
    with (clean_world / "pools" / "other.pool").open("w") as file:
        file.truncate((10 << 40) if is_own else 4096)
    (clean_world / "pools" / "gone.pool").symlink_to("nowhere")
    given = {"STATE_DIR": str(clean_world), "PORT": "0", "ENGINE": "none"}
    given |= {"POOL_KIND": "file", "POOL_PATH": str(clean_world / "pools")}
    checked = run("config", "check", POOL_BYTES="10TiB", **given)
    assert checked.code == (0 if is_own else 2), checked.err
    assert is_own or "KVFERRY_POOL_BYTES asks for " in checked.err


def test_config_check_warns_of_kubernetes_once(run: Run) -> None:
    injected = {"SERVICE_HOST": "10.0.0.1", "WEB_PORT": "tcp://10.0.0.1:8787", "PORT_8787_TCP_PORT": "8787"}
    done = run("config", "check", PORT="0", ENGINE="none", **injected)
    assert done.code == 0
    assert done.err.count("enableServiceLinks: false") == 1


def test_config_docs_is_the_page(run: Run) -> None:
    assert run("config", "docs").out == (ROOT / "docs" / "settings.md").read_text()


def test_db_upgrade_makes_the_database_once(run: Run, clean_world: Path) -> None:
    first = run("db", "upgrade", "--json", STATE_DIR=str(clean_world / "state"))
    assert first.code == 0, first.err
    assert first.json["before"] is None
    assert first.json["after"]
    with sqlite3.connect(clean_world / "state" / "kvferry.db") as database:
        tables = {name for (name,) in database.execute("select name from sqlite_master where type = 'table'")}
    database.close()
    assert {"slots", "evictions", "audit"} <= tables
    again = run("db", "upgrade", "--json", STATE_DIR=str(clean_world / "state"))
    assert (again.code, again.json) == (0, dict.fromkeys(("before", "after"), first.json["after"]))


def test_db_upgrade_of_something_else_is_a_line(run: Run, clean_world: Path) -> None:
    (clean_world / "kvferry.db").write_text("not a database, but some text that is longer than a header" * 100)
    done = run("db", "upgrade", STATE_DIR=str(clean_world))
    assert (done.code, done.out) == (1, "")
    assert "kvferry.db" in done.err
