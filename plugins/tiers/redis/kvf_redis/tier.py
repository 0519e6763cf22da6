"""The Redis tier: the tier contract's operations as Redis commands. Runs in the caller's storage thread."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec

from kvf_redis import RedisOptions
from kvf_redis.cluster import Cluster
from kvf_redis.commands import Command, Count, Get, Length, Page, Set
from kvf_redis.connect import Sentinels
from kvf_redis.node import Node, OneNode, Router
from kvf_redis.settings import Settings, read_settings
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.plugin import ByteSize
from kvframework.api.tier import Outcome, PackedKey, Tier, TierEntry
from kvframework.errors import TierError

_START = b"0"
_SPECIAL = re.compile(rb"[\\*?\[\]]")


def pattern_of(prefix: bytes) -> bytes:
    """The glob of the tier's keys: the prefix as it stands, and as many bytes as a key has, so that no key of a longer
    prefix matches."""
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
    lengths = [Length(key) for key in keys]
    if lengths:
        router.run(lengths, deadline)
    for length in lengths:
        if length.error or not length.answered:
            raise TierError(f"the size of a listed value is unknown: {length.error or 'no answer'}", where="redis")
        if length.is_string:
            yield TierEntry(length.key[prefix_bytes:], length.nbytes, used_at=None)


def open_tier(options: RedisOptions, *, where: str) -> RedisTier:
    """The tier, with quotas where they are installed; connects on first use. Raises `ConfigFieldError`."""
    settings, kind = read_settings(options, where=where), RedisTier
    if find_spec("kvf_quota") is not None:
        from kvf_quota.in_redis import QuotaRedis as kind  # noqa: N813
    return kind(_router(settings, options, where), options, local=bool(settings.path))


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
        # The longest value of the last `put` that was too long.
        self._too_long = 0

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        self._check(deadline)
        commands = [Count(self._prefix + key, b"EXISTS", Outcome.FOUND) for key in keys]
        self._run(commands, deadline)
        return [command.outcome for command in commands]

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        self._check(deadline)
        commands = [Count(self._prefix + key, b"UNLINK", Outcome.DELETED) for key in keys]
        self._run(commands, deadline)
        return [command.outcome for command in commands]

    def touch(self, keys: Sequence[PackedKey], *, deadline: float) -> None:
        """Restarts the TTL of the keys; does nothing without one."""
        self._check(deadline)
        if self._ttl_s:
            ttl = b"%d" % self._ttl_s
            self._run([Count(self._prefix + key, b"EXPIRE", Outcome.FOUND, ttl) for key in keys], deadline)

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        self._check(deadline)
        with _borrowed(parts) as values, self._own_turn(deadline):
            commands = [Get(self._prefix + key, value) for key, value in zip(keys, values, strict=True)]
            self._run(commands, deadline)
            return [each.nbytes if each.outcome is Outcome.FOUND else each.outcome for each in commands]

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        """FAILED for values beyond `max_value_bytes`."""
        self._check(deadline)
        with _borrowed(parts) as values:
            named = zip(keys, values, strict=True)
            commands = [Set(self._prefix + key, value, self.ttl_of(key)) for key, value in named]
            self._too_long = max((each.cost for each in commands if each.cost > self._max_bytes), default=0)
            self._run([each for each in commands if each.cost <= self._max_bytes], deadline)
            self._full = any(each.answered and each.outcome is Outcome.FAILED and not each.error for each in commands)
            return [each.outcome for each in commands]

    def ttl_of(self, key: PackedKey) -> int:
        """Return the seconds after which a value that is put now expires, 0: never."""
        return self._ttl_s

    def scan(self, *, deadline: float) -> Iterator[TierEntry]:
        """Every value under the prefix. When it was used is not known. Measuring a value counts as a use for the
        server's own LRU."""
        return list_values(self._router, self._prefix, deadline)

    def capabilities(self) -> frozenset[str]:
        """`scan`, and `touch` if values have a TTL."""
        return super().capabilities() if self._ttl_s else super().capabilities() - {"touch"}

    def problems(self) -> list[str]:
        """That the server is full, or a value too long, until values are stored again."""
        full = ["Redis is full, and its maxmemory-policy evicts nothing (OOM)"] if self._full else []
        long = [f"a value of {ByteSize(self._too_long)} is longer than max_value_bytes"] if self._too_long else []
        return full + long

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
            raise TierError("the call's deadline has passed")

    @contextmanager
    def _own_turn(self, deadline: float) -> Iterator[None]:
        """Holds up other loads of a local server. Raises `TierError` if those before it take until the deadline."""
        if self._turn is None:
            yield
            return
        if not self._turn.acquire(timeout=min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)):
            raise TierError("the load waited for other loads until its deadline")
        try:
            yield
        finally:
            self._turn.release()

    def _run(self, commands: Sequence[Command], deadline: float) -> None:
        """Carry out the commands. Raises `TierError` if none of them could be."""
        if commands:
            self._router.run(commands, deadline)


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


@contextmanager
def _borrowed(parts: Sequence[Sequence[memoryview]]) -> Iterator[list[list[memoryview]]]:
    """The parts of each value as bytes. The views end with the `with` block, so that not even an error's traceback
    keeps the caller's buffers alive."""
    with ExitStack() as stack:
        yield [[stack.enter_context(part.cast("B")) for part in each if part.nbytes] for each in parts]
