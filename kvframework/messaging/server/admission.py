"""Which clients a server admits: those with listed CURVE keys, and new ones only while descriptors are left; and which
it has refused."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import zmq

from kvframework.api.plugin import Message
from kvframework.config.schema import SESSIONS_SHARE
from kvframework.errors import KVFrameworkError, ProtocolError, ServerFull
from kvframework.messaging.curve import AdmittedClients
from kvframework.messaging.polling import descriptor_limit, descriptors_in_use
from kvframework.messaging.server.sessions import ClientSession, printable
from kvframework.wire.frames import Envelope, decode

# The ZAP handler, which libzmq asks at every CURVE handshake whether to admit the client.
#
# Served by the server's loop; a handshake waits for the answer, and delays no other client. Not `zmq.auth`: its
# authenticators need a thread or an asyncio loop, and read the directory of clients once.

logger = logging.getLogger(__name__)

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_PER_ROUND = 64

# Records of refusals.
MAX_KEPT = 32
TELL_AGAIN_S = 60.0  # for the same client and reason
TELL_NEXT_S = 1.0  # for any others
_MAX_NAME, _MAX_REASON = 128, 512


class ZapHandler:
    """Admits the clients whose keys are listed. Must be made before the socket that it guards, and closed after it."""

    def __init__(self, context: zmq.Context[Any], admitted: AdmittedClients, counters: dict[str, int]) -> None:
        self._admitted = admitted
        self._counters = counters
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)

    def serve(self) -> None:
        """Answer the waiting requests, a bounded number. Never blocks."""
        for _ in range(_PER_ROUND):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._decide(frames))

    def close(self) -> None:
        self.socket.close(0)

    def _decide(self, frames: list[bytes]) -> list[bytes]:
        request_id = frames[1] if len(frames) > 1 else b""
        name = None
        if len(frames) == 7 and frames[0] == _VERSION and frames[5] == b"CURVE":
            name = self._admitted.name_of(frames[6])
        if name is None:
            self._counters["curve_refused"] += 1
            where = frames[3].decode("ascii", "replace") if len(frames) > 3 else "?"
            logger.warning("a client at %s was refused: its public key is not among those admitted", where)
            return [_VERSION, request_id, b"400", b"not admitted", b"", b""]
        return [_VERSION, request_id, b"200", b"", name.encode()[:255], b""]


# A filter at a listening TCP socket: the kernel drops the SYNs of new connections before they cost a descriptor.
#
# Classic BPF by SO_ATTACH_FILTER, which needs no privilege. The sender repeats a dropped SYN after a second, so a
# connection is delayed and not refused. Accepted connections are not affected: the filter matches only packets with
# SYN and without ACK. See `man 7 socket` and the kernel's Documentation/networking/filter.rst.
#
# Why not only count and refuse: libzmq accepts a connection before it knows its key, and ends the process when it gets
# no descriptor. One host that connects as fast as it can would hold TCP's whole half of the descriptors, with CURVE or
# without, and engines of other nodes could not connect for as long as it goes on: so its own SYNs are dropped from an
# eighth on. Many hosts would take what local connections need: so all SYNs are dropped from a half on. A firewall can
# do the same, but a server cannot rely on there being one.

MAX_NETWORKS = 64

_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER, which Python does not name
_LOAD_BYTE, _LOAD_WORD, _AND, _SHIFT_RIGHT, _JUMP, _JUMP_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x74, 0x05, 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF; other offsets are from the TCP header
_FLAGS, _SYN, _SYN_OR_ACK = 13, 0x02, 0x12
_SOURCE_V4, _SOURCE_V6 = _NETWORK_HEADER + 12, _NETWORK_HEADER + 8
_MAPPED = bytes(10) + b"\xff\xff"
_DROP = (_RETURN, 0, 0, 0)
_PASS = (_RETURN, 0, 0, 0xFFFFFFFF)

_Instruction = tuple[int, int, int, int]


def network_of(host: str) -> bytes:
    """Return the bytes that identify one peer: the 4 bytes of an IPv4 address, also of one in an IPv6 socket's form, or
    the first 8 of an IPv6 address, its /64."""
    if ":" not in host:
        return socket.inet_pton(socket.AF_INET, host)
    address = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    return address[12:] if address.startswith(_MAPPED) else address[:8]


def shown(network: bytes) -> str:
    if len(network) == 4:
        return socket.inet_ntop(socket.AF_INET, network)
    return socket.inet_ntop(socket.AF_INET6, network + bytes(8)) + "/64"


def drop_new_connections(listener: socket.socket, *, everybody: bool, networks: Collection[bytes] = ()) -> None:
    """Set whose SYNs `listener` drops from now on, `MAX_NETWORKS` at most; without any, remove the filter. Raises
    `OSError`."""
    if not everybody and not networks:
        listener.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
        return
    program = [*_first_packets(), *([_DROP] if everybody else _of(list(networks)[:MAX_NETWORKS]))]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH, struct.pack("@HP", len(program), ctypes.addressof(code)))


def _first_packets() -> Iterator[_Instruction]:
    yield _LOAD_BYTE, 0, 0, _FLAGS
    yield _AND, 0, 0, _SYN_OR_ACK
    yield _JUMP_EQUAL, 1, 0, _SYN
    yield _PASS


def _of(networks: Collection[bytes]) -> Iterator[_Instruction]:
    v4 = [int.from_bytes(each, "big") for each in networks if len(each) == 4]
    v6 = [int.from_bytes(each, "big") for each in networks if len(each) == 8]
    yield _LOAD_BYTE, 0, 0, _NETWORK_HEADER
    yield _SHIFT_RIGHT, 0, 0, 4
    yield _JUMP_EQUAL, 1, 0, 4
    yield _JUMP, 0, 0, 2 * len(v4) + 2
    yield _LOAD_WORD, 0, 0, _SOURCE_V4
    for address in v4:
        yield _JUMP_EQUAL, 0, 1, address
        yield _DROP
    yield _PASS
    for prefix in v6:
        yield _LOAD_WORD, 0, 0, _SOURCE_V6
        yield _JUMP_EQUAL, 0, 3, prefix >> 32
        yield _LOAD_WORD, 0, 0, _SOURCE_V6 + 4
        yield _JUMP_EQUAL, 0, 1, prefix & 0xFFFFFFFF
        yield _DROP
    yield _PASS


# The gate of a server: it refuses new connections while descriptors run low, so that connected clients, and libzmq,
# never lack one.
#
# libzmq ends the process if its `ipc://` listener gets no descriptor, and accepts as fast as connections come. So the
# gate's thread counts the descriptors in use, at shorter intervals the fewer are left, and shuts out one kind after the
# other: single TCP peers, readers of events, all of TCP (all in the kernel, see `drop_new_connections`), new sessions,
# local connections. Unbinding the sockets would also end their accepted connections.

# Shares of the limit from which on a kind is not admitted. The rest is not wasted: tiers and copiers use it, and so do
# connections accepted before the next look.
ADDRESS_SHARE, READERS_SHARE, TCP_SHARE, LOCAL_SHARE = 0.125, 0.4, 0.5, 0.7
REOPEN_SHARE = 0.9  # of the threshold at which it was shut
# Connections do not come faster; the necessary room above a limit follows from it.
FASTEST_PER_S = 100_000
SOONEST_S, LATEST_S = 0.002, 0.1
_COUNT_PEERS_S = 0.1
_PEERS_AT_ONCE = 64
_PEERS_SHARE_OF_TIME = 10  # after a count of peers the gate pauses for this multiple of its duration


@dataclass(frozen=True)
class Admission:
    """What is admitted: kinds of connections, all but those of the peers in `shut_out`, which hold so many. Pure."""

    tcp: bool = True
    sessions: bool = True
    local: bool = True
    readers: bool = True
    shut_out: tuple[tuple[bytes, int], ...] = ()

    def after(self, in_use: int, limit: int, peers: Mapping[bytes, int] | None) -> Admission:
        """Return what is admitted with so many descriptors in use. `peers` has the TCP connections of each peer, None
        if they were not counted."""
        return Admission(
            _stays_open(self.tcp, in_use, TCP_SHARE * limit),
            _stays_open(self.sessions, in_use, SESSIONS_SHARE * limit),
            _stays_open(self.local, in_use, LOCAL_SHARE * limit),
            _stays_open(self.readers, in_use, READERS_SHARE * limit),
            self.shut_out if peers is None else self._shut_out(peers, ADDRESS_SHARE * limit),
        )

    def _shut_out(self, peers: Mapping[bytes, int], most: float) -> tuple[tuple[bytes, int], ...]:
        before = {network for network, _ in self.shut_out}
        greedy = [each for each in peers.items() if not _stays_open(each[0] not in before, each[1], most)]
        return tuple(sorted(greedy, key=lambda each: -each[1])[:MAX_NETWORKS])

    def look_again_in(self, in_use: int, limit: int) -> float:
        """Return the seconds within which even the fastest flood cannot take all that is left below the next limit."""
        limits = ((self.readers, READERS_SHARE), (self.tcp, TCP_SHARE), (self.local, LOCAL_SHARE))
        left = [share * limit - in_use for is_open, share in limits if is_open]
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
        self.admission = Admission()
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
        if not self.admission.sessions:
            raise ServerFull(
                f"more than {SESSIONS_SHARE:.0%} of the server's {descriptor_limit()} descriptors are in use",
                hint="close connections that are not used, or raise LimitNOFILE of the server",
            )

    def status(self) -> dict[str, object]:
        admission = self.admission
        return {
            "in_use": descriptors_in_use(),
            "limit": descriptor_limit(),
            "tcp": admission.tcp,
            "sessions": admission.sessions,
            "local": admission.local,
            "readers": admission.readers,
            "shut_out": {shown(network): count for network, count in admission.shut_out},
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
        """Count once and adjust what is admitted; return the seconds until the next look."""
        limit, in_use = self._look_at_all()
        if self._tcp and (in_use >= ADDRESS_SHARE * limit or self.admission.shut_out):
            began = time.monotonic()
            if began >= self._count_peers_at:
                limit, in_use = self._look_at_all(self._peers())
                ended = time.monotonic()
                self._count_peers_at = ended + max(_COUNT_PEERS_S, _PEERS_SHARE_OF_TIME * (ended - began))
        return self.admission.look_again_in(in_use, limit)

    def _look_at_all(self, peers: Mapping[bytes, int] | None = None) -> tuple[int, int]:
        limit, in_use = descriptor_limit(), descriptors_in_use()
        self._move(self.admission.after(in_use, limit, peers), in_use, limit)
        return limit, in_use

    def _move(self, admission: Admission, in_use: int, limit: int) -> None:
        admission = replace(
            admission,
            tcp=admission.tcp or not self._tcp,
            local=admission.local or self._show_local is None,
            readers=admission.readers or self._admit_readers is None,
        )
        before, self.admission = self.admission, admission
        if admission == before:
            return
        networks, known = dict(admission.shut_out).keys(), dict(before.shut_out).keys()
        if admission.tcp != before.tcp or networks != known:
            self._filter(everybody=not admission.tcp, networks=networks)
        if admission.local != before.local:
            self._show(admission.local)
        if admission.readers != before.readers:
            self._admit(admission.readers)
        self._counters["tcp_shut"] += before.tcp and not admission.tcp
        self._counters["local_shut"] += before.local and not admission.local
        self._counters["peers_shut_out"] += len(networks - known)
        self._log(before, in_use, limit, networks - known)

    def _filter(self, *, everybody: bool, networks: Collection[bytes]) -> None:
        try:
            for listener in self._tcp:
                drop_new_connections(listener, everybody=everybody, networks=networks)
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

    def _log(self, before: Admission, in_use: int, limit: int, fresh: Collection[bytes]) -> None:
        now = self.admission
        for network, count in now.shut_out:
            if network in fresh:
                logger.warning("%s holds %d TCP connections: further ones from it wait", shown(network), count)
        if before.readers and not now.readers:
            logger.warning("%d of %d descriptors are in use: new readers of events wait", in_use, limit)
        if before.tcp and not now.tcp:
            logger.warning("%d of %d descriptors are in use: new TCP connections wait", in_use, limit)
        if before.sessions and not now.sessions:
            logger.warning("%d of %d descriptors are in use: new clients are refused", in_use, limit)
        if before != Admission() and now == Admission():
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
                self._look_at_all()  # new connections during the count are noticed
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
    """The latest refusals, a bounded number: kept for `status` and logged, since a refused client looks like a cache
    without hits. Serving thread, except for `report`."""

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
            _log(refusal)


def _reason(error: KVFrameworkError) -> str:
    return f"{error.fact}; available: {error.available}" if error.available else error.fact


def _log(refusal: Refusal) -> None:
    release = f", kvframework {refusal.client_version}" if refusal.client_version else ""
    who = f"{refusal.client!r} (process {refusal.pid}{release})"
    done = {"HELLO": "was refused", "server": "refuses this server"}.get(refusal.what)
    logger.warning("%s %s: [%s] %s", who, done or f"was refused {refusal.what!r}", refusal.code, refusal.reason)
