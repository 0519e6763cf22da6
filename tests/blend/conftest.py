"""A server that blends, for a test."""

from __future__ import annotations

from tests.blend.blend_client import SETTINGS
from tests.core.server.in_process import serving
from tests.support.server_process import fixture_of

server = fixture_of(serving, *SETTINGS)
