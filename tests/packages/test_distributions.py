"""Each folder of plugins/ but `defaults` is a distribution of this release, laid out as one of a third party."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvframework import __version__
from kvframework.api.installing import SOURCES
from kvframework.cli.commands import KNOWN
from kvframework.registry.discovery import FIRST_PARTY
from tests.docs.shown import entry_points

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
        plugins |= dict.fromkeys(entry_points(file.read_text()), found["name"])
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
