"""Values for serving stacks: consistent with settings, with `kvferry vllm-config` and with the pool, and valid pods."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from kvferry.app.settings.fields import SECRET_NAMES, SETTING_NAMES
from tests.deploy.conftest import ROOT, size
from tests.harness.commands import run_command
from tests.harness.waiting import DEADLINE_S

FOLDER = ROOT / "deploy" / "stacks"
OPTION = "--kv-transfer-config"
OTHERS_BYTES = 24 << 30
"""What vLLM needs of the host's memory besides the pool, at least."""


@dataclass
class Engine:
    """The engine's container, the arguments of vLLM, the size of `/dev/shm`, and the pod where the file has one."""

    container: dict[str, Any]
    arguments: list[str]
    shm: str
    startup: dict[str, Any] | None
    volumes: list[dict[str, Any]]
    pod: dict[str, Any] | None = None

    @property
    def env(self) -> dict[str, str]:
        return {one["name"]: one["value"] for one in self.container["env"]}


def read(name: str) -> Engine:
    found = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    if name == "production-stack":
        spec = found["servingEngineSpec"]
        (model,) = spec["modelSpec"]
        config, volumes = model["vllmConfig"], model["extraVolumes"]
        assert config["enablePrefixCaching"]
        # Without it the chart mounts no shared memory.
        assert "tensorParallelSize" in config
        container = model | {
            "volumeMounts": model["extraVolumeMounts"],
            "image": f"{model['repository']}:{model['tag']}",
        }
        return Engine(container, config["extraArgs"], model["shmSize"], spec["startupProbe"], volumes)
    if name == "llm-d":
        decode = found["decode"]
        (container,) = decode["containers"]
        assert not found["routing"]["proxy"]["enabled"]
        assert container["ports"][0]["containerPort"] == found["routing"]["servicePort"]
        assert container["modelCommand"] == "vllmServe"
        # As the chart puts it together.
        names = ("name", "image", "args", "env", "ports", "resources", "volumeMounts")
        plain = {key: container[key] for key in names} | container["extraConfig"]
        pod = {"containers": [plain], "volumes": decode["volumes"], "enableServiceLinks": decode["enableServiceLinks"]}
        startup, shm = container["extraConfig"]["startupProbe"], size_of_volume(decode["volumes"], "shm")
        return Engine(container, container["args"], shm, startup, decode["volumes"], pod)
    if name == "kserve":
        pod = found["spec"]["template"]
        (container,) = pod["containers"]
        # Its command is evaluated by a shell.
        arguments = shlex.split(container["env"][0]["value"])
        assert container["env"][0]["name"] == "VLLM_ADDITIONAL_ARGS"
        shm = size_of_volume(pod["volumes"], "dshm")
        return Engine(container, arguments, shm, container["startupProbe"], pod["volumes"])
    frontend, worker = found["spec"]["components"]
    pod = worker["podTemplate"]["spec"]
    (container,) = pod["containers"]
    (served,) = frontend["podTemplate"]["spec"]["containers"]
    assert container["name"] == served["name"] == "main"
    assert container["image"].rpartition(":")[2] == served["image"].rpartition(":")[2]
    return Engine(container, container["args"], worker["sharedMemorySize"], None, pod["volumes"], pod)


def size_of_volume(volumes: list[dict[str, Any]], name: str) -> str:
    (found,) = (volume["emptyDir"] for volume in volumes if volume["name"] == name)
    assert found["medium"] == "Memory"
    return str(found["sizeLimit"])


STACKS = ("production-stack", "llm-d", "kserve", "dynamo")


@pytest.fixture(params=STACKS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return read(request.param)


@pytest.fixture(scope="module")
def option(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The value that `kvferry vllm-config` prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    folder = tmp_path_factory.mktemp("empty")
    done = run_command(("vllm-config",), env | {"PYTHONPATH": str(ROOT)}, folder, DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_option_is_what_vllm_config_prints(engine: Engine, option: str) -> None:
    assert engine.arguments.count(OPTION) == 1
    assert engine.arguments[engine.arguments.index(OPTION) + 1] == option
    assert json.loads(option)["kv_connector"] == "KVFerryConnector"


def test_environment_names_settings_and_files_of_the_secret(engine: Engine) -> None:
    (mount,) = (one for one in engine.container["volumeMounts"] if one["name"] == "kvferry-tokens")
    assert {"name": "kvferry-tokens", "secret": {"secretName": "kvferry-tokens"}} in engine.volumes
    names = {name.removeprefix("KVFERRY_").lower() for name in engine.env if name.startswith("KVFERRY_")}
    files = {name for name in names if name.endswith("_file")}
    assert files == {"admin_token_file", "read_token_file"}
    assert names - files <= set(SETTING_NAMES) - set(SECRET_NAMES)
    for name in files:
        assert engine.env[f"KVFERRY_{name.upper()}"] == f"{mount['mountPath']}/{name.removesuffix('_file')}"


def test_memory_and_shared_memory_hold_the_pool(engine: Engine) -> None:
    pool = size(engine.env["KVFERRY_POOL_BYTES"])
    assert size(engine.shm) > pool
    resources = engine.container["resources"]
    assert size(resources["limits"]["memory"]) >= pool + OTHERS_BYTES
    assert resources["limits"]["memory"] == resources["requests"]["memory"]


def test_start_may_take_half_an_hour(engine: Engine) -> None:
    if engine.startup is None:
        pytest.skip("its operator has the probes")
    assert engine.startup["periodSeconds"] * engine.startup["failureThreshold"] >= 1800
    assert engine.startup.get("httpGet", {"path": "/health"})["path"] == "/health"


@pytest.mark.parametrize("name", ["llm-d", "dynamo"])
def test_pod_is_valid_by_the_schema_of_kubernetes(name: str) -> None:
    import kubernetes_validate

    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": read(name).pod}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    assert pod["spec"]["enableServiceLinks"] is False


def test_page_names_each_file() -> None:
    page = (ROOT / "docs" / "stacks.md").read_text()
    assert {path.stem for path in FOLDER.iterdir()} == set(STACKS)
    for path in FOLDER.iterdir():
        assert f"`deploy/stacks/{path.name}`" in page
