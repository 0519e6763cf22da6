"""The listener `events`: made before the server binds, started with its sockets."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from kvf_events.announcer import Announcer
from kvf_events.history import Encoder, History
from kvf_events.ledger import Ledger
from kvf_events.options import EventsOptions, check
from kvf_events.publisher import Publisher, pause
from kvf_events.sockets import EventSockets
from kvframework.api.listener import Listener, ListenerContext, Records

log = logging.getLogger(__name__)

_NAME_BYTES = 8


class EventsListener(Listener):
    """Announces to routers what L1 and the tiers hold. The ledger is named after the server's first endpoint."""

    def __init__(self, options: EventsOptions, context: ListenerContext) -> None:
        check(options, context)
        self.wants = "salted" if options.salted == "tell" else "plain"
        self.block_tokens = options.block_size
        self._options = options
        self._context = context
        self._announcer = Announcer(
            context.hasher,
            block_size=options.block_size,
            salts=options.salted == "tell",
            shape_of=context.shape,
            present=context.present,
            pause=pause,
        )
        self._sockets: EventSockets | None = None
        self._publisher: Publisher | None = None
        self._records: Records | None = None

    def start(self, *, keeps: bool) -> None:
        """Bind, and read the ledger. Raises `EndpointError` and `EventLedgerError`."""
        options = self._options
        ledger = Ledger(state_folder(options) / f"events-{_short(self._context.server.endpoints[0])}", keeps=keeps)
        found = ledger.open()
        try:
            self._sockets = EventSockets(options, self._context)
        except BaseException:
            ledger.close()
            raise
        encoder = Encoder(options.format, options.block_size)
        engines = options.engines or (socket.gethostname(),)
        self._publisher = Publisher(
            self._announcer, ledger, found, lambda first: History(encoder, engines, first, pause), self._sockets
        )
        log.info(
            "events for routers are published at %s and replayed at %s", options.endpoint, options.replay or "no socket"
        )
        if options.insecure:
            log.warning(
                "[events] insecure = true: every process that reaches the TCP port can read the token ids of prompts"
            )

    def listen(self, records: Records) -> None:
        assert self._publisher is not None
        self._records = records
        self._publisher.run(records)

    def status(self) -> Mapping[str, object]:
        publisher, announcer, sockets, records = self._publisher, self._announcer, self._sockets, self._records
        if publisher is None or sockets is None:
            return {}
        return {
            "endpoint": self._options.endpoint,
            "replay": self._options.replay,
            "blocks": announcer.index.blocks,
            "next_number": publisher.next_number,
            "waiting": 0 if records is None else records.waiting,
            "ledger_bytes": publisher.ledger_bytes,
            "problem": publisher.problem or publisher.hangs,
            "counters": {
                **publisher.counters,
                "unread_replays": publisher.unread_replays,
                **sockets.counters,
                "dropped": 0 if records is None else records.lost,
                "mismatched": announcer.mismatched,
                "withheld": announcer.withheld,
            },
        }


def state_folder(options: EventsOptions, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the ledger: the named one, else that of the systemd unit, else this user's."""
    if options.state:
        return Path(options.state)
    # systemd names several folders with colons in between.
    of_unit = environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if of_unit:
        return Path(of_unit)
    home = environ.get("XDG_STATE_HOME", "")
    return Path(home if os.path.isabs(home) else Path.home() / ".local" / "state") / "kvframework"


def _short(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=_NAME_BYTES).hexdigest()
