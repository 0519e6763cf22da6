"""The manifests below deploy/kubernetes, and the memory that a server's configuration asks of its container."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvframework.api.plugin import ByteSize
from kvframework.config.load import load_config

KUBERNETES = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
# docs/sizing.md says it: 80 MB for the server, the rest for messages under way and what tiers hold.
BESIDE_L1 = ByteSize.parse("512MiB")


def memory_limit(toml: Path) -> int:
    """The bytes that the container of a server with this configuration is allowed."""
    return ByteSize.parse(load_config(toml).l1.memory.options["capacity"]) + BESIDE_L1


def in_bytes(quantity: str) -> int:
    """A quantity of Kubernetes or compose. Only whole MiB and GiB are in use."""
    units = {"Mi": 1 << 20, "Gi": 1 << 30, "m": 1 << 20, "g": 1 << 30}
    unit = quantity.lstrip("0123456789")
    return int(quantity.removesuffix(unit)) * units[unit]


def documents(folder: Path, kind: str = "") -> list[dict[str, Any]]:
    """The objects in the files of a kustomization, of one kind if it is named."""
    yaml = pytest.importorskip("yaml")
    named = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    files = [folder / each for each in named if each.endswith(".yaml")]
    found = [document for file in files for document in yaml.safe_load_all(file.read_text())]
    return [each for each in found if kind in ("", each["kind"])]


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def containers(workload: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every container of a workload's pod by its name."""
    spec = pod(workload)
    return {each["name"]: each for each in [*spec.get("initContainers", []), *spec["containers"]]}
