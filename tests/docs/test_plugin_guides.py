"""What docs/plugins tells the authors of memories, eviction policies, hashers, codecs and listeners works."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvframework.api import hookspecs
from tests.core.registry.fake_distributions import install
from tests.core.registry.test_hook_examples import example
from tests.docs import shown

PLUGINS = Path(__file__).resolve().parents[2] / "docs" / "plugins"
GUIDES: dict[str, Callable[[], object]] = {
    "memory.md": hookspecs.kvf_memories,
    "eviction.md": hookspecs.kvf_eviction_policies,
    "hashers.md": hookspecs.kvf_key_hashers,
    "codecs.md": hookspecs.kvf_codecs,
    "listeners.md": hookspecs.kvf_listeners,
}


def blocks(guide: str, language: str) -> list[str]:
    return shown.blocks((PLUGINS / guide).read_text(), language)


@pytest.mark.parametrize("guide", GUIDES)
def test_its_plugin_is_the_hooks_example(guide: str) -> None:
    entry_point, code = example(GUIDES[guide])
    assert blocks(guide, "python")[0].strip() == code.strip()
    (package,) = blocks(guide, "toml")
    assert f'"{entry_point}" = "{saved_as(guide)[0]}"' in package


@pytest.mark.parametrize("guide", GUIDES)
def test_its_plugin_package_and_proof_work_together(guide: str, tmp_path: Path) -> None:
    plugin, proof = blocks(guide, "python")
    (package,) = blocks(guide, "toml")
    module, test = saved_as(guide)
    install(tmp_path, "guide", shown.entry_points(package), {module: plugin})
    (tmp_path / f"{test}.py").write_text(proof)
    assert shown.prove(tmp_path) >= {"memory.md": 8, "listeners.md": 4}.get(guide, 10)


def saved_as(guide: str) -> list[str]:
    """The names of the modules that it says to save."""
    return re.findall(r"[Ss]ave\s+(?:it|this)\s+as\s+`(\w+)\.py`", (PLUGINS / guide).read_text())
