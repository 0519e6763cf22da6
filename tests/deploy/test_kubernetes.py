"""The manifests: valid by Kubernetes' own schemas, no more rights than they say, limits that follow from L1."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from kvframework.config.load import load_config
from tests.deploy.manifests import KUBERNETES, containers, documents, in_bytes, memory_limit, pod
from tests.support.processes import ran

FOLDERS = ("sidecar", "daemonset", "monitoring")
# The oldest release with sidecars switched on, and a late one.
RELEASES = ("1.29", "1.33")
OF_THE_OPERATOR = ("ServiceMonitor", "PrometheusRule")
# Of Pod Security "restricted".
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def violations(spec: dict[str, Any]) -> list[str]:
    """What Pod Security "restricted" refuses in a pod (https://kubernetes.io/docs/concepts/security/pod-security-standards)."""
    found = [f"{each} is set" for each in ("hostNetwork", "hostPID", "hostIPC") if spec.get(each)]
    for volume in spec.get("volumes", []):
        found += [f"volume {volume['name']} is {kind}" for kind in set(volume) - {"name"} - VOLUMES]
    of_pod = spec.get("securityContext", {})
    if of_pod.get("sysctls"):
        found.append("sysctls are set")
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        context, name = {**of_pod, **container.get("securityContext", {})}, container["name"]
        capabilities = context.get("capabilities", {})
        checks = {
            "is privileged": not context.get("privileged", False),
            "escalates": context.get("allowPrivilegeEscalation") is False,
            "keeps capabilities": capabilities.get("drop") == ["ALL"],
            "adds capabilities": set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
            "may run as root": context.get("runAsNonRoot") is True and context.get("runAsUser", 1) != 0,
            "has no seccomp profile": context.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "has a host port": not any(port.get("hostPort") for port in container.get("ports", [])),
            "changes SELinux or /proc": not {"seLinuxOptions", "procMount"} & set(context),
        }
        found += [f"{name} {what}" for what, right in checks.items() if not right]
    return found


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("release", RELEASES)
def test_every_object_fits_its_schema(folder: str, release: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    objects = [each for each in documents(KUBERNETES / folder) if each["kind"] not in OF_THE_OPERATOR]
    assert objects
    for each in objects:
        validate(each, release, strict=True)


def test_the_pod_with_a_sidecar_passes_restricted() -> None:
    (engine,) = documents(KUBERNETES / "sidecar", "Deployment")
    assert violations(pod(engine)) == []
    assert containers(engine)["kvframework"]["restartPolicy"] == "Always"
    assert all(each["securityContext"]["readOnlyRootFilesystem"] for each in containers(engine).values())


def test_the_daemonset_departs_from_restricted_only_for_its_directory() -> None:
    (daemonset,) = documents(KUBERNETES / "daemonset", "DaemonSet")
    expected = ["volume socket is hostPath", "directory adds capabilities", "directory may run as root"]
    assert violations(pod(daemonset)) == expected
    (namespace,) = documents(KUBERNETES / "daemonset", "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda spec: spec.update(hostIPC=True), ["hostIPC is set"]),
        (lambda spec: spec["volumes"].append({"name": "shm", "hostPath": {}}), ["volume shm is hostPath"]),
        (lambda spec: spec["securityContext"].pop("seccompProfile"), ["a has no seccomp profile"]),
        (lambda spec: spec["containers"][0].pop("securityContext"), ["a escalates", "a keeps capabilities"]),
    ],
)
def test_violations_are_found(spoil: Any, expected: list[str]) -> None:
    least = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    spec = {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{"name": "a", "securityContext": least}],
        "volumes": [],
    }
    assert violations(spec) == []
    spoil(spec)
    assert violations(spec) == expected


@pytest.mark.parametrize(
    ("folder", "kind", "name"), [("sidecar", "Deployment", "kvframework"), ("daemonset", "DaemonSet", "server")]
)
def test_the_memory_limit_follows_from_l1(folder: str, kind: str, name: str) -> None:
    (workload,) = documents(KUBERNETES / folder, kind)
    resources = containers(workload)[name]["resources"]
    assert in_bytes(resources["limits"]["memory"]) == memory_limit(KUBERNETES / folder / "kvf.toml")
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


@pytest.mark.parametrize(("folder", "kind"), [("sidecar", "Deployment"), ("daemonset", "DaemonSet")])
def test_the_socket_lies_in_the_volume_that_is_shared(folder: str, kind: str) -> None:
    (workload,) = documents(KUBERNETES / folder, kind)
    endpoint = load_config(KUBERNETES / folder / "kvf.toml").server.endpoint
    assert endpoint.startswith("ipc:///run/kvframework/")
    for name, container in containers(workload).items():
        assert {"socket": "/run/kvframework"}.items() <= {
            m["name"]: m["mountPath"] for m in container["volumeMounts"]
        }.items(), name
        assert {each["value"] for each in container.get("env", []) if each["name"] == "KVFRAMEWORK_ENDPOINT"} <= {
            endpoint
        }


def test_prometheus_finds_the_pods_of_both_forms() -> None:
    (service,) = documents(KUBERNETES / "monitoring", "Service")
    (monitor,) = documents(KUBERNETES / "monitoring", "ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [each["port"] for each in monitor["spec"]["endpoints"]] == [
        each["name"] for each in service["spec"]["ports"]
    ]
    for folder, kind in (("sidecar", "Deployment"), ("daemonset", "DaemonSet")):
        (workload,) = documents(KUBERNETES / folder, kind)
        assert service["spec"]["selector"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()
        ports = [port["name"] for each in containers(workload).values() for port in each.get("ports", [])]
        assert ports == [service["spec"]["ports"][0]["targetPort"]]


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, for kustomize")
def test_kustomize_builds_it(folder: str) -> None:
    yaml = pytest.importorskip("yaml")
    built = ran("kubectl", "kustomize", str(KUBERNETES / folder), timeout=120)
    objects = list(yaml.safe_load_all(built.stdout))
    named = {each["metadata"]["name"] for each in objects if each["kind"] == "ConfigMap"}
    assert len(named) == 1
    for each in objects:
        if each["kind"] in ("Deployment", "DaemonSet"):
            mounted = {volume["configMap"]["name"] for volume in pod(each)["volumes"] if "configMap" in volume}
            assert mounted == named
            assert {c["image"].split("/")[0] for c in containers(each).values()} == {"registry.example"}
