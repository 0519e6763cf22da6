"""Records of refused clients and the reasons: kept for `status` and logged, since a refused client looks like a cache
without hits. Serving thread, except for `report`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvframework.api.types import Message
from kvframework.errors import KVFrameworkError, ProtocolError
from kvframework.messaging.server.sessions import ClientSession, printable
from kvframework.wire.frames import Envelope, decode

logger = logging.getLogger(__name__)

MAX_KEPT = 32
TELL_AGAIN_S = 60.0  # for the same client and reason
TELL_NEXT_S = 1.0  # for any others
_MAX_NAME, _MAX_REASON = 128, 512


class Introduction(Message, frozen=True):
    """The readable part of a HELLO that is refused."""

    client: str = "?"
    pid: int = 0
    min_version: int = 1
    max_version: int = 1
    client_version: str = ""


@dataclass
class Refusal:
    """One client's refusals for one reason. `what` is the name of the request; "server": the client refuses this
    server. The times are on the clock."""

    client: str
    pid: int
    what: str
    code: str
    reason: str
    versions: str
    client_version: str
    count: int
    last: float
    logged_at: float


class Refusals:
    """The latest refusals, a bounded number. `report` may be called from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: dict[tuple[str, int, str, str], Refusal] = {}
        self._tell_at = clock()

    def hello(self, envelope: Envelope, error: KVFrameworkError) -> None:
        """Record a refused HELLO, readable or not."""
        try:
            who = decode(envelope.payload, Introduction, where="HELLO")
        except ProtocolError:
            who = Introduction()
        versions = f"{who.min_version} to {who.max_version}"
        self._add(who.client, who.pid, "HELLO", error.code, _reason(error), versions, who.client_version)

    def request(self, session: ClientSession | None, name: str, error: KVFrameworkError) -> None:
        """Record a message of a session, or of an unknown peer, that could not be parsed or served."""
        if session is None:
            self._add("?", 0, name, error.code, _reason(error))
        else:
            self._of(session, name, error.code, _reason(error))

    def server(self, session: ClientSession, code: str, reason: str) -> None:
        """Record that the client left because it cannot use this server."""
        self._of(session, "server", code, reason)

    def report(self) -> list[dict[str, object]]:
        """Return the refusals for the status document, the latest first."""
        now = self._clock()
        return [
            {
                "client": each.client,
                "pid": each.pid,
                "client_version": each.client_version,
                "versions": each.versions,
                "what": each.what,
                "code": each.code,
                "reason": each.reason,
                "count": each.count,
                "ago_s": round(now - each.last, 1),
            }
            for each in reversed(list(self._kept.values()))
        ]

    def _of(self, session: ClientSession, what: str, code: str, reason: str) -> None:
        self._add(session.name, session.pid, what, code, reason, str(session.version), session.client_version)

    def _add(
        self, client: str, pid: int, what: str, code: str, reason: str, versions: str = "", client_version: str = ""
    ) -> None:
        now = self._clock()
        key = (printable(client[:_MAX_NAME]), pid, printable(what), printable(code[:_MAX_NAME]))
        known = self._kept.pop(key, None)
        if known is None and len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        count, logged_at = (known.count + 1, known.logged_at) if known else (1, now - TELL_AGAIN_S)
        refusal = Refusal(
            *key,
            printable(reason[:_MAX_REASON]),
            versions,
            printable(client_version[:_MAX_NAME]),
            count,
            now,
            logged_at,
        )
        self._kept[key] = refusal
        if now >= self._tell_at and now - logged_at >= TELL_AGAIN_S:
            refusal.logged_at, self._tell_at = now, now + TELL_NEXT_S
            _tell(refusal)


def _reason(error: KVFrameworkError) -> str:
    return f"{error.fact}; available: {error.available}" if error.available else error.fact


def _tell(refusal: Refusal) -> None:
    release = f", kvframework {refusal.client_version}" if refusal.client_version else ""
    who = f"{refusal.client!r} (process {refusal.pid}{release})"
    done = {"HELLO": "was refused", "server": "refuses this server"}.get(refusal.what)
    logger.warning("%s %s: [%s] %s", who, done or f"was refused {refusal.what!r}", refusal.code, refusal.reason)
