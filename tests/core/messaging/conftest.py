"""A lab for each test, and its endpoint in a directory short enough for a socket path."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.core.messaging.lab import Lab


@pytest.fixture
def endpoint() -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="kvf-")
    yield f"ipc://{directory}/s"
    shutil.rmtree(directory)


@pytest.fixture
def lab(endpoint: str) -> Iterator[Lab]:
    lab = Lab(endpoint)
    yield lab
    lab.stop()
