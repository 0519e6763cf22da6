"""The whole of events in a server with `[events]`: made before the storage, which feeds it, and started with the
sockets of the server."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from kvframework.api.hasher import KeyHasher
from kvframework.api.keys import PackedKey
from kvframework.config import EventsConfig
from kvframework.events.feed import Feed, Shape, Teller
from kvframework.events.history import Encoder, History
from kvframework.events.ledger import Ledger
from kvframework.events.publisher import Publisher, pause
from kvframework.events.sockets import EventSockets
from kvframework.messaging.curve import ServerKeys

_NAME_BYTES = 8


class RouterEvents:
    """See the module. `name` is the endpoint of the server, one ledger for each."""

    def __init__(
        self,
        config: EventsConfig,
        name: str,
        hasher: KeyHasher,
        *,
        keys: ServerKeys | None = None,
        admit_uids: Collection[int] = (),
    ) -> None:
        self.feed = Feed(salts=config.salted == "tell")
        self._config = config
        self._name = name
        self._hasher = hasher
        self._keys = None if config.insecure else keys
        self._admit_uids = admit_uids
        self._teller: Teller | None = None
        self._sockets: EventSockets | None = None
        self._publisher: Publisher | None = None

    def start(
        self,
        shape_of: Callable[[bytes, str], Shape | None],
        present: Callable[[Sequence[PackedKey]], Sequence[bool]],
        *,
        keeps: bool,
    ) -> None:
        """Bind, and begin to tell; see `Teller` for the functions. `keeps`: what L1 holds outlives the server. Raises
        `EndpointError` and `EventLedgerError`; blocks for seconds if an earlier server has not ended."""
        config = self._config
        ledger = Ledger(_state_folder(config) / f"events-{_short(self._name)}", keeps=keeps)
        found = ledger.open()
        try:
            self._sockets = EventSockets(config, keys=self._keys, admit_uids=self._admit_uids)
        except BaseException:
            ledger.close()
            raise
        encoder = Encoder(config.format, config.block_size)
        engines = config.engines or (socket.gethostname(),)
        self._teller = Teller(
            self.feed,
            self._hasher,
            block_size=config.block_size,
            salts=config.salted == "tell",
            shape_of=shape_of,
            present=present,
            pause=pause,
        )
        self._publisher = Publisher(
            self._teller, ledger, found, lambda first: History(encoder, engines, first, pause), self._sockets
        )
        self._publisher.start()

    def stop(self, *, handed_over: bool = False) -> None:
        """Announce what is waiting, and close; a next server has L1 if it is `handed_over`. Blocks for a moment, for
        seconds at most. Idempotent."""
        if self._publisher is not None:
            self._publisher.stop(handed_over=handed_over)

    def admit(self, readers: bool) -> None:
        """Let further readers in, or keep them out; who is connected stays. From any thread. Raises `OSError`."""
        if self._sockets is not None:
            self._sockets.admit(readers)

    def status(self) -> dict[str, object]:
        """Return the part of the status document. From any thread."""
        publisher, teller, sockets = self._publisher, self._teller, self._sockets
        if publisher is None or teller is None or sockets is None:
            return {}
        return {
            "endpoint": self._config.endpoint,
            "replay": self._config.replay,
            "blocks": teller.known.blocks,
            "next_number": publisher.next_number,
            "waiting": self.feed.waiting,
            "ledger_bytes": publisher.ledger_bytes,
            "problem": publisher.problem or publisher.hangs,
            "counters": {
                **publisher.counters,
                "unread_replays": publisher.unread_replays,
                **sockets.counters,
                "dropped": self.feed.dropped,
                "mismatched": teller.mismatched,
                "withheld": teller.withheld,
            },
        }


def _state_folder(config: EventsConfig, environ: Mapping[str, str] = os.environ) -> Path:
    if config.state:
        return Path(config.state)
    # systemd names several folders with colons in between.
    of_unit = environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if of_unit:
        return Path(of_unit)
    home = environ.get("XDG_STATE_HOME", "")
    return Path(home if os.path.isabs(home) else Path.home() / ".local" / "state") / "kvframework"


def _short(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=_NAME_BYTES).hexdigest()
