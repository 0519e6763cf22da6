"""One server process for the tests of a file."""

from __future__ import annotations

from tests.support.server_process import server_fixture
from tests.transformers.hybrid_models import CHUNK

server = server_fixture(f"server.chunk_size={CHUNK}", scope="module")
