"""Owns the requests of a link that were given up and whose answers may still come: what these grant is given back.
Lives in the link's I/O thread.
"""

from __future__ import annotations

import logging

from kvframework.messaging.pending import Outgoing
from kvframework.wire.frames import Envelope, decode

logger = logging.getLogger(__name__)

_MAX_LATE = 4096


class LateAnswers:
    """Keeps the newest 4096 of those that name who takes a late answer."""

    def __init__(self) -> None:
        self._items: dict[int, Outgoing] = {}

    def expect(self, item: Outgoing) -> None:
        if item.on_late is not None:
            self._items[item.request_id] = item
            if len(self._items) > _MAX_LATE:
                del self._items[next(iter(self._items))]

    def give_back(self, envelope: Envelope) -> None:
        """An answer that nobody waits for, to `on_late` of who did; once. Errors grant nothing."""
        item = self._items.pop(envelope.request_id, None)
        if item is None or item.on_late is None or envelope.type != item.spec.name:
            return
        try:
            item.on_late(decode(envelope.payload, item.spec.response, where=f"response of {item.spec.name}"))
        except Exception:
            logger.exception("a late answer to %s could not be given back", item.spec.name)
