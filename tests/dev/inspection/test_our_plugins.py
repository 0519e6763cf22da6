"""The plugins of the framework itself and those of the examples pass their own inspection."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from kvf_dev.inspection import inspect_plugin
from kvframework.api.toml import read_toml
from tests.core.registry.fake_distributions import install

# Some examples are clients alone, without a plugin.
EXAMPLES = [
    file
    for file in sorted((Path(__file__).resolve().parents[3] / "examples").glob("*/pyproject.toml"))
    if "entry-points" in file.read_text()
]
OURS = sorted(
    {entry.value for entry in metadata.distribution("kvframework").entry_points.select(group="kvframework.v1")}
)


@pytest.mark.parametrize("module", OURS)
def test_our_own_plugins_have_no_problem(module: str) -> None:
    report = inspect_plugin(module)
    assert report.problems == []
    assert report.checked


@pytest.mark.parametrize("project", EXAMPLES, ids=lambda file: file.parent.name)
def test_the_examples_have_no_problem(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as an installer would leave it: its sources, and the metadata of its pyproject.toml."""
    told: dict = read_toml(project)["project"]  # type: ignore[type-arg,assignment]
    lines = [
        f"Requires-Python: {told['requires-python']}",
        *(f"Requires-Dist: {each}" for each in told["dependencies"]),
    ]
    entry_points = told["entry-points"]["kvframework.v1"]
    install(tmp_path, told["name"], entry_points, metadata="\n".join(lines) + "\n")
    for path in (tmp_path, project.parent):
        monkeypatch.syspath_prepend(str(path))
    for module in set(entry_points.values()):
        report = inspect_plugin(module)
        assert report.problems == []
        assert sorted(report.checked) == sorted(entry_points)
