"""The helper process of a tier: makes the tier, and serves one call at a time on each connection that the server sends.

Values are in memory that it shares with the server, see `ValueMemory`.

Started by `helper_tier.py`. The end of the thread that started it ends it, and so does the end of the
control socket: then the tier is closed first.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import struct
import threading
import time
import traceback
from collections.abc import Sequence

import msgspec

from kvframework.api.tier import Outcome, RegistersMemory, Tier
from kvframework.by_name import NamedCall
from kvframework.errors import KVFrameworkError, TierError
from kvframework.supervise.child import end_with_parent

# The memory of the values that pass between a tier and its helper process: a memfd that both have mapped.
#
# Each connection has its own, so a call that goes on behind its deadline, in a helper that is not yet dead, has nothing
# to write to but memory that no other call ever gets.

# Values begin at multiples of this, a cache line, and the memory grows by multiples of the other.
_VALUE_STEP = 64
_MEMORY_STEP = 1 << 20
# Not yet in `fcntl` of Python 3.10.
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK = 1033, 1, 2


class ValueMemory:
    """The memory of one connection. Takes over the descriptor. The server makes and extends it, before a call; the
    helper maps what it has become. One thread at a time."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None
        self.nbytes = 0

    @classmethod
    def create(cls) -> ValueMemory:
        """Make an empty one, which cannot shrink: a mapped page behind its end would be a SIGBUS. Raises
        `OSError`."""
        fd = os.memfd_create("kvf-helper-values", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_SEAL)
        return cls(fd)

    def extend(self, sizes: Sequence[int]) -> None:
        """Have room for values of these sizes. Raises `OSError` where there is no memory; blocks for the kernel's
        clearing of it."""
        if not self.has_room(sizes):
            needed = _begins(sizes)[-1]
            os.posix_fallocate(self.fd, 0, needed + -needed % _MEMORY_STEP)
            self.map()

    def has_room(self, sizes: Sequence[int]) -> bool:
        """Whether values of these sizes fit into what is mapped."""
        return _begins(sizes)[-1] <= self.nbytes

    def map(self) -> None:
        """Map all of it. Views of before stay valid, and show the same bytes. Raises `OSError`."""
        self.unmap()
        nbytes = os.fstat(self.fd).st_size
        self._map = mmap.mmap(self.fd, nbytes)
        self.nbytes = nbytes

    def all(self) -> memoryview:
        """All that is mapped."""
        return memoryview(bytearray() if self._map is None else self._map)

    def values(self, sizes: Sequence[int]) -> list[memoryview]:
        """The places of values of these sizes. Raises `ValueError` where they do not fit."""
        if not self.has_room(sizes):
            raise ValueError(f"values of {sum(sizes)} bytes in a memory of {self.nbytes}")
        memory, starts = self.all(), _begins(sizes)
        return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def close(self) -> None:
        self.unmap()
        os.close(self.fd)

    def unmap(self) -> None:
        """End the mapping, with its last view."""
        if self._map is not None:
            with contextlib.suppress(BufferError):  # the last view ends it
                self._map.close()
            self._map = None
            self.nbytes = 0


class Connection:
    """A connection for one call at a time, and the memory of its values."""

    def __init__(self, sock: socket.socket, memory: ValueMemory) -> None:
        self.sock = sock
        self.memory = memory

    @classmethod
    def through(cls, control: socket.socket) -> Connection:
        """Make one, and send its other end. Raises `OSError`."""
        sock, theirs = socket.socketpair()
        try:
            with theirs:
                memory = ValueMemory.create()
                try:
                    socket.send_fds(control, [b"c"], [theirs.fileno(), memory.fd])
                except BaseException:
                    memory.close()
                    raise
        except BaseException:
            sock.close()
            raise
        return cls(sock, memory)

    def close(self) -> None:
        self.sock.close()
        self.memory.close()


def _begins(sizes: Sequence[int]) -> list[int]:
    """Where each value begins, and where the last one ends."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += size + -size % _VALUE_STEP
    return [*starts, end]


# The calls between a tier and its helper process, as bytes on a Unix socket: a length, and a message.
#
# Values are in the memory that both share, in the order of the call's keys. Deadlines are
# absolute, on `time.monotonic()`; None is none. All functions raise `TimeoutError`, another `OSError`, or `EOFError`.

_LENGTH = struct.Struct("<I")


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


_encoder = msgspec.msgpack.Encoder()
_starts = msgspec.msgpack.Decoder(Start)
_calls = msgspec.msgpack.Decoder(Call)
_answers = msgspec.msgpack.Decoder(Answer)


def write_start(sock: socket.socket, start: Start, deadline: float) -> None:
    """Sends the first message."""
    _write(sock, start, deadline)


def read_start(sock: socket.socket) -> Start:
    """Returns the first message, and reads no byte behind it."""
    return _starts.decode(_read(sock, None))


def write_call(sock: socket.socket, call: Call, deadline: float) -> None:
    """Sends a call."""
    _write(sock, call, deadline)


def read_call(sock: socket.socket) -> Call:
    """Returns the next call."""
    return _calls.decode(_read(sock, None))


def write_answer(sock: socket.socket, answer: Answer) -> None:
    """Sends an answer."""
    _write(sock, answer, None)


def read_answer(sock: socket.socket, deadline: float) -> Answer:
    """Returns the answer."""
    return _answers.decode(_read(sock, deadline))


def _read(sock: socket.socket, deadline: float | None) -> bytearray:
    head = _receive(sock, _LENGTH.size, deadline)
    return _receive(sock, _LENGTH.unpack(head)[0], deadline)


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


def _write(sock: socket.socket, message: Start | Call | Answer, deadline: float | None) -> None:
    body = _encoder.encode(message)
    left = memoryview(_LENGTH.pack(len(body)) + body)
    while left:
        _arm(sock, deadline)
        left = left[sock.send(left) :]


def _arm(sock: socket.socket, deadline: float | None) -> None:
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise TimeoutError
    sock.settimeout(left)


def main(arguments: list[str]) -> None:
    """Runs the helper, which says first whether it has made the tier. The only argument is the number of the control
    socket's descriptor."""
    end_with_parent()
    with socket.socket(fileno=int(arguments[0])) as control:
        start = read_start(control)
        make, options = start.make.resolve()
        try:
            tier: Tier = make(options, start.where)
        except KVFrameworkError as error:
            _say(control, Answer(refusal=(error.fact, error.available, error.hint)))
            return
        _say(control, Answer())
        while True:
            word, descriptors, _, _ = socket.recv_fds(control, 1, 2)
            if not word:
                break
            connection = Connection(socket.socket(fileno=descriptors[0]), ValueMemory(descriptors[1]))
            threading.Thread(target=_serve, args=(connection, tier), daemon=True).start()
    try:
        tier.close()
    finally:
        # Not by the interpreter's exit: a library's exit handlers may hang.
        os._exit(0)


def _say(control: socket.socket, answer: Answer) -> None:
    with contextlib.suppress(BrokenPipeError):  # the server may have closed it by now
        write_answer(control, answer)


def _serve(connection: Connection, tier: Tier) -> None:
    memory = connection.memory
    try:
        while True:
            call = read_call(connection.sock)
            write_answer(connection.sock, _answer(tier, call, memory))
    except (OSError, EOFError):
        return  # the server gave the call up, or has ended
    finally:
        try:
            _forget(tier, memory)
        finally:
            connection.close()


def _places(tier: Tier, memory: ValueMemory, sizes: list[int]) -> list[memoryview]:
    if not memory.has_room(sizes):
        _forget(tier, memory)
        memory.map()
        if isinstance(tier, RegistersMemory):
            try:
                tier.register_memory(memory.all())
            except BaseException:
                memory.unmap()
                raise
    return memory.values(sizes)


def _forget(tier: Tier, memory: ValueMemory) -> None:
    if isinstance(tier, RegistersMemory) and memory.nbytes:
        tier.unregister_memory(memory.all())
    memory.unmap()


def _answer(tier: Tier, call: Call, memory: ValueMemory) -> Answer:
    at = call.deadline
    try:
        values = _places(tier, memory, call.sizes)
        if call.name == "get_into":
            return Answer([_plain(each) for each in tier.get_into(call.keys, [[v] for v in values], deadline=at)])
        if call.name == "put":
            return Answer([each.value for each in tier.put(call.keys, [[v] for v in values], deadline=at)])
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


def _plain(outcome: int | Outcome) -> int | str:
    return outcome.value if isinstance(outcome, Outcome) else outcome
