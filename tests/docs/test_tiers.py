"""What docs/plugins/tiers.md tells the author of a tier works as it stands there."""

from __future__ import annotations

import inspect
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

from kvf_dev.testing import TierConformance
from kvf_dev.testing.faults import WIRE_FAULTS
from kvf_dev.testing.tier import TierKit
from kvframework.api import hookspecs
from kvframework.api.plugin import Finding
from kvframework.api.tier import OPTIONAL_METHODS
from tests.core.registry.fake_distributions import install
from tests.core.registry.test_hook_examples import example
from tests.docs.shown import blocks, entry_points, prove

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "plugins" / "tiers.md").read_text()


def test_its_tier_is_the_hooks_example() -> None:
    assert blocks(GUIDE, "python")[0].strip() == example(hookspecs.kvf_tiers)[1].strip()


def test_its_tier_package_and_proof_work_together(tmp_path: Path) -> None:
    tier, proof, *_ = blocks(GUIDE, "python")
    (package,) = blocks(GUIDE, "toml")
    assert entry_points(package) == {"tier.dict": "kvf_dict"}
    install(tmp_path, "kvf-dict", entry_points(package), {"kvf_dict": tier})
    (tmp_path / "test_dict.py").write_text(proof)
    assert prove(tmp_path) > 80


def test_its_diagnosis_gives_findings(tmp_path: Path) -> None:
    (code,) = [block for block in blocks(GUIDE, "python") if "def diagnose" in block]
    (tmp_path / "shown.py").write_text(code)
    names = run_path(str(tmp_path / "shown.py"))
    for capacity, level in ((1, "ok"), (1 << 62, "warn")):
        (found,) = names["diagnose"](SimpleNamespace(path=str(tmp_path), capacity=capacity), None, 0.0)
        assert isinstance(found, Finding)
        assert found.level == level


def test_it_names_all_that_the_kit_takes() -> None:
    attributes = [name for name in inspect.get_annotations(TierKit) if not name.startswith("_")]
    fixtures = ["tier_options", "tier", "ttl_tier", "small_tier", "faulty_tier"]
    for name in attributes + fixtures:
        assert f"| `{name}` |" in GUIDE
        assert f"`{name}`" in (TierConformance.__doc__ or "")
    for name in attributes:
        default = repr(getattr(TierKit, name)).replace("'", '"')
        assert f"| `{name}` | `{default}` |" in GUIDE


def test_its_tables_are_complete() -> None:
    for name, meaning in WIRE_FAULTS.items():
        assert f"| `{name}` | {meaning} |" in GUIDE
    for name in OPTIONAL_METHODS:
        assert f"| `{name}` |" in GUIDE
