"""What docs/plugins/tiers.md tells the author of a tier works as it stands there."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvframework.api import TIER_CAPABILITIES, Finding, hookspecs
from kvframework.testing import TierConformance
from kvframework.testing.faults import WIRE_FAULTS
from kvframework.testing.tier import TierKit
from tests.plugins.fake_distributions import install
from tests.plugins.test_hook_examples import example

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "plugins" / "tiers.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def test_its_tier_is_the_hooks_example() -> None:
    assert blocks("python")[0].strip() == example(hookspecs.kvf_tiers)[1].strip()


def test_python_blocks_compile() -> None:
    for code in blocks("python"):
        compile(code, "tiers.md", "exec")


def test_its_tier_package_and_proof_work_together(tmp_path: Path) -> None:
    tier, proof, *_ = blocks("python")
    (package,) = blocks("toml")
    entry_points = dict(re.findall(r'^"([\w.]+)" = "(\w+)"$', package, re.MULTILINE))
    assert entry_points == {"tier.dict": "kvf_dict"}
    install(tmp_path, "kvf-dict", entry_points, {"kvf_dict": tier})
    (tmp_path / "test_dict.py").write_text(proof)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--rootdir", "."]
    done = subprocess.run(
        [*command, "-c", os.devnull],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > 80


def test_its_package_builds_a_wheel_of_the_module() -> None:
    (package,) = blocks("toml")
    assert 'py-modules = ["kvf_dict"]' in package
    assert 'requires-python = ">=3.10"' in package


def test_its_diagnosis_gives_findings(tmp_path: Path) -> None:
    (code,) = [block for block in blocks("python") if "def diagnose" in block]
    names: dict[str, Any] = {}
    exec(code, names)
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
    for name, meaning in {**TIER_CAPABILITIES, **WIRE_FAULTS}.items():
        assert f"| `{name}` | {meaning} |" in GUIDE
