"""The files of `docker compose`: valid, confined, and made of settings, files and secrets that exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from starlette.types import Receive, Scope, Send

from kvferry.app.settings.fields import SETTING_NAMES
from tests.deploy.conftest import PROMETHEUS, ROOT, size
from tests.harness.debian import installed
from tests.harness.http_server import serve
from tests.harness.server_process import free_port
from tests.harness.waiting import DEADLINE_S, wait_until

STACK = ROOT / "deploy" / "compose"
FILES = {"embedded": ROOT / "compose.yaml", "vllm": STACK / "compose.yaml"}
VARIABLE = re.compile(r"\$\{\w+:-([^}]*)\}")


def compose(name: str) -> dict[str, Any]:
    """A file with the defaults of its variables."""
    found: dict[str, Any] = yaml.safe_load(VARIABLE.sub(r"\1", FILES[name].read_text()))
    return found


def services() -> list[tuple[str, str, dict[str, Any]]]:
    return [(file, name, service) for file in FILES for name, service in compose(file)["services"].items()]


@pytest.mark.long
def test_files_are_valid_by_the_specification_of_compose() -> None:
    schema = (sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec")
    done = subprocess.run([*schema, *FILES.values()], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "name", "service"), services(), ids=lambda part: part if isinstance(part, str) else ""
)
def test_each_service_is_confined_and_published_on_loopback(file: str, name: str, service: dict[str, Any]) -> None:
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert size(service["deploy"]["resources"]["limits"]["memory"]) > 0
    assert service["ports"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    whole = compose(file)
    for secret in service["secrets"]:
        assert whole["secrets"][secret]["file"] == f"./secrets/{secret}"
    for volume in service["volumes"]:
        source, path, *_ = volume.split(":")
        assert path.startswith("/")
        assert (FILES[file].parent / source).exists() if source.startswith(".") else source in whole["volumes"]
    for setting, value in service.get("environment", {}).items():
        if "/run/secrets/" in value:
            assert value.removeprefix("/run/secrets/") in service["secrets"]
            setting = setting.removesuffix("_FILE")
        if setting.startswith("KVFERRY_"):
            assert setting.removeprefix("KVFERRY_").lower() in SETTING_NAMES


def test_vllm_gets_gpus_locked_memory_and_the_connector() -> None:
    vllm = compose("vllm")["services"]["vllm"]
    (device,) = vllm["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert vllm["ulimits"] == {"memlock": -1}
    pool = size(vllm["environment"]["KVFERRY_POOL_BYTES"])
    assert size(vllm["shm_size"]) > pool
    assert size(vllm["deploy"]["resources"]["limits"]["memory"]) > pool
    (transfer,) = (word for word in vllm["command"] if word.startswith("--kv-transfer-config="))
    given = json.loads(transfer.partition("=")[2])
    assert given == {"kv_connector": "KVFerryConnector", "kv_role": "kv_both"}
    assert (FILES["vllm"].parent / vllm["build"]["context"] / vllm["build"]["dockerfile"]).exists()


def test_volume_and_user_of_vllm_are_those_of_its_image() -> None:
    image = (ROOT / "deploy" / "vllm" / "Dockerfile").read_text()
    _, _, path = compose("vllm")["services"]["vllm"]["volumes"][0].partition(":")
    assert f"\nVOLUME {path}\n" in image
    assert "\nUSER 10001\n" in image
    for name, value in re.findall(r"^(?:ENV|   ) (\w+)=(/\S+?)(?: \\)?$", image, re.MULTILINE):
        assert Path(value).is_relative_to(path), f"{name}: the root is read-only"
    packages = {word for line in re.findall(r"^COPY (.*)$", image, re.MULTILINE) for word in line.split()}
    assert {"app", "core", "cuda_ops", "migrations", "__init__.py"} < packages


def test_prometheus_scrapes_the_addresses_that_compose_opens(tmp_path: Path) -> None:
    vllm, prometheus = (compose("vllm")["services"][name] for name in ("vllm", "prometheus"))
    config = yaml.safe_load((STACK / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    metrics_port = vllm["environment"]["KVFERRY_METRICS_PORT"]
    assert jobs["kvferry"]["static_configs"] == [{"targets": [f"vllm:{metrics_port}"]}]
    (secret,) = prometheus["secrets"]
    assert jobs["kvferry"]["authorization"] == {"credentials_file": f"/run/secrets/{secret}"}
    assert set(vllm["networks"]) & set(prometheus["networks"])
    promtool = installed("promtool", "prometheus")
    shutil.copy(PROMETHEUS / "alerts.yml", tmp_path)
    (tmp_path / "prometheus.yml").write_text((STACK / "prometheus.yml").read_text().replace("/run/secrets/", ""))
    (tmp_path / secret).write_text("token")
    done = subprocess.run([promtool, "check", "config", "prometheus.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


async def large(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer `ok` once the body has been read."""
    while (await receive()).get("more_body", False):
        continue
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("openssl") is None, reason="needs root, to give files away, and openssl"
)
def test_proxy_passes_calls_within_its_limits_only(tmp_path: Path) -> None:
    nginx, port = installed("nginx", "nginx-light"), free_port()
    upstream = compose("vllm")["services"]["vllm"]["ports"][1].rpartition(":")[2]
    shutil.copy(STACK / "secrets.sh", tmp_path)
    subprocess.run([tmp_path / "secrets.sh"], check=True)
    with serve(large) as running:
        text = (STACK / "nginx.conf").read_text()
        for given, used in (
            ("/tmp/", f"{tmp_path}/"),
            ("/run/secrets", str(tmp_path / "secrets")),
            (f"http://vllm:{upstream}", running.url),
            ("listen 8443", f"listen 127.0.0.1:{port}"),
        ):
            assert given in text
            text = text.replace(given, used)
        (tmp_path / "nginx.conf").write_text(text)
        command = [nginx, "-c", str(tmp_path / "nginx.conf"), "-e", "stderr", "-g", "daemon off; user root;"]
        with subprocess.Popen(command) as process:
            try:
                with httpx.Client(
                    base_url=f"https://127.0.0.1:{port}", verify=False, trust_env=False, timeout=DEADLINE_S
                ) as client:
                    wait_until(lambda: process.poll() is not None or answers(client), "the proxy answers")
                    assert client.post("/", content=b"x" * (15 << 20)).text == "ok"
                    assert client.post("/", content=b"x" * (17 << 20)).status_code == 413
                    assert client.get("/", headers={"X": "y" * 70_000}).status_code == 400
                    assert 429 in [client.get("/").status_code for _ in range(100)]
            finally:
                process.terminate()


def answers(client: httpx.Client) -> bool:
    with suppress(httpx.ConnectError):
        return client.get("/").text == "ok"
    return False


def test_grafana_is_provisioned_with_dashboard_and_data_source() -> None:
    grafana = compose("vllm")["services"]["grafana"]
    mounts = {target: source for source, target, *_ in (volume.split(":") for volume in grafana["volumes"])}
    (source,) = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/kvferry.yaml").read_text())[
        "providers"
    ]
    assert mounts[f"{provider['options']['path']}/kvferry.json"] == "../grafana/kvferry.json"


@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("openssl") is None, reason="needs root, to give files away, and openssl"
)
def test_secrets_are_made_once_and_readable_by_their_container_only(tmp_path: Path) -> None:
    shutil.copy(STACK / "secrets.sh", tmp_path)
    subprocess.run([tmp_path / "secrets.sh"], check=True)
    made = {path.name: path for path in (tmp_path / "secrets").iterdir()}
    assert made.keys() == compose("vllm")["secrets"].keys()
    contents = {name: path.read_text() for name, path in made.items()}
    assert all((len(text.strip()) == 64) != ("-----BEGIN " in text) for text in contents.values())
    assert contents["prometheus_read_token"] == contents["read_token"] != contents["admin_token"]
    users = {"prometheus_read_token": 65534, "grafana_password": 472, "proxy_key": 101, "proxy_certificate": 101}
    for name, path in made.items():
        assert (path.stat().st_mode & 0o777, path.stat().st_uid) == (0o600, users.get(name, 10001)), name
    subprocess.run([tmp_path / "secrets.sh"], check=True)
    assert {name: path.read_text() for name, path in made.items()} == contents
