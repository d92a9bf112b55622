"""`kvferry doctor` and `kvferry vllm-config`: what a newcomer runs before the first start."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.cli.conftest import Ran, Run

FS = {"type": "fs", "path": "/mnt/kv", "max_bytes": "1TiB"}


def states(done: Ran) -> dict[str, str]:
    return {finding["check"]: finding["state"] for finding in done.json}


def test_doctor_on_a_machine_that_is_fit_finds_no_error(run: Run) -> None:
    done = run("doctor", "--json", POOL_BYTES="1MiB", PORT="0")
    assert done.code == 0
    names = ["settings", "/dev/shm", "memlock", "state folder", "port", "NUMA", "GPU driver", "clock", "vLLM"]
    assert list(states(done))[: len(names)] == names
    assert "error" not in states(done).values()
    assert run("doctor", POOL_BYTES="1MiB", PORT="0").err.startswith("errors: 0, ")


@pytest.mark.parametrize("wrong", [{"POOL_BYTE": "1GiB"}, {"POOL_BYTES": "1PiB"}, {"MODEL": "/nowhere/model"}])
def test_doctor_with_settings_that_cannot_start_names_them_and_exits_1(wrong: dict[str, str], run: Run) -> None:
    done = run("doctor", "--json", PORT="0", **wrong)
    assert done.code == 1
    (name,) = wrong
    texts = [finding["text"] for finding in done.json if finding["state"] == "error"]
    assert any(text.startswith(f"KVFERRY_{name}") for text in texts), texts


def test_doctor_warns_of_a_pool_larger_than_shared_memory_and_of_a_taken_port(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("doctor", "--json", POOL_BYTES="1PiB", PORT=str(taken.getsockname()[1]))
    assert (states(done)["/dev/shm"], states(done)["port"]) == ("warning", "warning")


def test_vllm_config_prints_the_value_for_the_option_on_one_line(run: Run) -> None:
    done = run("vllm-config", "--pool", "64GiB", "--tier", json.dumps(FS), "pool_kind=shm")
    assert (done.code, done.err, done.out.count("\n")) == (0, "", 1)
    assert done.json == {
        "kv_connector": "KVFerryConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool_kind": "shm", "pool_bytes": "64GiB", "tiers": [FS]},
    }
    # As in the README: what the environment says is left to vLLM's process, which has it too.
    assert run("vllm-config", POOL_BYTES="64GiB").json["kv_connector_extra_config"] == {}


@pytest.mark.parametrize(
    ("words", "environment", "text"),
    [
        (("--pool", "64Gig"), {}, "pool_bytes=64Gig (argument): must be a size"),
        (("--tier", "{"), {}, "--tier {: is not JSON"),
        (("--tier", '{"type": "nfs"}'), {}, "did you mean fs?"),
        (("pol_kind=shm",), {}, "did you mean pool_kind?"),
        (("engine=none",), {}, "engine are vLLM's own options"),
        (("admin_token=s3cret-token",), {}, "admin_token: must not be on a command line"),
        ((), {"POOL_BYTES": "64Gig"}, "KVFERRY_POOL_BYTES=64Gig (environment variable)"),
    ],
)
def test_vllm_config_that_vllm_would_refuse_prints_nothing_and_exits_2(
    words: tuple[str, ...], environment: dict[str, str], text: str, run: Run
) -> None:
    done = run("vllm-config", *words, **environment)
    assert (done.code, done.out) == (2, "")
    assert text in done.err
    assert "s3cret" not in done.err


def test_doctor_names_the_file_system_of_the_state_folder(run: Run, tmp_path: Path) -> None:
    (finding,) = [one for one in run("doctor", "--json", PORT="0").json if one["check"] == "state folder"]
    assert finding["text"].split(": ")[1].split(",")[0] != "unknown"
