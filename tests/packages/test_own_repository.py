"""Each first-party plugin could move to a repository of its own as it is, those of the core's wheel, too: its folder
beside a pyproject is enough."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.api.surface import MODULES
from tests.core.registry.fake_distributions import install

ROOT = Path(__file__).resolve().parents[2]
ENTRY_POINTS: dict[str, dict[str, str]] = defaultdict(dict)
for _file in [
    ROOT / "pyproject.toml",
    *sorted([*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("plugins/*/*/pyproject.toml")]),
]:
    for _name, _module in re.findall(r'^"([\w.]+)" = "(kvf_\w+)"$', _file.read_text(), re.MULTILINE):
        ENTRY_POINTS[_module][_name] = _module
ENTRY_POINTS["kvf_devices"] = {}  # above the drivers: no plugin of its own
ENTRY_POINTS["kvf_helper_tier"] = {}  # beside the tiers: no plugin itself
# What the pyproject of each would depend on, beside kvframework and what comes with it.
DEPENDENCIES = {
    "kvf_blend": {"torch", "transformers", "kvf_transformers"},
    "kvf_codecs": {"numpy", "xxhash", "zstandard"},
    "kvf_cpu_gather": {"torch"},
    "kvf_cuda_ipc": {"cuda"},
    "kvf_devices": {"torch"},
    "kvf_events": {"xxhash", "zmq"},
    "kvf_layouts": {"torch"},
    "kvf_mooncake": {"mooncake", "xxhash"},
    "kvf_peers": {"redis"},
    "kvf_redis": {"redis"},
    "kvf_s3": {"obstore", "xxhash"},
}
# Those with a half in the engine, which is a client.
CLIENTS = {"kvf_blend"}
ALLOWED = {*sys.stdlib_module_names, "msgspec"}
LOAD = """
import json, sys
sys.path[:0] = [sys.argv[1]]
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.discovery import discover
registry = PluginRegistry([offer for offer in discover() if not offer.distribution.startswith("kvframework")])
found = {}
for info in registry.list():
    _, provider = registry.describe(info.kind, info.name)
    found[f"{info.kind}.{info.name}"] = [info.distribution, provider is not None and provider.name]
files = {name: module.__file__ for name, module in sys.modules.items() if name.startswith("kvf_")}
print(json.dumps([found, files]))
"""


def folder(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module if node.module and not node.level else "." * node.level


def foreign(folder: Path) -> set[str]:
    """What a plugin imports that a distribution of its own would not have."""
    own = {folder.name, *DEPENDENCIES.get(folder.name, ())}
    public = set(MODULES) if folder.name in CLIENTS else set(MODULES) - {"kvframework.client"}
    return {
        name
        for file in folder.rglob("*.py")
        for name in imports(file)
        if name not in public and name.partition(".")[0] not in ALLOWED | own
    }


@pytest.mark.parametrize("module", ENTRY_POINTS)
def test_it_imports_what_a_third_party_may(module: str) -> None:
    assert foreign(folder(module)) == set()


def test_all_load_from_distributions_of_their_own(tmp_path: Path) -> None:
    """Beside a kvframework whose copies are shadowed."""
    for module, entry_points in ENTRY_POINTS.items():
        shutil.copytree(folder(module), tmp_path / module, ignore=shutil.ignore_patterns("__pycache__"))
        install(tmp_path, module.replace("_", "-"), entry_points)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found, files = json.loads(done.stdout)
    expected = {
        name: [module.replace("_", "-"), name.partition(".")[2]]
        for each in ENTRY_POINTS.values()
        for name, module in each.items()
    }
    assert {name: told for name, told in found.items() if name in expected} == expected
    assert set(ENTRY_POINTS) <= set(files)
    assert all(file.startswith(str(tmp_path)) for file in files.values()), files
