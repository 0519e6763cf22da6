"""Each folder of plugins/ but `defaults` is a distribution of this release, laid out as one of a third party. What is
under test: in tox the installed wheel, never the checkout. `kvframework.testing` still names the kits, with a warning,
until release 0.4. Each first-party plugin could move to a repository of its own as it is, those of the core's wheel,
too: its folder beside a pyproject is enough."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kvf_demo
import kvf_redis
import kvframework
from kvframework import __version__
from kvframework.api.installing import SOURCES
from kvframework.cli.commands import KNOWN
from kvframework.registry.discovery import ENTRY_POINT_GROUP, FIRST_PARTY
from tests.core.api.surface import MODULES
from tests.core.registry.fake_distributions import install

ROOT = Path(__file__).resolve().parents[2]
# Python 3.11 has it.
tomllib = pytest.importorskip("tomllib")
PROJECTS = sorted([*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("plugins/*/*/pyproject.toml")])
MINOR = ".".join(__version__.split(".")[:2])
RANGE = str(Requirement(f"kvframework>={MINOR}.0.dev0,<0.{int(MINOR.split('.')[1]) + 1}").specifier)
# They run the core's own storage.
EXACT = {"kvframework-dev", "kvframework-plan"}

pytestmark = pytest.mark.skipif(not PROJECTS, reason="no checkout")


def project(file: Path) -> dict[str, object]:
    found: dict[str, object] = tomllib.loads(file.read_text())["project"]
    return found


@pytest.mark.parametrize("file", PROJECTS, ids=lambda file: file.parent.name)
def test_it_has_the_release_of_the_core_and_says_which_cores_it_takes(file: Path) -> None:
    found = project(file)
    assert found["version"] == __version__
    needed = {each.name: each for each in map(Requirement, found["dependencies"])}  # type: ignore[arg-type]
    own = {name: str(each.specifier) for name, each in needed.items() if name.startswith("kvframework")}
    core = f"=={__version__}" if found["name"] in EXACT else RANGE
    assert own == dict.fromkeys(own, RANGE) | {"kvframework": core}


@pytest.mark.parametrize("file", PROJECTS, ids=lambda file: file.parent.name)
def test_it_has_one_import_package_and_a_readme(file: Path) -> None:
    (package,) = (each for each in file.parent.iterdir() if each.is_dir() and each.name.startswith("kvf_"))
    assert f'packages = ["{package.name}"]' in file.read_text()
    assert (package / "py.typed").exists()
    assert re.match(r"# \S+", file.with_name("README.md").read_text())


def test_all_are_known_to_the_hints() -> None:
    folders = {f"DIR-OF-CLONE/{file.parent.relative_to(ROOT)}": project(file)["name"] for file in PROJECTS}
    assert folders == {source: name for name, source in SOURCES.items() if "/plugins/" in source}


def test_every_command_and_plugin_names_its_distribution() -> None:
    commands, plugins = {}, {}
    for file in PROJECTS:
        found = project(file)
        groups: dict[str, dict[str, str]] = found.get("entry-points", {})  # type: ignore[assignment]
        commands |= dict.fromkeys(groups.get("kvframework.commands", {}), found["name"])
        plugins |= dict.fromkeys(groups.get(ENTRY_POINT_GROUP, {}), found["name"])
    assert commands == {name: distribution for name, (distribution, _) in KNOWN.items() if name != "bench"}
    assert plugins == FIRST_PARTY


def test_what_is_installed_together_exists() -> None:
    files = sorted((ROOT / "requirements").glob("*.txt"))
    assert {"all", "server", "sglang", "transformers", "vllm"} <= {file.stem for file in files}
    for file in files:
        for line in file.read_text().splitlines():
            if line.startswith("#"):
                continue
            path = re.sub(r"^-[er] |\[.*\]$", "", line)
            assert (ROOT / path / "pyproject.toml").exists() or file.with_name(path).exists(), (file.name, line)
    everything = (ROOT / "requirements" / "all.txt").read_text() + (ROOT / "requirements" / "server.txt").read_text()
    assert [str(file.parent) for file in PROJECTS if f"./{file.parent.relative_to(ROOT)}" not in everything] == []


wheel = pytest.mark.skipif("KVFRAMEWORK_TEST_WHEEL" not in os.environ, reason="only tox tests the wheel")


@wheel
def test_this_process_tests_the_wheel() -> None:
    for package in (kvframework, kvf_redis):
        assert package.__file__ is not None
        assert "site-packages" in package.__file__


@wheel
def test_child_processes_test_the_wheel() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", "import kvframework; print(kvframework.__file__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "site-packages" in shown.stdout


@wheel
def test_the_wheel_has_no_benchmarks() -> None:
    files = metadata.files("kvframework") or []
    assert any(file.name == "commands.py" for file in files)
    assert not [file for file in files if "bench" in str(file)]


def test_what_is_no_module_is_packaged_too() -> None:
    assert (Path(kvframework.__file__).parent / "py.typed").exists()
    assert Path(kvf_demo.__file__).with_name("declaration.txt").stat().st_size > 7000


PROGRAM = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from kvframework.testing import TierConformance
    from kvframework.testing.faults import FaultProxy
    import kvframework.testing.accelerator
import kvf_dev.testing, kvf_dev.testing.accelerator, kvf_dev.testing.faults
assert TierConformance is kvf_dev.testing.TierConformance
assert FaultProxy is kvf_dev.testing.faults.FaultProxy
assert kvframework.testing.accelerator is kvf_dev.testing.accelerator
print(*(f"{each.category.__name__}: {each.message}" for each in caught if "kvf_dev" in str(each.message)), sep="\\n")
"""


def test_it_names_the_same_kits_and_warns_once() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "DeprecationWarning: kvframework.testing has moved to kvf_dev.testing, of the distribution kvframework-dev\n"
    )


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
    "kvf_crypto": {"boto3", "botocore", "cryptography", "hvac", "typer", "zstandard"},
    "kvf_cuda_ipc": {"cuda"},
    "kvf_devices": {"torch"},
    "kvf_events": {"xxhash", "zmq"},
    "kvf_layouts": {"torch"},
    "kvf_mooncake": {"mooncake", "xxhash"},
    "kvf_filesystem": {"kvf_quota"},
    "kvf_peers": {"redis"},
    "kvf_redis": {"kvf_quota", "redis"},
    "kvf_s3": {"kvf_quota", "obstore", "xxhash"},
}
# Those with a half in the engine, which is a client.
CLIENTS = {"kvf_blend", "kvf_crypto"}
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
    for module, points in ENTRY_POINTS.items():
        shutil.copytree(folder(module), tmp_path / module, ignore=shutil.ignore_patterns("__pycache__"))
        install(tmp_path, module.replace("_", "-"), points)
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
