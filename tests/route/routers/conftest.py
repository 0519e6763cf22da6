"""These tests need Dynamo's indexer."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.route.routers.dynamo import Dynamo


@pytest.fixture
def dynamo() -> Iterator[Dynamo]:
    if importlib.util.find_spec("dynamo") is None:
        pytest.skip("ai-dynamo-runtime not installed")
    with Dynamo() as running:
        yield running
