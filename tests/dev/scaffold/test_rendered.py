"""What `kvframework new` writes works as it is: built as wheels, installed beside kvframework, proven by its own tests.

The package's folder is taken away from each project once its wheel is built, so only what was installed can be tested.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from kvf_dev.scaffold import VARIANTS, PluginNames, render, write_distribution
from kvframework.api.toml import toml_value
from kvframework.config.load import load_config
from kvframework.registry.discovery import KINDS
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import complete_config, describe_options
from tests.support.wheels import environment_with, install_wheels, run_own_tests

# Of the kit for transports, which takes longest, what needs all of the plugin: `examples/kvf-simdev` is run with more.
CHOSEN = {
    "transport": ["-k", "comes_back or skipped_tokens or canary or its_event or engine_processes_share"],
    "transport-driver": ["-k", "comes_back_in_other_blocks and nhd or engine_processes_share or a_stream"],
    "transport-async": [
        "-k",
        "comes_back_in_other_blocks or canary or answer_that or server_killed or cancelled or close_waits or no_event",
    ],
}
# Its views are compared with torch's; every other one works where there is no torch.
TORCH = {"layout"}
RENDERED = [*KINDS, *(f"{kind}-{variant}" for kind, variant in VARIANTS)]


class Rendered(NamedTuple):
    """A project of each kind and variant, and the folder where all of them are installed."""

    projects: dict[str, Path]
    names: dict[str, PluginNames]
    site: Path


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    folder = tmp_path_factory.mktemp("rendered")
    names = {kind: PluginNames(kind, f"new_{kind}") for kind in KINDS}
    names |= {f"{kind}-{variant}": PluginNames(kind, f"new_{kind}_{variant}", variant) for kind, variant in VARIANTS}
    projects = {kind: folder / each.distribution for kind, each in names.items()}
    for kind, project in projects.items():
        write_distribution(project, render(names[kind]))
    install_wheels(projects.values(), folder / "site")
    for kind, project in projects.items():
        shutil.rmtree(project / names[kind].module)
    return Rendered(projects, names, folder / "site")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.torch] * (kind in TORCH)) for kind in RENDERED])
def test_it_passes_its_own_tests(
    rendered: Rendered, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind not in TORCH:
        (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('torch is not installed')")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    done = run_own_tests(rendered.projects[kind], rendered.site, "-q", *CHOSEN.get(kind, []))
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= 2


def test_all_are_listed_as_available(rendered: Rendered) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvframework.cli.main", "plugins", "list", "--json"],
        env=environment_with(rendered.site),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    for names in rendered.names.values():
        row = rows[names.title]
        assert (row["distribution"], row["version"]) == (names.distribution, "0.1.0")
        assert (row["status"], row["reason"]) == ("available", "")


@pytest.mark.parametrize("kind", RENDERED)
def test_its_readme_tells_the_options_as_they_are(
    rendered: Rendered, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(rendered.site))
    _, provider = PluginRegistry().describe(rendered.names[kind].kind, rendered.names[kind].name)
    assert provider is not None
    readme = (rendered.projects[kind] / "README.md").read_text()
    told = re.findall(r"^\| `(\w+)` \| ([^|]+) \| `([^|]+)` \| ([^|]+) \|$", readme, re.MULTILINE)
    options = describe_options(provider.options)
    assert told == [(option.name, option.type, toml_value(option.default), option.description) for option in options]


@pytest.mark.parametrize("kind", RENDERED)
def test_its_readmes_toml_is_a_configuration(
    rendered: Rendered, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(rendered.site))
    (toml,) = re.findall(r"```toml\n(.*?)```", (rendered.projects[kind] / "README.md").read_text(), re.DOTALL)
    file = tmp_path / "kvf.toml"
    file.write_text(toml)
    config = load_config(file)
    complete_config(config, PluginRegistry())
    assert rendered.names[kind].name in toml


def test_an_option_without_a_default_gets_its_value_in_one_place(tmp_path: Path) -> None:
    """The author edits no other test than the file of options."""
    names, project = PluginNames("tier", "wants_a_url"), tmp_path / "project"
    files = render(names)
    options, field = files["kvf_wants_a_url/options.py"], "    capacity: "
    files["kvf_wants_a_url/options.py"] = options.replace(field, f"    url: Annotated[str, Meta()]\n{field}", 1)
    given = files["tests/plugin_options.py"]
    files["tests/plugin_options.py"] = given.replace("= {}", '= {"url": "http://here"}')
    write_distribution(project, files)
    install_wheels([project], tmp_path / "site")
    shutil.rmtree(project / names.module)
    done = run_own_tests(project, tmp_path / "site", "-q", "-k", "comes_back or capacity or refused_beforehand")
    assert done.returncode == 0, done.stdout + done.stderr
