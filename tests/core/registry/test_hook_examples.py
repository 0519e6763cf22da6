"""Every hook is documented, and an example in its documentation runs; docs/plugins has those of the others."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from kvframework.api import hookspecs
from kvframework.registry.discovery import KINDS
from kvframework.registry.registry import PluginRegistry
from tests.core.registry.fake_distributions import install

HOOKS: dict[str, Callable[[], object]] = {
    name: hook for name, hook in inspect.getmembers(hookspecs, inspect.isfunction) if name.startswith("kvf_")
}


def example(hook: Callable[[], object]) -> tuple[str, str]:
    """The entry point that the documentation names, and the code behind it."""
    text = inspect.getdoc(hook) or ""
    entry_point = re.search(r"\(entry point `([\w.]+)`\):\n\n", text)
    assert entry_point, f"{hook.__name__} has no example with its entry point"
    return entry_point[1], textwrap.dedent(text[entry_point.end() :])


def test_every_kind_has_a_hook_and_every_hook_a_kind() -> None:
    assert HOOKS
    assert {kind.hook for kind in KINDS.values()} == set(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_documented(name: str) -> None:
    summary = (inspect.getdoc(HOOKS[name]) or "").partition("\n\n")[0]
    assert len(summary) > 20
    assert summary.endswith(".")


@pytest.mark.parametrize("name", ["kvf_transports", "kvf_request_handlers"])
def test_the_example_of_a_hook_works_as_an_installed_plugin(site: Path, name: str) -> None:
    entry_point, code = example(HOOKS[name])
    kind, _, plugin = entry_point.partition(".")
    assert KINDS[kind].hook == name
    install(site, "example", {entry_point: f"example_of_{name}"}, {f"example_of_{name}": code})
    provider = PluginRegistry().resolve(kind, plugin)
    assert isinstance(provider, KINDS[kind].provider)
    made = provider.create(provider.options(), None)
    assert made  # abstract methods left out would have raised
