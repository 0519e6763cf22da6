"""What docs/plugins/layouts.md ("layouts.md") tells the author of a layout works as it stands there."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvframework.config import load_config
from kvframework.registry import PluginRegistry, check_config
from tests.core.registry.fake_distributions import install
from tests.docs.shown import blocks, entry_points, prove

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "plugins" / "layouts.md").read_text()


def test_its_layout_package_and_toml_fit_together(site: Path, tmp_path: Path) -> None:
    package, toml = blocks(GUIDE, "toml")
    install(site, "kvf-pair", entry_points(package), {"kvf_pair": blocks(GUIDE, "python")[0]})
    (tmp_path / "kvf.toml").write_text(toml)
    check_config(load_config(tmp_path / "kvf.toml"), PluginRegistry())


@pytest.mark.torch
def test_its_layout_passes_its_proof(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    layout, proof, _, _ = blocks(GUIDE, "python")
    install(tmp_path, "kvf-pair", entry_points(blocks(GUIDE, "toml")[0]), {"kvf_pair": layout})
    (tmp_path / "test_pair.py").write_text(proof)
    assert prove(tmp_path) >= 10


@pytest.mark.torch
def test_its_two_special_memories_pass_their_proof(tmp_path: Path) -> None:
    """x-packed keys, and K and V of different strides."""
    pytest.importorskip("torch")
    _, _, apart, proof = blocks(GUIDE, "python")
    (tmp_path / "kvf_apart.py").write_text(apart)
    (tmp_path / "test_special.py").write_text(proof)
    assert prove(tmp_path) >= 20
