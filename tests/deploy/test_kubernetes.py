"""The chart: its output is in the files, fits Kubernetes' schemas, has few rights, and limits that follow from L1."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvframework.config.load import load_config
from tests.deploy import manifests
from tests.deploy.manifests import CASES, CHART, HELM, KUBERNETES, containers, documents, in_bytes, pod, rendered
from tests.support.processes import ran

needs_helm = pytest.mark.skipif(not HELM, reason="needs helm, in PATH or as KVFRAMEWORK_HELM")
# The oldest release with sidecars switched on, and a late one.
RELEASES = ("1.29", "1.33")
PODS = [each for each in CASES if each != "monitoring"]
OF_THE_OPERATOR = ("PodMonitor", "PrometheusRule")
# Of Pod Security "restricted".
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def violations(spec: dict[str, Any]) -> list[str]:
    """What Pod Security "restricted" refuses in a pod (https://kubernetes.io/docs/concepts/security/pod-security-standards)."""
    of_pod = spec.get("securityContext", {})
    set_there = {**spec, **of_pod}
    found = [f"{each} is set" for each in ("hostNetwork", "hostPID", "hostIPC", "sysctls") if set_there.get(each)]
    for volume in spec.get("volumes", []):
        found += [f"volume {volume['name']} is {kind}" for kind in set(volume) - {"name"} - VOLUMES]
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


def workload(case: str) -> dict[str, Any]:
    """The one with the server; a DaemonSet that asks for the memory of L1 may follow."""
    return [*documents(case, "DaemonSet"), *documents(case, "Deployment")][0]


@needs_helm
@pytest.mark.parametrize("case", CASES)
def test_the_files_hold_what_the_chart_renders(case: str) -> None:
    """Renew with python -m tests.deploy.manifests."""
    assert documents(case, text=rendered(case)) == documents(case)
    ran(HELM, "lint", "--strict", str(CHART), "--values", f"{manifests.GOLDEN}/{case}.values.yaml")


@needs_helm
def test_the_commands_of_the_readme_give_the_objects() -> None:
    root = manifests.DEPLOY.parent
    section = (root / "README.md").read_text().partition("\n## Kubernetes\n")[2].split("```")[1]
    section = section.replace("\\\n", "").replace("REGISTRY", "registry.example").replace("DIGEST", "0" * 64)
    apply, install, test = section.splitlines()[1:]
    assert (root / apply.removeprefix("kubectl apply -f ")).is_file()
    given = install.removeprefix("helm install").split()
    shown = documents("", text=ran(HELM, "template", "--skip-tests", *given, cwd=root).stdout)
    assert [each["kind"] for each in shown] == [each["kind"] for each in documents("daemonset")]
    assert test == "helm test kvframework -n kvframework"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("release", RELEASES)
def test_every_object_fits_its_schema(case: str, release: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for each in documents(case):
        if each["kind"] not in OF_THE_OPERATOR:
            validate(each, release, strict=True)


@pytest.mark.parametrize("case", PODS)
def test_no_pod_departs_from_restricted_but_by_its_directory(case: str) -> None:
    expected = ["directory adds capabilities", "directory may run as root", "volume socket is hostPath"]
    expected += {"disk": ["volume values-1 is hostPath"], "peers": ["server has a host port"]}.get(case, [])
    assert sorted(violations(pod(workload(case)))) == (
        [] if "engine" in containers(workload(case)) else sorted(expected)
    )
    assert all(each["securityContext"]["readOnlyRootFilesystem"] for each in containers(workload(case)).values())
    (account,) = documents(case, "ServiceAccount")
    assert account["automountServiceAccountToken"] is pod(workload(case))["automountServiceAccountToken"] is False


@pytest.mark.parametrize("case", PODS)
def test_limits_and_mounts_follow_from_the_configuration(case: str, tmp_path: Path) -> None:
    toml, found = manifests.toml(case, tmp_path), containers(workload(case))
    server, config = found["kvframework" if "engine" in found else "server"], load_config(toml)
    served = [f"{each['mountPath']}/" for each in server["volumeMounts"]]
    _, *rooms = documents(case, "DaemonSet") or [None]
    asked = [server["resources"], *(containers(each)["room"]["resources"] for each in rooms)]
    assert sum(in_bytes(each["requests"]["memory"]) for each in asked) == manifests.memory_limit(toml)
    assert in_bytes(server["resources"]["limits"]["memory"]) == manifests.memory_limit(toml)
    endpoints = {each.get("value") for each in found.get("engine", {}).get("env", [])}
    assert config.server.endpoint in (endpoints or {"ipc:///run/kvframework/server.sock"})
    for container in found.values():
        assert ("socket", "/run/kvframework") in [
            (each["name"], each["mountPath"]) for each in container["volumeMounts"]
        ]
    for tier in config.l2:
        files = [each for each in tier.tier.options.values() if isinstance(each, str) and each.startswith("/")]
        assert files
        assert all(file.startswith(tuple(served)) for file in files)


def test_prometheus_reaches_the_pods_and_the_pods_their_tiers() -> None:
    (monitor,) = documents("monitoring", "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    labels = {case: workload(case)["spec"]["template"]["metadata"]["labels"] for case in PODS}
    for case in ("daemonset", "sidecar"):
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels[case].items()
        ports = [port["name"] for each in containers(workload(case)).values() for port in each.get("ports", [])]
        assert ports == [endpoint["port"]]
    for case, ways_in, ways_out in (("daemonset", 1, 0), ("redis", 1, 2), ("peers", 2, 1)):
        (policy,) = (each["spec"] for each in documents(case, "NetworkPolicy"))
        assert policy["podSelector"]["matchLabels"].items() <= labels[case].items()
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert policy["ingress"][0]["ports"] == [{"port": endpoint["port"]}]
        assert (len(policy["ingress"]), len(policy["egress"])) == (ways_in, ways_out)


@pytest.mark.parametrize("case", [each for each in PODS if documents(each, "DaemonSet")])
def test_a_pod_takes_over_where_two_can_run_on_a_node(case: str) -> None:
    server, takes = containers(workload(case))["server"], case not in ("peers", "disk")
    strategy = {"maxSurge": 1, "maxUnavailable": 0} if takes else {"maxUnavailable": 1}
    assert workload(case)["spec"]["updateStrategy"] == {"rollingUpdate": strategy}
    found = ("--takeover" in server["args"], "readinessProbe" in server, len(documents(case, "DaemonSet")) == 2)
    assert found == (takes, takes, takes)


def test_two_releases_share_nothing_of_a_node() -> None:
    assert workload("two")["spec"]["selector"] != workload("daemonset")["spec"]["selector"]
    volumes = (pod(workload(case))["volumes"] for case in ("daemonset", "two"))
    first, second = ({str(each) for each in some if "emptyDir" not in each} for some in volumes)
    assert first.isdisjoint(second)


def test_engines_of_other_charts_mount_what_the_daemonset_serves() -> None:
    texts = [each.read_text() for each in (*(CHART.parent / "engines").iterdir(), manifests.file_of("daemonset"))]
    for shared in ("ipc:///run/kvframework/server.sock", "hostPath: {path: /run/kvframework, type:", "10001"):
        assert all(shared in text for text in texts), shared


@pytest.mark.parametrize("index", range(10))
def test_bad_values_are_refused(index: int) -> None:
    yaml, jsonschema = pytest.importorskip("yaml"), pytest.importorskip("jsonschema")
    schema = jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert not list(schema.iter_errors(values))
    bad = yaml.safe_load((manifests.GOLDEN / "refused.yaml").read_text())[index]
    ((name, value),) = bad["values"].items()
    values[name] = {**values[name], **value} if isinstance(value, dict) else value
    assert [".".join(map(str, each.absolute_path)) for each in schema.iter_errors(values)] == [bad["where"]]


@needs_helm
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("config=[l1]", "use options.server, options.l1 and l1.size"),
        ("options.l1.capacity=1GiB", "options.l1.capacity cannot be set: use l1.size"),
        ("options.server.endpoint=ipc:///tmp/s", "options.server.endpoint cannot be set: use socketDirectory"),
        ("resources.limits.memory=1Gi", "resources.limits.memory cannot be set: use l1.size and l1.headroom"),
        ("tiers[0].use=redis,tiers[0].options.url=redis://kvf:secret@cache", "tiers[0].options.url holds a password"),
        ("image.tag=latest", "a tag that is not latest"),
        ("sidecar.engine.image=vllm/vllm-openai:latest", "a tag that is not latest"),
    ],
)
def test_what_a_schema_cannot_explain_is_refused_with_words(value: str, said: str) -> None:
    assert said in rendered("daemonset", "--set", value, code=1)


@needs_helm
def test_an_upgrade_over_two_releases_changes_nothing_that_cannot_change(tmp_path: Path) -> None:
    chart = Path(shutil.copytree(CHART, tmp_path / "chart"))
    lines = [each for each in (CHART / "Chart.yaml").read_text().splitlines() if "ersion: 0." not in each]
    fixed = set()
    for release in ("0.3.0", "0.4.0", "0.5.0"):
        (chart / "Chart.yaml").write_text("\n".join([*lines, f"version: {release}", f"appVersion: {release}"]))
        objects = [each for each in documents("", text=rendered("two", "--is-upgrade", chart=chart)) if "spec" in each]
        fixed.add(str([(each["kind"], each["metadata"]["name"], each["spec"].get("selector")) for each in objects]))
        assert f"registry.example/kvframework:{release}" in str(objects)
    assert len(fixed) == 1


@pytest.mark.parametrize("folder", manifests.RAW)
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, for kustomize")
def test_kustomize_builds_it(folder: str) -> None:
    built = documents("", text=ran("kubectl", "kustomize", str(KUBERNETES / folder), timeout=120).stdout)
    assert {each["kind"] for each in built} >= {each["kind"] for each in documents(folder)}
