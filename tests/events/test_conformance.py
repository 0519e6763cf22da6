"""The listener `events` passes the kit of its kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvf_dev.testing import ListenerConformance
from kvf_events import EventsListener
from kvf_events.options import EventsOptions
from kvframework.api.listener import ListenerContext


class TestEvents(ListenerConformance):
    @pytest.fixture
    def make_listener(self, tmp_path: Path) -> object:
        tmp_path.chmod(0o700)
        options = EventsOptions(endpoint=f"ipc://{tmp_path}/told.sock", state=str(tmp_path))

        def make(context: ListenerContext) -> EventsListener:
            return EventsListener(options, context)

        return make
