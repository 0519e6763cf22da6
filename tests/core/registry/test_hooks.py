"""Every kind has a hook, and every hook is documented; docs/plugins has an example of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from kvframework.api import hookspecs
from kvframework.registry.discovery import KINDS

HOOKS: dict[str, Callable[[], object]] = {
    name: hook for name, hook in inspect.getmembers(hookspecs, inspect.isfunction) if name.startswith("kvf_")
}


def test_every_kind_has_a_hook_and_every_hook_a_kind() -> None:
    assert HOOKS
    assert {kind.hook for kind in KINDS.values()} == set(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_documented(name: str) -> None:
    summary = (inspect.getdoc(HOOKS[name]) or "").partition("\n\n")[0]
    assert len(summary) > 20
    assert summary.endswith(".")
