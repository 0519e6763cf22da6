"""The Redis tier: the tier contract's operations as Redis commands. Runs in the caller's storage thread."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice

from kvf_redis import LEAST_VALUE_BYTES, RedisOptions
from kvf_redis.cluster import Cluster
from kvf_redis.commands import TRAILER_BYTES, Command, Count, Length, Page, Tail, parse_trailer
from kvf_redis.connect import Sentinels, rebuilt
from kvf_redis.node import Node, OneNode, Router
from kvf_redis.settings import Settings, read_settings
from kvf_redis.values import Borrowed, Reading, Writing, other_pieces, piece_ttl
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.tier import Outcome, PackedKey, Tier, TierEntry
from kvframework.errors import TierError

_START = b"0"
_SPECIAL = re.compile(rb"[\\*?\[\]]")


def pattern_of(prefix: bytes) -> bytes:
    """The glob of the tier's keys: the prefix as it stands, and as many bytes as a key has, so that no piece but the
    first and no key of a longer prefix matches."""
    return _SPECIAL.sub(rb"\\\g<0>", prefix) + b"?" * PACKED_KEY_BYTES


def list_values(router: Router, prefix: bytes, deadline: float) -> Iterator[TierEntry]:
    """Yield each value once, on all servers. Between two pages it holds no connection. Raises `TierError`."""
    pattern, seen = pattern_of(prefix), set[bytes]()
    for server in router.servers(deadline):
        cursor = _START
        while True:
            page = Page(cursor, pattern, key_bytes=len(prefix) + PACKED_KEY_BYTES)
            router.run_at(server, page, deadline)
            # SCAN may answer a key twice, and a key that moves between two servers is on both for a moment.
            fresh = [key for key in dict.fromkeys(page.keys) if key not in seen]
            seen.update(fresh)
            yield from _entries(router, fresh, len(prefix), deadline)
            cursor = page.cursor
            if cursor == _START:
                break


def _entries(router: Router, keys: list[bytes], prefix_bytes: int, deadline: float) -> Iterator[TierEntry]:
    sizes = [(Length(key), Tail(key)) for key in keys]
    if sizes:
        router.run([command for pair in sizes for command in pair], deadline)
    for length, tail in sizes:
        for command in (length, tail):
            if command.error or not command.answered:
                raise TierError(f"a listed value cannot be measured: {command.error or 'no answer'}", where="redis")
        if length.is_string:
            trailer = parse_trailer(tail.tail)
            nbytes = trailer.total if trailer else length.nbytes
            yield TierEntry(length.key[prefix_bytes:], nbytes, used_at=None)


_AT_ONCE = 4096
_LEAST_PIECE_BYTES = LEAST_VALUE_BYTES - TRAILER_BYTES


def open_tier(options: RedisOptions, *, where: str) -> RedisTier:
    """The tier; connects on first use. Raises `ConfigFieldError`."""
    settings = read_settings(options, where=where)
    return RedisTier(_router(settings, options, where), options, local=bool(settings.path))


class RedisTier(Tier):
    """Values under `prefix` + packed key. Thread-safe; owns its connections until `close`. A `local` server shares the
    machine's cores and copies one value after the other: loads take turns, and check what they have meanwhile."""

    name = "redis"

    def __init__(self, router: Router, options: RedisOptions, *, local: bool = False) -> None:
        self._router = router
        self._turn = threading.Lock() if local else None
        self._prefix = options.prefix.encode()
        self._ttl_s = options.ttl_s
        self._max_bytes = int(options.max_value_bytes)
        self._closed = False
        self._full = False

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        self._check(deadline)
        commands = [Count(self._prefix + key, b"EXISTS", Outcome.FOUND) for key in keys]
        self._run(commands, deadline)
        return [command.outcome for command in commands]

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        """DELETED: the value can no longer be found. Pieces on a lost node stay there until they expire."""
        self._check(deadline)
        tails = [Tail(self._prefix + key) for key in keys]
        unlinks = [_unlink(tail.key) for tail in tails]
        self._run([command for pair in zip(tails, unlinks, strict=True) for command in pair], deadline)
        self._try_all((_unlink(key) for tail in tails for key in other_pieces(tail)), deadline)
        return [unlink.outcome for unlink in unlinks]

    def touch(self, keys: Sequence[PackedKey], *, deadline: float) -> None:
        """Restarts the TTL of the keys; does nothing without one."""
        self._check(deadline)
        if not self._ttl_s:
            return
        tails = [Tail(self._prefix + key) for key in keys]
        self._run([*tails, *(_expire(tail.key, self._ttl_s) for tail in tails)], deadline)
        ttl_s = piece_ttl(self._ttl_s)
        self._try_all((_expire(key, ttl_s) for tail in tails for key in other_pieces(tail)), deadline)

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        self._check(deadline)
        with _borrowed(parts) as values:
            readings = [
                Reading(self._prefix + key, value, least=_LEAST_PIECE_BYTES)
                for key, value in zip(keys, values, strict=True)
            ]
            with self._own_turn(deadline):
                self._run([each.first for each in readings], deadline)
            waiting = readings
            while waiting:
                self._try([piece for each in waiting for piece in each.rest()], deadline)
                waiting = [each for each in waiting if each.torn()]
                self._try([each.first for each in waiting], deadline)
            return [each.received for each in readings]

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        self._check(deadline)
        with _borrowed(parts) as values:
            writings = [
                Writing(self._prefix + key, value, max_bytes=self._max_bytes, ttl_s=self._ttl_s)
                for key, value in zip(keys, values, strict=True)
            ]
            failure = self._try([piece for each in writings for piece in each.pieces], deadline)
            ready = [each for each in writings if each.ready()]
            if failure is not None and not ready:
                raise failure
            self._run([command for each in ready for command in (each.before, each.first)], deadline)
            self._try_all((_unlink(key) for each in writings for key in each.remains()), deadline)
            asked = [command for each in writings for command in (*each.pieces, each.first) if command.answered]
            self._full = any(each.outcome is Outcome.FAILED and not each.error for each in asked)
            return [each.first.outcome for each in writings]

    def scan(self, *, deadline: float) -> Iterator[TierEntry]:
        """Every value under the prefix. When it was used is not known. Measuring a value counts as a use for the
        server's own LRU."""
        return list_values(self._router, self._prefix, deadline)

    def capabilities(self) -> frozenset[str]:
        """`scan`, and `touch` if values have a TTL."""
        return super().capabilities() if self._ttl_s else super().capabilities() - {"touch"}

    def problems(self) -> list[str]:
        """That the server is full, until it stores values again."""
        return ["the server is full, and its maxmemory-policy evicts nothing (OOM)"] if self._full else []

    def ping(self, *, deadline: float) -> None:
        self._router.ping(deadline)

    def close(self) -> None:
        self._closed = True
        self._router.close()

    def _check(self, deadline: float) -> None:
        """Raise `TierError` where even a call without keys fails: after the deadline, and once closed."""
        if self._closed:
            raise TierError("the tier is closed")
        if time.monotonic() >= deadline:
            raise TierError("the deadline has passed")

    @contextmanager
    def _own_turn(self, deadline: float) -> Iterator[None]:
        """Holds up other loads of a local server. Raises `TierError` if those before it take until the deadline."""
        if self._turn is None:
            yield
            return
        if not self._turn.acquire(timeout=min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)):
            raise TierError("other loads took until the deadline")
        try:
            yield
        finally:
            self._turn.release()

    def _run(self, commands: Sequence[Command], deadline: float) -> None:
        """Carry out the commands. Raises `TierError` if none of them could be."""
        if commands:
            self._router.run(commands, deadline)

    def _try_all(self, commands: Iterator[Command], deadline: float) -> None:
        """Carry out the commands, a bounded number at once: a forged trailer may name any number of pieces. Commands
        left at the deadline are not sent."""
        while time.monotonic() < deadline and (batch := list(islice(commands, _AT_ONCE))):
            self._try(batch, deadline)

    def _try(self, commands: Sequence[Command], deadline: float) -> TierError | None:
        """Return the error that `_run` raises: these commands may fail without failing the call."""
        try:
            self._run(commands, deadline)
        except TierError as error:
            return rebuilt(error)
        return None


def _router(settings: Settings, options: RedisOptions, where: str) -> Router:
    connector, places = settings.connector, settings.places
    if options.topology == "cluster":
        return Cluster(connector, places, options.connections, where=where)
    if settings.sentinels is not None:
        sentinels = Sentinels(settings.sentinels, places, connector, master_name=options.master_name, where=where)
        where = f"{where}: redis master {options.master_name!r}"
        return OneNode(Node(sentinels.connect, options.connections, where=where), where=where)
    place = places[0] if places else None
    where = f"{where}: redis at {place or settings.path}"
    return OneNode(Node(lambda end: connector.connect(place, end), options.connections, where=where), where=where)


def _unlink(key: bytes) -> Count:
    return Count(key, b"UNLINK", Outcome.DELETED)


def _expire(key: bytes, ttl_s: int) -> Count:
    return Count(key, b"EXPIRE", Outcome.FOUND, b"%d" % ttl_s)


@contextmanager
def _borrowed(parts: Sequence[Sequence[memoryview]]) -> Iterator[list[Borrowed]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Borrowed(each)) for each in parts]
