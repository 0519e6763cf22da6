"""A server that nobody needs stops by itself, once its tiers have what only L1 held."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.server_process import ServerProcess
from tests.support.wire_client import key_for

pytest.importorskip("kvf_filesystem")
CHUNKS = 40


@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
def test_what_only_l1_held_is_in_the_tier_after_an_idle_stop(policy: str, tmp_path: Path) -> None:
    tier = ("l2.0.use=filesystem", f"l2.0.path={tmp_path}", "l2.0.capacity=64MiB", f"l2.0.write_policy={policy}")
    # A queue that is smaller than what is left.
    idle = ("server.idle_stop_s=1", "l2.0.write_queue=8", "l1.high_watermark=0.9", "l1.low_watermark=0.8")
    tokens = list(range(256 * CHUNKS))
    with ServerProcess(*tier, *idle) as server:
        with server.client() as client:
            client.store(key_for(client.register(), tokens), b"x")
            assert client.status()["l2"][0]["stored"] == 0
        assert server.process.wait(120) == 0
        server.process = None
        assert "[server] idle_stop_s: the server stops" in server.log
        assert "are lost" not in server.log
        server.set("server.idle_stop_s=0")
        server.start()
        with server.client() as client:
            assert client.hit(key_for(client.register(), tokens)) == 256 * CHUNKS
