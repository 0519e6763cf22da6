"""A tier whose client library runs in a helper process: one that freezes, or keeps the interpreter, is killed.

`HelperTier` is the half in the server. The helper process makes an ordinary `Tier` and serves it: one thread for each
connection, a Unix socket, over which one call at a time is answered. Values pass in memory that both have mapped: one
copy between it and the caller's buffers, without the interpreter lock.

A call ends by its deadline, whatever the helper does. One that the helper has not ended `FROZEN_S` later counts as
frozen: the process is killed, and started again with a backoff. Whatever it still does by then, it does in memory that
no other call gets: nothing comes late into the caller's buffers."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import mmap
import os
import select
import socket
import struct
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from kvframework.api.copying import copy_bytes
from kvframework.api.plugin import Options
from kvframework.api.process import LogLimit, NamedCall, SupervisedChild, end_with_parent, start_connected
from kvframework.api.tier import Outcome, PackedKey, RegistersMemory, Tier, TierEntry, TierUsage
from kvframework.errors import KVFrameworkError, TierError

__all__ = ["FROZEN_S", "START_S", "HelperTier", "RegistersMemory"]

log = logging.getLogger(__name__)

# Seconds behind its deadline after which a call that the helper has not ended counts as frozen.
FROZEN_S = 1.0
# Seconds within which a process has made its tier: imports of large libraries, on a busy machine.
START_S = 30.0
# The helper's own deadline is so much earlier, so that a store that keeps to it is heard in time.
_ANSWER_S = 0.05
_DRAINED = 1 << 18
# Values begin at multiples of this, a cache line, and the memory grows by multiples of the other.
_VALUE_STEP = 64
_MEMORY_STEP = 1 << 20
# Not yet in `fcntl` of Python 3.10.
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK = 1033, 1, 2
_LENGTH = struct.Struct("<I")

# What passes between a tier and its helper: a length, and a message. Values are in the memory that both share, in the
# order of the call's keys. Deadlines are absolute, on `time.monotonic()`; None is none.


class Start(msgspec.Struct, array_like=True):
    """The first message to a process: what makes its tier, and the table in the TOML."""

    make: NamedCall
    where: str


class Call(msgspec.Struct, array_like=True):
    """One call of a tier's method. `sizes`: the bytes of each value of a `put`, the room for each of a `get_into`."""

    name: str
    keys: list[bytes] = []
    sizes: list[int] = []
    deadline: float = 0.0


class Answer(msgspec.Struct, array_like=True):
    """The result of a call: `outcomes` by value of `Outcome`; `refusal` is fact, available and hint of a `TierError`,
    `bug` the text of any other exception."""

    outcomes: list[int | str] = []
    usage: tuple[int, int] = (0, 0)
    entries: list[tuple[bytes, int, float | None]] = []
    refusal: tuple[str, str, str] | None = None
    bug: str = ""


M = TypeVar("M", Start, Call, Answer)
O = TypeVar("O", bound=Options)  # noqa: E741


def read(sock: socket.socket, message: type[M], deadline: float | None = None) -> M:
    """Return the next message, and read no byte behind it. Raises `TimeoutError`, another `OSError`, or `EOFError`."""
    head = _receive(sock, _LENGTH.size, deadline)
    return msgspec.msgpack.decode(_receive(sock, _LENGTH.unpack(head)[0], deadline), type=message)


def write(sock: socket.socket, message: Start | Call | Answer, deadline: float | None = None) -> None:
    """Send a message. Raises `TimeoutError` or another `OSError`."""
    body = msgspec.msgpack.encode(message)
    left = memoryview(_LENGTH.pack(len(body)) + body)
    while left:
        _arm(sock, deadline)
        left = left[sock.send(left) :]


def _receive(sock: socket.socket, nbytes: int, deadline: float | None) -> bytearray:
    body, at = bytearray(nbytes), 0
    with memoryview(body) as view:
        while at < nbytes:
            _arm(sock, deadline)
            received = sock.recv_into(view[at:])
            if not received:
                raise EOFError
            at += received
    return body


def _arm(sock: socket.socket, deadline: float | None) -> None:
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise TimeoutError
    sock.settimeout(left)


class Connection:
    """A connection for one call at a time, and the memory of its values: a memfd that the server makes and extends
    before a call, and the helper maps as it has become. Takes over both descriptors. One thread at a time.

    Each connection has its own memory, so a call that goes on behind its deadline, in a helper that is not yet dead,
    has nothing to write to but memory that no other call ever gets."""

    def __init__(self, sock: socket.socket, memory_fd: int) -> None:
        self.sock = sock
        self.nbytes = 0
        self._memory_fd = memory_fd
        self._map: mmap.mmap | None = None

    @classmethod
    def through(cls, control: socket.socket) -> Connection:
        """Make one, and send its other end. Its memory cannot shrink: that would be a SIGBUS. Raises `OSError`."""
        sock, theirs = socket.socketpair()
        connection = cls(sock, os.memfd_create("kvf-helper-values", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        try:
            with theirs:
                fcntl.fcntl(connection._memory_fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_SEAL)
                socket.send_fds(control, [b"c"], [theirs.fileno(), connection._memory_fd])
        except BaseException:
            connection.close()
            raise
        return connection

    def extend(self, sizes: Sequence[int]) -> None:
        """Have room for values of these sizes. Raises `OSError` without memory; blocks while the kernel clears it."""
        if not self.has_room(sizes):
            needed = _begins(sizes)[-1]
            os.posix_fallocate(self._memory_fd, 0, needed + -needed % _MEMORY_STEP)
            self.map()

    def has_room(self, sizes: Sequence[int]) -> bool:
        """Whether values of these sizes fit into what is mapped."""
        return _begins(sizes)[-1] <= self.nbytes

    def map(self) -> None:
        """Map all of the memory. Views of before stay valid, and show the same bytes. Raises `OSError`."""
        self.unmap()
        nbytes = os.fstat(self._memory_fd).st_size
        self._map = mmap.mmap(self._memory_fd, nbytes)
        self.nbytes = nbytes

    def unmap(self) -> None:
        """End the mapping, with its last view."""
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
            self.nbytes = 0

    def memory(self) -> memoryview:
        """All that is mapped."""
        return memoryview(bytearray() if self._map is None else self._map)

    def values(self, sizes: Sequence[int]) -> list[memoryview]:
        """The places of values of these sizes. Raises `ValueError` where they do not fit."""
        if not self.has_room(sizes):
            raise ValueError(f"the values have {sum(sizes)} bytes, their shared memory has {self.nbytes}")
        memory = self.memory()
        return [memory[start : start + size] for start, size in zip(_begins(sizes), sizes, strict=False)]

    def close(self) -> None:
        self.sock.close()
        self.unmap()
        os.close(self._memory_fd)


def _begins(sizes: Sequence[int]) -> list[int]:
    """Where each value begins, and where the last one ends."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += size + -size % _VALUE_STEP
    return [*starts, end]


class _TierProcess(SupervisedChild):
    """A tier's helper process on the server's side. `start_message` is its first one. Callers only take connections and
    give them back; the thread kills a process whose call has not ended long after its deadline."""

    def __init__(self, name: str, start_message: Start, start_s: float) -> None:
        super().__init__("the helper process", thread=f"kvf-helper-{name}", ready_s=start_s)
        self._name = name
        self._start_message = start_message
        self._start_s = start_s
        self._state = threading.Condition()
        self._began = self._wanted = False
        # The socket of a process, and whether that has made its tier; how many have ended.
        self._control: socket.socket | None = None
        self._has_tier = False
        self._ends = 0
        self._once = LogLimit.once()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        # Connections of calls that ended without an answer, and when they count as frozen. Nothing uses one again.
        self._given_up: dict[Connection, float] = {}

    def connect(self, deadline: float) -> Connection:
        """Return a connection for one call; start the process if there is none. Blocks until it has made its tier.
        Raises `OSError`, at once where the process ends."""
        with self._state:
            if not self._began and not self.stopping:
                self._began = True
                self.start()
            ends = self._ends
            while self._control is None or not self._has_tier:
                if self.stopping or self._ends != ends:
                    raise ConnectionError("the helper process has ended")
                self._wanted = True
                self.wake()
                if not self._state.wait(deadline - time.monotonic()):
                    raise ConnectionError("the helper process did not start within the deadline")
            connection = self._idle.pop() if self._idle else Connection.through(self._control)
            self._busy.add(connection)
            return connection

    def give_back(self, connection: Connection, *, unanswered: float | None = None) -> None:
        """Take back the connection of a call. `unanswered`: the deadline of one that was not answered, whose
        connection is kept until the helper has ended the call."""
        with self._state:
            if connection not in self._busy or self.stopping:
                connection.close()
                return
            self._busy.discard(connection)
            if unanswered is None:
                self._idle.append(connection)
                return
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_WR)
            connection.sock.setblocking(False)
            self._given_up[connection] = unanswered + FROZEN_S
            self.wake()

    def close(self) -> None:
        """End the process and the calls in flight. Idempotent."""
        with self._state:
            self.stop()
            for connection in self._busy:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            self._state.notify_all()
        self.join(threading.TIMEOUT_MAX)

    # the supervisor's thread

    def wanted(self) -> bool:
        return self._wanted

    def spawn(self) -> subprocess.Popen[bytes]:
        self._wanted = False
        popen, control = start_connected(__name__)
        with self._state:
            self._control = control
        with contextlib.suppress(OSError):  # it has ended already, or never reads: both are seen
            write(control, self._start_message, time.monotonic() + self._start_s)
        control.setblocking(False)
        return popen

    def watch(self, poller: select.poll) -> float:
        if not self._has_tier:
            assert self._control is not None
            poller.register(self._control, select.POLLIN)
            return math.inf
        with self._state:
            for each in self._given_up:
                poller.register(each.sock, select.POLLIN)
            return min(self._given_up.values(), default=math.inf)

    def serve(self, happened: dict[int, int]) -> str | None:
        if not self._has_tier:
            return self._first_answer() if happened else None
        with self._state:
            given_up = dict(self._given_up)
        for connection, due in given_up.items():
            if connection.sock.fileno() in happened and _is_over(connection.sock):
                with self._state:
                    del self._given_up[connection]
                connection.close()
            elif time.monotonic() >= due:
                return f"{self.title} was killed: a call still ran {FROZEN_S:g} s after its deadline"
        return None

    def _first_answer(self) -> str | None:
        assert self._control is not None
        try:
            refusal = read(self._control, Answer, time.monotonic() + FROZEN_S).refusal
        except (EOFError, OSError):
            return ""
        self._control.setblocking(False)
        if refusal is not None:
            return f"{self.title} could not make the tier: {'; '.join(each for each in refusal if each)}"
        with self._state:
            self._has_tier, self.last_error = True, ""
            self._once.clear()
            self._state.notify_all()
        self.ready()
        return None

    def hang_up(self, popen: subprocess.Popen[bytes]) -> None:
        """Have the process close its tier and end."""
        with self._state:
            assert self._control is not None
            self._control.close()
            self._control, self._has_tier = None, False

    def ended(self, why: str) -> None:
        """Close the connections of a process that has ended; those in use are closed by their callers."""
        with self._state:
            for connection in (*self._idle, *self._given_up):
                connection.close()
            self._idle.clear()
            self._given_up.clear()
            self._busy.clear()
            self._ends += 1
            self._state.notify_all()
        if why:
            log.log(logging.ERROR if self._once.passes(why) else logging.DEBUG, "tier %s: %s", self._name, why)


def _is_over(sock: socket.socket) -> bool:
    """Whether the helper has ended the call and its connection. Drops what it still answers."""
    try:
        return not sock.recv(_DRAINED)
    except BlockingIOError:
        return False
    except OSError:
        return True


class _NoMemory(TierError):
    """The machine has no memory for the values of a call."""


class HelperTier(Tier):
    """A tier in a helper process, where `make(options, where)` returns it. The process imports `make` and the type of
    `options` by their names: both stand at the top of a module. `where` is the table in the TOML, for error texts, and
    `capabilities` are the optional methods of that tier. Raises `PluginBroken` for what another process cannot find, or
    options that are no struct.

    Thread-safe. The process is started at the first call, and killed where `make` takes longer than `start_s`; a
    `KVFrameworkError` of `make` is that of the calls that wait for it. It ends within a second of `close`, and with the
    server, however that ends. Each call at a time has separate memory, as large as its largest batch was."""

    def __init__(
        self,
        make: Callable[[O, str], Tier],
        options: O,
        *,
        name: str,
        where: str,
        capabilities: Collection[str] = (),
        start_s: float = START_S,
    ) -> None:
        self.name = name
        self._where = where
        self._capabilities = frozenset(capabilities)
        self._process = _TierProcess(name, Start(NamedCall.of(make, options, where=where), where), start_s)

    def capabilities(self) -> frozenset[str]:
        return self._capabilities

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        return [Outcome(each) for each in self._call("contains", deadline, keys).outcomes]

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        outcomes = self._move("get_into", keys, parts, deadline)
        return [each if isinstance(each, int) else Outcome(each) for each in outcomes]

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        return [Outcome(each) for each in self._move("put", keys, parts, deadline)]

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        return [Outcome(each) for each in self._call("delete", deadline, keys).outcomes]

    def touch(self, keys: Sequence[PackedKey], *, deadline: float) -> None:
        self._call("touch", deadline, keys)

    def usage(self, *, deadline: float) -> TierUsage:
        return TierUsage(*self._call("usage", deadline).usage)

    def scan(self, *, deadline: float) -> Iterator[TierEntry]:
        for key, nbytes, used_at in self._call("scan", deadline).entries:
            yield TierEntry(key, nbytes, used_at)

    def ping(self, *, deadline: float) -> None:
        self._call("ping", deadline)

    def close(self) -> None:
        """End the calls in flight and the helper. Idempotent; blocks for a second at most."""
        self._process.close()

    @property
    def pid(self) -> int | None:
        """The helper's process id, None while there is none."""
        return self._process.pid

    def _move(
        self, name: str, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], deadline: float
    ) -> list[int | str]:
        try:
            return self._call(name, deadline, keys, parts).outcomes
        except _NoMemory:
            if len(keys) == 1:
                return [Outcome.FAILED.value]
            each_alone = zip(keys, parts, strict=True)
            return [self._move(name, [key], [each], deadline)[0] for key, each in each_alone]

    def _call(
        self, name: str, deadline: float, keys: Sequence[PackedKey] = (), parts: Sequence[Sequence[memoryview]] = ()
    ) -> Answer:
        """Make one call. Raises `TierError`, and `RuntimeError` for what is a bug of the tier."""
        self._check_open()
        call = Call(name, list(keys), [sum(part.nbytes for part in each) for each in parts], deadline - _ANSWER_S)
        if call.deadline - time.monotonic() < _ANSWER_S:
            raise TierError("the call's deadline has passed", where=self._where)
        with self._connection(deadline) as connection:
            places = self._places(connection, call.sizes)
            if name == "put":
                for place, value in zip(places, parts, strict=True):
                    _copy(place, value, deadline, into_parts=False)
            write(connection.sock, call, deadline)
            answer = read(connection.sock, Answer, deadline)
            if name == "get_into":
                for place, value, outcome in zip(places, parts, answer.outcomes, strict=False):
                    if isinstance(outcome, int):
                        if not 0 <= outcome <= place.nbytes:
                            raise ConnectionError(f"the helper read {outcome} bytes for {place.nbytes}")
                        _copy(place[:outcome], value, deadline, into_parts=True)
            # In here: a call that failed leaves memory behind that a client library may still be at.
            if answer.bug:
                raise RuntimeError(answer.bug)
            if answer.refusal:
                fact, available, hint = answer.refusal
                raise TierError(fact, where=self._where, available=available, hint=hint)
        return answer

    def _check_open(self) -> None:
        if self._process.stopping:
            raise TierError("the tier is closed", where=self._where)

    def _places(self, connection: Connection, sizes: list[int]) -> list[memoryview]:
        try:
            connection.extend(sizes)
        except OSError as error:
            raise _NoMemory(f"no shared memory for {sum(sizes)} bytes: {error.strerror}", where=self._where) from error
        return connection.values(sizes)

    @contextmanager
    def _connection(self, deadline: float) -> Iterator[Connection]:
        """A connection for one call. After an error the supervisor keeps it until the helper has ended the call."""
        connection = None
        try:
            connection = self._process.connect(deadline)
            yield connection
        except BaseException as error:
            if connection is not None:
                self._process.give_back(connection, unanswered=deadline)
            if isinstance(error, TierError) or not isinstance(error, OSError | EOFError):
                raise
            self._check_open()
            ended = "there is no helper process yet" if connection is None else "the helper process has ended"
            late = "the call's deadline has passed"
            fact = late if isinstance(error, TimeoutError) else self._process.last_error or ended
            raise TierError(fact, where=self._where) from error
        self._process.give_back(connection)


def _copy(value: memoryview, parts: Sequence[memoryview], deadline: float, *, into_parts: bool) -> None:
    """Copy between a value and the parts that it fills, or the beginning of them. Raises `TimeoutError`."""
    if time.monotonic() >= deadline:
        raise TimeoutError
    at = 0
    for part in parts:
        piece = value[at : at + part.nbytes]
        if into_parts:
            copy_bytes(part[: piece.nbytes], piece)
        else:
            copy_bytes(piece, part)
        at += piece.nbytes


# The helper process.


def main(arguments: list[str]) -> None:
    """Make the tier, say whether that went well, and serve one call at a time on each connection that the server sends.
    The only argument is the number of the control socket's descriptor, whose end closes the tier."""
    end_with_parent()
    with socket.socket(fileno=int(arguments[0])) as control:
        start = read(control, Start)
        make, options = start.make.resolve()
        refusal = None
        try:
            tier: Tier = make(options, start.where)
        except KVFrameworkError as error:
            refusal = (error.fact, error.available, error.hint)
        with contextlib.suppress(BrokenPipeError):  # the server may have closed it by now
            write(control, Answer(refusal=refusal))
        if refusal is not None:
            return
        while True:
            word, descriptors, _, _ = socket.recv_fds(control, 1, 2)
            if not word:
                break
            connection = Connection(socket.socket(fileno=descriptors[0]), descriptors[1])
            threading.Thread(target=_serve, args=(connection, tier), daemon=True).start()
    try:
        tier.close()
    finally:
        # Not by the interpreter's exit: a library's exit handlers may hang.
        os._exit(0)


def _serve(connection: Connection, tier: Tier) -> None:
    try:
        while True:
            call = read(connection.sock, Call)
            write(connection.sock, _answer(tier, call, connection))
    except (OSError, EOFError):
        return  # the server gave the call up, or has ended
    finally:
        try:
            _unregister(tier, connection)
        finally:
            connection.close()


def _registered(tier: Tier, connection: Connection, sizes: list[int]) -> list[memoryview]:
    """Return the places of values of these sizes, in memory that the tier knows if it wants to."""
    if not connection.has_room(sizes):
        _unregister(tier, connection)
        connection.map()
        if isinstance(tier, RegistersMemory):
            try:
                tier.register_memory(connection.memory())
            except BaseException:
                connection.unmap()
                raise
    return connection.values(sizes)


def _unregister(tier: Tier, connection: Connection) -> None:
    if isinstance(tier, RegistersMemory) and connection.nbytes:
        tier.unregister_memory(connection.memory())
    connection.unmap()


def _answer(tier: Tier, call: Call, connection: Connection) -> Answer:
    at = call.deadline
    try:
        parts = [[value] for value in _registered(tier, connection, call.sizes)]
        if call.name == "get_into":
            found = tier.get_into(call.keys, parts, deadline=at)
            return Answer([each.value if isinstance(each, Outcome) else each for each in found])
        if call.name == "put":
            return Answer([each.value for each in tier.put(call.keys, parts, deadline=at)])
        if call.name == "contains":
            return Answer([each.value for each in tier.contains(call.keys, deadline=at)])
        if call.name == "delete":
            return Answer([each.value for each in tier.delete(call.keys, deadline=at)])
        if call.name == "scan":
            return Answer(entries=[(each.key, each.nbytes, each.used_at) for each in tier.scan(deadline=at)])
        if call.name == "usage":
            usage = tier.usage(deadline=at)
            return Answer(usage=(int(usage.used_bytes), int(usage.capacity_bytes)))
        if call.name == "touch":
            tier.touch(call.keys, deadline=at)
        else:
            tier.ping(deadline=at)
    except TierError as error:
        return Answer(refusal=(error.fact, error.available, error.hint))
    except Exception as error:  # noqa: BLE001  a bug of the tier, which the server logs
        traceback.print_exc()
        return Answer(bug=f"{type(error).__name__} in the helper: {error}")
    return Answer()
