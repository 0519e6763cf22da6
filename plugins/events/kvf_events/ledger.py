"""What a next server must know of what this one has announced: a separate file, for its user alone.

It holds the numbers that are in use, 8 bytes for each announced block, and, where a keeper holds L1, the tokens of
unsalted chunks; never a salt. Records are appended before their news are sent, each with its length and a checksum:
what a crash leaves of the last one is not read, and was not sent. The file is written whole again when most of it is of
the past.

A power cut may take the last records with it: what they announced then stays at routers until they drop the node.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

from kvf_events.block_index import Line, Medium, News, Removed
from kvf_events.chunks import Chunk, ExtraKeys
from kvframework.errors import ConfigError

# Numbers that are reserved at a time.
RESERVE = 1024
# Growth after which the file is written whole again.
GROWTH_BYTES = 8 << 20
_MAGIC = b"kvframework events 1\n"
_HEAD = struct.Struct("<II")
_MAX_RECORD = 64 << 20
_LOCK_S = 10.0
_LOCK_STEP_S = 0.02
_HASHES_AT_ONCE = 1 << 16


class EventLedgerError(ConfigError, code="config.events_ledger"):
    """The ledger of `[events]` cannot be opened or written.

    What to do: set `[events] state` to a folder that only this server uses and that the server's user may write
    to."""


class _Numbers(msgspec.Struct, tag=0, array_like=True, gc=False):
    """Numbers below `end` may have been sent."""

    end: int


class _Told(msgspec.Struct, tag=1, array_like=True, gc=False):
    model: str
    medium: int
    hashes: bytes


class _Gone(msgspec.Struct, tag=2, array_like=True, gc=False):
    """Removed with the message `number` or before."""

    number: int
    model: str
    medium: int
    hashes: bytes


class _Content(msgspec.Struct, tag=3, array_like=True, gc=False):
    namespace: bytes
    digest: bytes
    parent: bytes
    tokens: bytes
    hashes: bytes
    extra_keys: tuple[ExtraKeys | None, ...]
    lora_name: str


_Record = _Numbers | _Told | _Gone | _Content
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Record)


@dataclass
class Found:
    """What a ledger holds: `next` is a number that no message has had; `announced` the blocks that routers hold;
    `gone` those that were removed, with the number of their removal; `contents` the chunks of each namespace."""

    next: int = 0
    announced: dict[tuple[str, Medium], set[int]] = field(default_factory=dict)
    gone: list[tuple[int, Removed]] = field(default_factory=list)
    contents: dict[bytes, dict[bytes, Chunk]] = field(default_factory=dict)

    def add(self, record: _Record) -> None:
        if isinstance(record, _Numbers):
            self.next = max(self.next, record.end)
        elif isinstance(record, _Content):
            hashes = _unpacked(record.hashes)
            chunk = Chunk(record.digest, record.parent, record.tokens, hashes, record.extra_keys, record.lora_name)
            self.contents.setdefault(record.namespace, {})[record.digest] = chunk
        elif isinstance(record, _Told):
            self.announced.setdefault((record.model, Medium(record.medium)), set()).update(_unpacked(record.hashes))
        else:
            of = record.model, Medium(record.medium)
            removed = Removed(*of, list(_unpacked(record.hashes)))
            self.announced.setdefault(of, set()).difference_update(removed.hashes)
            self.gone.append((record.number, removed))


class Ledger:
    """The file at `path`, locked from `open` to `close`. `keeps`: the tokens of chunks are kept, too. Methods raise
    `OSError` where they say nothing else."""

    def __init__(self, path: Path, *, keeps: bool) -> None:
        self.path = path
        self.keeps = keeps
        self._fd = -1
        self._lock_fd = -1
        self.nbytes = 0
        self._anew_at = 0

    def open(self) -> Found:
        """Return what the file holds. Waits some seconds for the end of an earlier server. Raises
        `EventLedgerError`."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock()
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise OSError("the path is not a file")
            os.fchmod(self._fd, 0o600)
            with open(self._fd, "rb", closefd=False) as file:
                data = file.read()
        except OSError as error:
            self.close()
            raise EventLedgerError(
                f"the ledger of events cannot be opened: {error.strerror or error}",
                where=str(self.path),
                hint="set [events] state to a folder of the server's user",
            ) from None
        found = Found()
        # Up to a record that this release does not know.
        with contextlib.suppress(ValueError, struct.error):
            for record in _records(data):
                found.add(record)
        return found

    def rewrite(
        self,
        end: int,
        announced: dict[tuple[str, Medium], set[int]],
        gone: Iterable[tuple[int, Removed]],
        kept: Iterable[tuple[Line, Chunk]],
    ) -> None:
        """Write the whole file again: numbers below `end` are in use, and `kept` are the chunks of L1."""
        other = self.path.with_name(self.path.name + ".new")
        fd = os.open(other, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _write(fd, _MAGIC)
            nbytes = len(_MAGIC) + _write(fd, _framed(_state(end, announced, gone)))
            if self.keeps:
                for line, chunk in kept:
                    nbytes += _write(fd, _framed([_content(line.namespace, chunk)]))
            os.fdatasync(fd)
            os.rename(other, self.path)
        except BaseException:
            os.close(fd)
            other.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd, self.nbytes, self._anew_at = fd, nbytes, 2 * nbytes + GROWTH_BYTES

    @property
    def is_long(self) -> bool:
        """Whether most of the file is of the past: it should be written whole again."""
        return self.nbytes > self._anew_at

    def write(self, end: int, number: int, news: Sequence[News]) -> None:
        """Append news, before they are sent with `number`, the last one, and those before, all below `end` (0: as it
        was)."""
        records: list[_Record] = [_Numbers(end)] if end else []
        for each in news:
            if isinstance(each, Removed):
                records += _gone(number, each)
                continue
            records.append(_Told(each.model, each.medium, _packed(each.chunk.hashes[each.first :])))
            if self.keeps and each.medium is Medium.CPU and not each.salt:
                records.append(_content(each.namespace, each.chunk))
        self.nbytes += _write(self._fd, _framed(records))

    def close(self) -> None:
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1

    def _lock(self) -> None:
        """Lock a file beside, since the ledger itself is replaced."""
        beside = self.path.with_name(self.path.name + ".lock")
        self._lock_fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        until = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise OSError("another server uses the ledger") from None
                time.sleep(_LOCK_STEP_S)


def _records(data: bytes) -> Iterator[_Record]:
    at = len(_MAGIC) if data.startswith(_MAGIC) else len(data)
    while at + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        record = data[at : at + length]
        if not 0 < length <= _MAX_RECORD or len(record) != length or xxhash.xxh32_intdigest(record) != checksum:
            return
        try:
            yield _decoder.decode(record)
        except msgspec.DecodeError:
            return
        at += length


def _state(
    end: int, announced: dict[tuple[str, Medium], set[int]], gone: Iterable[tuple[int, Removed]]
) -> Iterator[_Record]:
    yield _Numbers(end)
    for number, removed in gone:
        yield from _gone(number, removed)
    for (model, medium), hashes in announced.items():
        for part in _parts(list(hashes)):
            yield _Told(model, medium, part)


def _gone(number: int, removed: Removed) -> Iterator[_Gone]:
    for part in _parts(removed.hashes):
        yield _Gone(number, removed.model, removed.medium, part)


def _parts(hashes: Sequence[int]) -> Iterator[bytes]:
    """Yield hashes for records that are far smaller than the largest one."""
    for first in range(0, len(hashes), _HASHES_AT_ONCE):
        yield _packed(hashes[first : first + _HASHES_AT_ONCE])


def _content(namespace: bytes, chunk: Chunk) -> _Content:
    return _Content(
        namespace, chunk.digest, chunk.parent, chunk.tokens, _packed(chunk.hashes), chunk.extra_keys, chunk.lora_name
    )


def _framed(records: Iterable[_Record]) -> bytes:
    parts = []
    for record in records:
        data = _encode(record)
        parts += [_HEAD.pack(len(data), xxhash.xxh32_intdigest(data)), data]
    return b"".join(parts)


def _write(fd: int, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return len(data)


def _packed(hashes: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def _unpacked(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 8}Q", packed)
