"""A server that blends, for a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvframework.server import Server
from tests.blend.blend_client import SETTINGS
from tests.core.server.in_process import serving


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(*SETTINGS) as running:
        yield running
