"""What docs/deploy/gpu.md shows is taken: its TOML, its options and log lines."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_a_mistake_in_its_toml_is_told_before_a_missing_driver(tmp_path: Path) -> None:
    file = tmp_path / "kvf.toml"
    file.write_text('[[transport]]\nuse = "cuda_ipc"\npase = 1\n')
    with pytest.raises(ConfigFieldError, match="unknown key 'pase'"):
        check_config(load_config(file, environ={}), PluginRegistry())
