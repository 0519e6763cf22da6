"""Tests that need vLLM are skipped with a reason where it is missing."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm") is not None:
                item.add_marker(pytest.mark.skip(reason="vllm not installed; its tox environment is `vllm`"))
