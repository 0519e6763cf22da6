"""What docs/deploy/gpu.md shows is taken: its TOML, its options and log lines; its containers agree with its TOML."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvf_cuda_ipc import kvf_transports
from kvframework.config import Config, load_config
from kvframework.doctor.machine import nodes
from kvframework.errors import ConfigFieldError, KVFrameworkError
from kvframework.registry import PluginRegistry, check_config, describe_options
from tests.core.doctor.sysfs import sysfs
from tests.docs.shown import blocks
from tests.docs.test_operations import PATTERNS

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "deploy" / "gpu.md"
PAGE = FILE.read_text()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (text,) = blocks(PAGE, "toml")
    file = tmp_path / "kvf.toml"
    file.write_text(text)
    return load_config(file, environ={})


def test_its_toml_is_accepted(config: Config) -> None:
    registry = PluginRegistry()
    (provider,) = kvf_transports()
    (cuda_ipc, cpu_gather) = config.transport
    assert (cuda_ipc.use, cpu_gather.use) == ("cuda_ipc", "cpu_gather")
    registry.options(provider, cuda_ipc.options, where=cuda_ipc.where)
    memory = registry.resolve("memory", config.l1.memory.use, where="[l1]")
    assert registry.options(memory, config.l1.memory.options, where="[l1]").numa == "auto"


def test_every_option_of_the_transport_is_told_and_no_other() -> None:
    (provider,) = kvf_transports()
    section = PAGE.split("\n## Options\n")[1].split("\n## ")[0]
    told = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    assert {name for cell in told for name in re.findall(r"`(\w+)`", cell)} == {
        each.name for each in describe_options(provider.options)
    }


@pytest.mark.parametrize("line", re.findall(r"\b[SE]: `([^`]+)`", PAGE))
def test_every_log_line_can_be_said(line: str) -> None:
    assert any(pattern.fullmatch(line) for pattern in PATTERNS), line


def test_every_check_and_error_code_it_names_exists(tmp_path: Path) -> None:
    machine = sysfs(tmp_path, "0-1", cpus={0: "0", 1: "1"})
    checks = {each.id for each in nodes(machine)} | {"pinned.numa"}
    assert set(re.findall(r"`((?:numa|pinned)\.\w+)`", PAGE)) <= checks
    assert set(re.findall(r"\[((?:device|plugin)\.\w+)\](?!\()", PAGE)) <= KVFrameworkError._by_code.keys()


# containers


def test_dockers_containers_share_what_the_page_says(config: Config) -> None:
    docker, _ = blocks(PAGE, "bash")
    install, server, engine = (shlex.split(line) for line in docker.replace("\\\n", " ").strip().splitlines())
    for command in (server, engine):
        assert {"--ipc=host", "--pid=host"} <= set(command)
        assert f"{install[-1]}:{install[-1]}" in command, "the directory of the socket"
        assert command[command.index("--user") + 1] == f"{install[install.index('-o') + 1]}:1000"
    assert f"KVFRAMEWORK_ENDPOINT={config.server.endpoint}" in engine
    assert config.server.endpoint.startswith(f"ipc://{install[-1]}/")
    assert server[server.index("IMAGE") + 1 :] == shlex.split("kvframework hold -- --config /etc/kvframework/kvf.toml")


def test_the_pods_containers_share_what_the_page_says(config: Config) -> None:
    yaml = pytest.importorskip("yaml", reason="there is no PyYAML")
    (text,) = blocks(PAGE, "yaml")
    spec: dict[str, Any] = yaml.safe_load(text)["spec"]
    server, engine = spec["containers"]
    assert spec["shareProcessNamespace"] is True
    mounted = [
        {each["name"]: each["mountPath"] for each in container["volumeMounts"]} for container in (server, engine)
    ]
    assert mounted[0]["run"] == mounted[1]["run"]
    # Everybody may write to an emptyDir, so the server makes a directory of its own in it.
    assert Path(config.server.endpoint.removeprefix("ipc://")).parent.parent == Path(mounted[0]["run"])
    assert {"name": "KVFRAMEWORK_ENDPOINT", "value": config.server.endpoint} in engine["env"]
    assert {each["name"] for each in spec["volumes"]} == set(mounted[0])
    gibibytes = int(server["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert gibibytes > int(config.l1.memory.options["capacity"].removesuffix("GiB")), "L1 + 512 MiB"


def test_a_mistake_in_its_toml_is_told_before_a_missing_driver(tmp_path: Path) -> None:
    file = tmp_path / "kvf.toml"
    file.write_text('[[transport]]\nuse = "cuda_ipc"\npase = 1\n')
    with pytest.raises(ConfigFieldError, match="unknown key 'pase'"):
        check_config(load_config(file, environ={}), PluginRegistry())
