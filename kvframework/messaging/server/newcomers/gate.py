"""The gate of a server: it refuses newcomers while descriptors run low, so that connected clients, and libzmq, never
lack one.

libzmq ends the process if its `ipc://` listener gets no descriptor, and accepts as fast as connections come. So the
gate's thread counts the descriptors in use, at shorter intervals the fewer are left, and shuts one door after the
other: for single TCP peers, for readers of events, for all of TCP (all in the kernel, see syn_filter.py), for new
sessions, for local connections. Unbinding the sockets would also end their accepted connections.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from kvframework.config.schema import SESSIONS_SHARE
from kvframework.errors import ServerFull
from kvframework.messaging.resources import descriptor_limit, descriptors_in_use
from kvframework.messaging.server.newcomers import syn_filter
from kvframework.messaging.server.newcomers.syn_filter import network_of, shown

logger = logging.getLogger(__name__)

# Shares of the limit from which on a door is shut. The rest is not wasted: tiers and copiers use it, and so do
# connections accepted before the next look.
ADDRESS_SHARE, READERS_SHARE, TCP_SHARE, LOCAL_SHARE = 0.125, 0.4, 0.5, 0.7
REOPEN_SHARE = 0.9  # of the threshold at which a door was shut
# Connections do not come faster; the necessary room above a door follows from it.
FASTEST_PER_S = 100_000
SOONEST_S, LATEST_S = 0.002, 0.1
_COUNT_PEERS_S = 0.1
_PEERS_AT_ONCE = 64
_PEERS_SHARE_OF_TIME = 10  # after a count of peers the gate pauses for this multiple of its duration


@dataclass(frozen=True)
class Doors:
    """The open doors, and the connections of each peer whose own door is shut. Pure."""

    tcp: bool = True
    sessions: bool = True
    local: bool = True
    readers: bool = True
    shut_out: tuple[tuple[bytes, int], ...] = ()

    def after(self, in_use: int, limit: int, peers: Mapping[bytes, int] | None) -> Doors:
        """Return the doors for this number of descriptors in use; `peers` are the TCP connections of each, None if they
        were not counted."""
        return Doors(
            _stays_open(self.tcp, in_use, TCP_SHARE * limit),
            _stays_open(self.sessions, in_use, SESSIONS_SHARE * limit),
            _stays_open(self.local, in_use, LOCAL_SHARE * limit),
            _stays_open(self.readers, in_use, READERS_SHARE * limit),
            self.shut_out if peers is None else self._shut_out(peers, ADDRESS_SHARE * limit),
        )

    def _shut_out(self, peers: Mapping[bytes, int], most: float) -> tuple[tuple[bytes, int], ...]:
        before = {network for network, _ in self.shut_out}
        greedy = [each for each in peers.items() if not _stays_open(each[0] not in before, each[1], most)]
        return tuple(sorted(greedy, key=lambda each: -each[1])[: syn_filter.MAX_NETWORKS])

    def look_again_in(self, in_use: int, limit: int) -> float:
        """Return the seconds within which even the fastest flood cannot take all that is left below the next door."""
        doors = ((self.readers, READERS_SHARE), (self.tcp, TCP_SHARE), (self.local, LOCAL_SHARE))
        left = [share * limit - in_use for is_open, share in doors if is_open]
        return min(max(min(left, default=math.inf) / FASTEST_PER_S, SOONEST_S), LATEST_S)


def _stays_open(is_open: bool, count: int, most: float) -> bool:
    return count < most if is_open else count < REOPEN_SHARE * most


class Gate:
    """Counts in its own thread between `start` and `close`. `tcp` are the listening sockets, owned by the gate.
    `show_local(True or False)` shows or hides the local socket, `admit_readers` opens or shuts the sockets of events;
    None: there are none. Other methods may be called from any thread."""

    def __init__(
        self,
        tcp: Sequence[socket.socket],
        show_local: Callable[[bool], None] | None,
        counters: dict[str, int],
        admit_readers: Callable[[bool], None] | None = None,
    ) -> None:
        self.doors = Doors()
        self._tcp = tcp
        self._ports = {listener.getsockname()[1] for listener in tcp}
        self._show_local = show_local
        self._admit_readers = admit_readers
        self._counters = counters
        self._ended = threading.Event()
        self._count_peers_at = 0.0
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="kvf-gate", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread. Blocks until it has ended. Idempotent."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        for listener in self._tcp:
            listener.close()

    def check(self) -> None:
        """Raise `ServerFull` if no new session may be opened."""
        if not self.doors.sessions:
            raise ServerFull(
                f"more than {SESSIONS_SHARE:.0%} of the server's {descriptor_limit()} descriptors are in use",
                hint="close connections that are not used, or raise LimitNOFILE of the server",
            )

    def status(self) -> dict[str, object]:
        doors = self.doors
        return {
            "in_use": descriptors_in_use(),
            "limit": descriptor_limit(),
            "tcp": doors.tcp,
            "sessions": doors.sessions,
            "local": doors.local,
            "readers": doors.readers,
            "shut_out": {shown(network): count for network, count in doors.shut_out},
        }

    def _run(self) -> None:
        pause = 0.0
        while not self._ended.wait(pause):
            try:
                pause = self._look()
                self._failing = False
            except Exception:
                if not self._failing:  # one line, not ten a second
                    logger.exception("the gate continues after an internal error")
                self._failing, pause = True, LATEST_S

    def _look(self) -> float:
        """Count once and adjust the doors; return the seconds until the next look."""
        limit, in_use = self._look_at_all()
        if self._tcp and (in_use >= ADDRESS_SHARE * limit or self.doors.shut_out):
            began = time.monotonic()
            if began >= self._count_peers_at:
                limit, in_use = self._look_at_all(self._peers())
                ended = time.monotonic()
                self._count_peers_at = ended + max(_COUNT_PEERS_S, _PEERS_SHARE_OF_TIME * (ended - began))
        return self.doors.look_again_in(in_use, limit)

    def _look_at_all(self, peers: Mapping[bytes, int] | None = None) -> tuple[int, int]:
        limit, in_use = descriptor_limit(), descriptors_in_use()
        self._move(self.doors.after(in_use, limit, peers), in_use, limit)
        return limit, in_use

    def _move(self, doors: Doors, in_use: int, limit: int) -> None:
        doors = replace(
            doors,
            tcp=doors.tcp or not self._tcp,
            local=doors.local or self._show_local is None,
            readers=doors.readers or self._admit_readers is None,
        )
        before, self.doors = self.doors, doors
        if doors == before:
            return
        networks, known = dict(doors.shut_out).keys(), dict(before.shut_out).keys()
        if doors.tcp != before.tcp or networks != known:
            self._filter(everybody=not doors.tcp, networks=networks)
        if doors.local != before.local:
            self._show(doors.local)
        if doors.readers != before.readers:
            self._admit(doors.readers)
        self._counters["tcp_shut"] += before.tcp and not doors.tcp
        self._counters["local_shut"] += before.local and not doors.local
        self._counters["peers_shut_out"] += len(networks - known)
        self._tell(before, in_use, limit, networks - known)

    def _filter(self, *, everybody: bool, networks: Collection[bytes]) -> None:
        try:
            for listener in self._tcp:
                syn_filter.drop_newcomers(listener, everybody=everybody, networks=networks)
        except OSError as error:
            logger.error("the kernel cannot defer TCP connections for this process: %s", error.strerror)

    def _show(self, shown: bool) -> None:
        try:
            if self._show_local is not None:
                self._show_local(shown)
        except OSError as error:  # another process has removed the socket
            logger.error("the local socket cannot be %s: %s", "shown" if shown else "hidden", error)

    def _admit(self, readers: bool) -> None:
        try:
            if self._admit_readers is not None:
                self._admit_readers(readers)
        except OSError as error:
            logger.error("readers of events cannot be %s: %s", "let in" if readers else "kept out", error)

    def _tell(self, before: Doors, in_use: int, limit: int, fresh: Collection[bytes]) -> None:
        now = self.doors
        for network, count in now.shut_out:
            if network in fresh:
                logger.warning("%s holds %d TCP connections: further ones from it wait", shown(network), count)
        if before.readers and not now.readers:
            logger.warning("%d of %d descriptors are in use: new readers of events wait", in_use, limit)
        if before.tcp and not now.tcp:
            logger.warning("%d of %d descriptors are in use: new TCP connections wait", in_use, limit)
        if before.sessions and not now.sessions:
            logger.warning("%d of %d descriptors are in use: new clients are refused", in_use, limit)
        if before != Doors() and now == Doors():
            logger.info("%d of %d descriptors are in use: new connections are accepted again", in_use, limit)

    def _peers(self) -> Counter[bytes] | None:
        """Return the accepted TCP connections of each peer, by the descriptors of this process; None if they cannot be
        listed, which needs one more."""
        try:
            names = os.listdir("/proc/self/fd")
        except OSError:
            return None
        found: Counter[str] = Counter()
        for number, name in enumerate(names):
            if number % _PEERS_AT_ONCE == 0:
                self._look_at_all()  # newcomers during the count are noticed
            # The descriptor may have been closed, be no socket, or not be connected.
            with contextlib.suppress(OSError):
                found[self._peer(int(name))] += 1
        peers: Counter[bytes] = Counter()
        for host, count in found.items():
            if host:
                peers[network_of(host)] += count
        return peers

    def _peer(self, fd: int) -> str:
        borrowed = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fd)
        try:
            peer = borrowed.getpeername()
            # A Unix socket's name is no tuple; a tier's connection has another local port.
            if not isinstance(peer, tuple) or len(peer) < 2 or borrowed.getsockname()[1] not in self._ports:
                return ""
            return str(peer[0])
        finally:
            borrowed.detach()
