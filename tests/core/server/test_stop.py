"""The end of a server whose plugins do not let go of everything."""

from __future__ import annotations

import logging

import pytest

from tests.core.server.gated_transport import GatedPlugin
from tests.core.server.in_process import serving
from tests.support.wire_client import WireClient


def test_an_arena_that_a_copy_still_uses_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server:
        held = server.service.storage.table.arena[:16]
    assert "a transport keeps views of the arena" in caplog.text
    held.release()


def test_a_transport_that_cannot_close_does_not_keep_storage_open(caplog: pytest.LogCaptureFixture) -> None:
    plugin = GatedPlugin()

    def fail() -> None:
        raise RuntimeError("jammed")

    plugin.transport.close = fail  # type: ignore[method-assign]
    caplog.set_level(logging.INFO)
    with serving("transport.1.use=gated", plugins=(plugin,)):
        pass
    assert "closing transport gated failed" in caplog.text
    assert caplog.records[-1].message == "stopped"


def test_a_client_that_lives_is_not_said_to_have_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving() as server:
        client = WireClient(server.endpoint, timeout=20)
        client.register(instance_id=50)
    client.close()
    (line,) = (each.message for each in caplog.records if "1 instance" in each.message)
    assert line.startswith("session of ")
    assert "closed, as the server stops: 1 instance, 0 tickets and " in line
