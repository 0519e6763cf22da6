"""A server process for a test."""

from __future__ import annotations

from tests.support.server_process import server_fixture

server = server_fixture()
