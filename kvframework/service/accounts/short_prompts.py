"""The prompts shorter than a chunk that clients report: misses without a lookup. Serving thread only."""

from __future__ import annotations

from kvframework.api.requests import ClientInfo
from kvframework.service.accounts.finished import MAX_TEXT, FinishedRequests, Subject
from kvframework.service.accounts.lookup_counts import LookupCounts
from kvframework.service.accounts.misses import Why
from kvframework.wire.messages import Ping


class ShortPrompts:
    """Counts the reports of each session, see `Ping`; a repeated report counts once."""

    def __init__(self, counts: LookupCounts, finished: FinishedRequests) -> None:
        self._counts = counts
        self._finished = finished
        self._heard: dict[int, int] = {}

    def heard(self, client: ClientInfo, ping: Ping) -> None:
        grown = ping.short_count - self._heard.get(client.session_id, 0)
        if grown <= 0:
            return
        self._heard[client.session_id] = ping.short_count
        self._counts.missed("too_short", grown)
        for prompt in ping.short[-grown:]:
            subject = Subject(
                self._finished.clock(),
                client.name,
                client.pid,
                client.session_id,
                prompt.request_id[:MAX_TEXT],
                "",
                b"",
                0,
                prompt.tokens,
            )
            self._finished.add("LOOKUP", subject, "miss", missing=0, why=Why("too_short"))

    def end_session(self, session_id: int) -> None:
        self._heard.pop(session_id, None)
