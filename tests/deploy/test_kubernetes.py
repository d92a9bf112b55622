"""The manifests for Kubernetes, as kustomize renders them: valid, confined, and consistent with settings and images."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from kvferry.app.settings.fields import SECRET_NAMES, SETTING_NAMES
from tests.deploy.conftest import ROOT, size

FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("embedded", "vllm")
LABELS = {"app.kubernetes.io/name": "kvferry"}
OPERATOR = "monitoring.coreos.com/v1"
"""Kinds of the Prometheus operator, which are not Kubernetes's own and have no schema here."""
Manifest = dict[str, Any]


class Manifests:
    """The rendered manifests of an overlay."""

    def __init__(self, overlay: str) -> None:
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            pytest.skip("needs kubectl: its `kubectl kustomize` renders the manifests")
        text = subprocess.check_output([kubectl, "kustomize", FOLDER / "overlays" / overlay], text=True)
        self.all: list[Manifest] = list(yaml.safe_load_all(text))

    def named(self, kind: str, name: str = "kvferry") -> Manifest:
        (found,) = (one for one in self.all if (one["kind"], one["metadata"]["name"]) == (kind, name))
        return found

    @property
    def pod(self) -> Manifest:
        return dict(self.named("StatefulSet")["spec"]["template"]["spec"])

    @property
    def engine(self) -> Manifest:
        (container,) = self.pod["containers"]
        return dict(container)


def validate(manifest: Manifest) -> None:
    # Imported late: it compiles grammars for 2 s, in each process that collects tests.
    import kubernetes_validate

    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@pytest.fixture(scope="module", params=OVERLAYS)
def manifests(request: pytest.FixtureRequest) -> Manifests:
    return Manifests(request.param)


def test_manifests_are_valid_by_the_schemas_of_kubernetes(manifests: Manifests) -> None:
    kinds = [one["kind"] for one in manifests.all if one["apiVersion"] != OPERATOR]
    # Without the namespace: deleting what was applied would delete the volume claims in it, too.
    assert {"StatefulSet", "Service", "NetworkPolicy", "PodDisruptionBudget"} == set(kinds)
    for manifest in manifests.all:
        if manifest["apiVersion"] != OPERATOR:
            validate(manifest)
            assert manifest["metadata"].get("namespace", "kvferry") == "kvferry"


def test_pods_are_as_confined_as_the_restricted_standard_wants(manifests: Manifests) -> None:
    namespace = yaml.safe_load((FOLDER / "base" / "namespace.yaml").read_text())
    validate(namespace)
    assert namespace["metadata"]["name"] == "kvferry"
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    pod, engine = manifests.pod, manifests.engine
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert engine["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not pod["automountServiceAccountToken"]
    assert not pod["enableServiceLinks"]
    for image in ("Dockerfile", "deploy/vllm/Dockerfile"):
        assert f"\nUSER {pod['securityContext']['runAsUser']}\n" in (ROOT / image).read_text()


def test_environment_names_settings_and_no_secret_value(manifests: Manifests) -> None:
    mounts = {mount["mountPath"] for mount in manifests.engine["volumeMounts"]}
    for one in manifests.engine["env"]:
        name = one["name"].removeprefix("KVFERRY_").lower()
        if name.endswith("_file"):
            assert name.removesuffix("_file") in SECRET_NAMES
            assert one["value"].rpartition("/")[0] in mounts
        else:
            assert name in SETTING_NAMES
            assert name not in SECRET_NAMES
    (tokens,) = (volume["secret"] for volume in manifests.pod["volumes"] if "secret" in volume)
    assert tokens == {"secretName": "kvferry-tokens", "defaultMode": 0o400}


def test_pool_and_state_are_on_a_volume_that_stays(manifests: Manifests) -> None:
    spec = manifests.named("StatefulSet")["spec"]
    assert set(spec["persistentVolumeClaimRetentionPolicy"].values()) == {"Retain"}
    (claim,) = spec["volumeClaimTemplates"]
    (path,) = (
        mount["mountPath"] for mount in manifests.engine["volumeMounts"] if mount["name"] == claim["metadata"]["name"]
    )
    given = {one["name"]: one.get("value") for one in manifests.engine["env"]}
    assert given["KVFERRY_POOL_KIND"] == "file"
    assert given["KVFERRY_POOL_PATH"] == f"{path}/pool"
    assert given["KVFERRY_ENGINE_NAME"] is None, "the name of the pod, which its volume goes with"
    assert size(claim["spec"]["resources"]["requests"]["storage"]) > size(given["KVFERRY_POOL_BYTES"] or "")
    assert f"\nVOLUME {path}\n" in (ROOT / "Dockerfile").read_text()


def test_memory_limit_covers_the_pool_and_shared_memory(manifests: Manifests) -> None:
    resources = manifests.engine["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    (pool,) = (one["value"] for one in manifests.engine["env"] if one["name"] == "KVFERRY_POOL_BYTES")
    (shm,) = (volume["emptyDir"] for volume in manifests.pod["volumes"] if volume["name"] == "shm")
    assert shm["medium"] == "Memory"
    assert size(pool) + size(shm["sizeLimit"]) < size(resources["limits"]["memory"])
    assert {"name": "shm", "mountPath": "/dev/shm"} in manifests.engine["volumeMounts"]


def test_probes_services_and_policies_use_ports_that_exist(manifests: Manifests) -> None:
    ports = {port["name"]: port["containerPort"] for port in manifests.engine["ports"]}
    given = {one["name"]: one.get("value") for one in manifests.engine["env"]}
    assert ports["metrics"] == int(given["KVFERRY_METRICS_PORT"] or 0)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert manifests.engine[probe]["httpGet"]["port"] in ports
    services = [one for one in manifests.all if one["kind"] == "Service"]
    for service in services:
        assert service["spec"]["selector"] == LABELS
        assert all(ports[port["targetPort"]] == port["port"] for port in service["spec"]["ports"])
    policy = manifests.named("NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == LABELS
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == set(ports)
    selectors = [one["spec"]["selector"]["matchLabels"] for one in manifests.all if "Pod" in one["kind"]]
    assert selectors == [LABELS]


def admitted(manifests: Manifests, port: str) -> Iterator[Manifest]:
    for rule in manifests.named("NetworkPolicy")["spec"]["ingress"]:
        if {"port": port} in rule["ports"]:
            yield from rule["from"]


def test_admin_port_is_open_to_labelled_pods_only(manifests: Manifests) -> None:
    peers = list(admitted(manifests, "admin"))
    assert {"podSelector": {"matchLabels": {"kvferry-access": "admin"}}} in peers
    assert all(
        set(peer) == {"podSelector"} and "kvferry-access" in peer["podSelector"]["matchLabels"] for peer in peers
    )
    (scraper,) = admitted(manifests, "metrics")
    assert set(scraper) == {"namespaceSelector"}


def test_prometheus_scrapes_each_replica_once_with_the_token(manifests: Manifests) -> None:
    monitor = manifests.named("ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    services = [one for one in manifests.all if one["kind"] == "Service"]
    selector = monitor["spec"]["selector"]["matchLabels"].items()
    (service,) = (one for one in services if selector <= one["metadata"].get("labels", {}).items())
    assert "kvferry" in service["metadata"]["name"], "the job's name, by which alerts select"
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["authorization"]["credentials"] == {"name": "kvferry-tokens", "key": "read_token"}


def test_embedded_engine_is_probed_at_health_and_readiness() -> None:
    engine = Manifests("embedded").engine
    assert [engine[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")] == [
        "/healthz",
        "/healthz",
        "/readyz",
    ]
    assert engine["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}


def test_vllm_gets_gpus_and_the_connector() -> None:
    engine = Manifests("vllm").engine
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == engine["resources"]["requests"]["nvidia.com/gpu"] == "1"
    (transfer,) = (word for word in engine["args"] if word.startswith("--kv-transfer-config="))
    assert json.loads(transfer.partition("=")[2])["kv_connector"] == "KVFerryConnector"
    assert 'ENTRYPOINT ["vllm", "serve"]' in (ROOT / "deploy/vllm/Dockerfile").read_text()


def test_dashboard_as_a_config_map_is_the_dashboard() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("needs kubectl: its `kubectl kustomize` renders the manifests")
    folder = ROOT / "deploy" / "grafana"
    found = yaml.safe_load(subprocess.check_output([kubectl, "kustomize", folder], text=True))
    validate(found)
    assert found["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert json.loads(found["data"]["kvferry.json"]) == json.loads((folder / "kvferry.json").read_text())
