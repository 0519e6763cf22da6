"""One server process for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.server_process import ServerProcess
from tests.transformers.hybrid_models import CHUNK


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(f"server.chunk_size={CHUNK}") as running:
        yield running
