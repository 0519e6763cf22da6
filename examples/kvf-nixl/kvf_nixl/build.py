"""Which build of NIXL is installed. Imports none."""

from __future__ import annotations

from importlib.util import find_spec


def installed_build() -> str:
    """The name of its package, "" where there is none."""
    return next((name for name in ("nixl_cu13", "nixl_cu12") if find_spec(name)), "")
