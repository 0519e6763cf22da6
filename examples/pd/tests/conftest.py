"""These tests need vLLM, NIXL and vLLM's router: `tox run -e pd` from the root of the clone."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

MISSING = [name for name in ("vllm", "nixl", "vllm_router") if find_spec(name) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if MISSING:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=f"{', '.join(MISSING)} not installed"))
