"""A site directory for fake distributions, on `sys.path` for one test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Installed here means installed for the test; its modules are forgotten afterwards."""
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(path)
    before = set(sys.modules)
    yield path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(path) in str(sys.modules[name].__file__):
            del sys.modules[name]
