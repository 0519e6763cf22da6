"""Tests that need SGLang are skipped with a reason where it is missing."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("sglang") is None:
        for item in items:
            if item.get_closest_marker("sglang") is not None:
                item.add_marker(pytest.mark.skip(reason="sglang not installed; its tox environment is `sglang`"))
