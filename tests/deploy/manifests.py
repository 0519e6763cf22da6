"""What the chart renders: the manifests below deploy/kubernetes, and the files in `golden`, where each case has its
values. `python -m tests.deploy.manifests` writes them, with the helm of KVFRAMEWORK_HELM or of PATH."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvframework.api.plugin import ByteSize
from kvframework.config.load import load_config
from tests.support.processes import ran

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART, KUBERNETES = DEPLOY / "helm" / "kvframework", DEPLOY / "kubernetes"
GOLDEN = Path(__file__).with_name("golden")
HELM = os.environ.get("KVFRAMEWORK_HELM") or shutil.which("helm") or ""
RAW = ("daemonset", "sidecar", "monitoring")
CASES = (*RAW, "disk", "gpu", "peers", "redis", "replicas", "two")


def file_of(case: str) -> Path:
    return KUBERNETES / case / "kvframework.yaml" if case in RAW else GOLDEN / f"{case}.yaml"


def rendered(case: str, *arguments: str, chart: Path = CHART, code: int | None = 0) -> str:
    """What helm prints for a case, both streams where it fails."""
    release, given = "batch" if case == "two" else "kvframework", ["--values", f"{GOLDEN}/{case}.values.yaml"]
    given += ["--skip-tests"] if case in RAW else []
    given += ["--show-only", "templates/monitoring.yaml"] if case == "monitoring" else []
    command = (HELM, "template", release, str(chart), "--namespace", release, *given, *arguments)
    done = ran(*command, code=code, timeout=120)
    return done.stdout if code == 0 else done.stdout + done.stderr


def documents(case: str, kind: str = "", text: str = "") -> list[dict[str, Any]]:
    """The objects of a case, or of a text, of one kind if it is named."""
    yaml = pytest.importorskip("yaml")
    found = [each for each in yaml.safe_load_all(text or file_of(case).read_text()) if each]
    return [each for each in found if kind in ("", each["kind"])]


def toml(case: str, folder: Path) -> Path:
    """The configuration of a case's server, as a file in the folder."""
    (config,) = documents(case, "ConfigMap")
    file = folder / f"{case}.toml"
    file.write_text(config["data"]["kvf.toml"])
    return file


def memory_limit(toml: Path) -> int:
    """What a server's container is allowed: docs/sizing.md has the bytes beside L1."""
    return ByteSize.parse(load_config(toml).l1.memory.options["capacity"]) + ByteSize.parse("512MiB")


def in_bytes(quantity: str) -> int:
    """A quantity of Kubernetes or compose. Only whole MiB and GiB are in use."""
    units = {"Mi": 1 << 20, "Gi": 1 << 30, "m": 1 << 20, "g": 1 << 30}
    unit = quantity.lstrip("0123456789")
    return int(quantity.removesuffix(unit)) * units[unit]


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def containers(workload: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every container of a workload's pod by its name."""
    spec = pod(workload)
    return {each["name"]: each for each in [*spec.get("initContainers", []), *spec["containers"]]}


if __name__ == "__main__":
    for each in CASES:
        file_of(each).write_text(rendered(each))
