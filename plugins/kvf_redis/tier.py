"""Owns the tier: each call is one pipelined flight on one borrowed connection. Runs in the caller's storage thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvf_redis.connect import Server
from kvf_redis.flight import fly
from kvf_redis.options import RedisOptions
from kvf_redis.pool import Pool
from kvf_redis.resp import MAX_VALUE_BYTES, ProtocolSurprise, Refused, command, holds, set_command
from kvf_redis.wire import Wire
from kvframework.api import Buffer, Outcome, PackedKey, Tier
from kvframework.errors import TierError

T = TypeVar("T")

# A value of another length than expected is read and dropped up to this size; beyond, the connection is dropped.
DRAIN_BYTES = 16 << 20

_HINTS = {
    "NOAUTH": "name a variable with the password in password_env",
    "NOPERM": "allow GET, SET, EXISTS, UNLINK, EXPIRE and PING on the prefix's keys for this user",
    "READONLY": "url names a replica: name the primary",
    "MOVED": "url names a member of a cluster: name a single server",
    "CROSSSLOT": "url names a member of a cluster: name a single server",
    "LOADING": "the server is starting: it works once its data is loaded",
    "MISCONF": "the server cannot save to disk: see its log",
}


def open_tier(options: RedisOptions, *, where: str) -> Tier:
    """The tier; connects on first use. Raises `ConfigFieldError`."""
    return RedisTier(Server(options, where=where), options, where=where)


class _Oversized(Exception):
    """A value is too long to be read past."""


class RedisTier(Tier):
    """Values under `prefix` + packed key in one Redis server. Thread-safe; owns its connections until `close`.

    A connection is dropped after any error, timeout or surprise, and made anew by the next call that needs one.
    """

    name = "redis"

    def __init__(self, server: Server, options: RedisOptions, *, where: str) -> None:
        self._where = f"{where}: redis at {server.location}"
        self._prefix = options.prefix.encode()
        self._ttl_s = options.ttl_s
        self._pool = Pool(server.connect, options.connections, where=self._where)

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        return self._each(b"EXISTS", keys, (), {1: Outcome.FOUND, 0: Outcome.MISSING}, deadline)

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        return self._each(b"UNLINK", keys, (), {1: Outcome.DELETED, 0: Outcome.MISSING}, deadline)

    def touch(self, keys: Sequence[PackedKey], *, deadline: float) -> None:
        """Starts the TTL of the keys anew; nothing to do without one."""
        if self._ttl_s:
            self._each(b"EXPIRE", keys, (b"%d" % self._ttl_s,), {1: Outcome.FOUND, 0: Outcome.MISSING}, deadline)

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        sizes = _sizes(keys, parts)
        if not keys:
            return []

        def work(wire: Wire) -> list[Outcome]:
            outcomes = [Outcome.FAILED] * len(keys)

            def read(index: int) -> None:
                reply = wire.reply(deadline)
                if not holds(reply, "$"):
                    return
                if reply.number < 0:
                    outcomes[index] = Outcome.MISSING
                elif reply.number == sizes[index]:
                    wire.value_into(_flat(parts[index]), deadline)
                    outcomes[index] = Outcome.FOUND
                elif reply.number <= DRAIN_BYTES:
                    wire.drain(reply.number, deadline)
                else:
                    raise _Oversized

            try:
                fly(wire, sizes, lambda index: [command(b"GET", self._prefix + keys[index])], read, deadline)
            except _Oversized:
                wire.spoilt = True  # the rest of the batch stays FAILED
            return outcomes

        return self._run(work, deadline)

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        sizes = _sizes(keys, parts)
        chosen = [index for index, size in enumerate(sizes) if size <= MAX_VALUE_BYTES]
        if not chosen:
            return [Outcome.FAILED] * len(keys)

        def buffers(position: int) -> Iterable[Buffer]:
            index = chosen[position]
            head, tail = set_command(self._prefix + keys[index], sizes[index], self._ttl_s)
            return [head, *_flat(parts[index]), tail]

        def work(wire: Wire) -> list[Outcome]:
            outcomes = [Outcome.FAILED] * len(keys)

            def read(position: int) -> None:
                reply = wire.reply(deadline)
                if holds(reply, "+"):
                    if reply.text != "OK":
                        raise ProtocolSurprise("a SET was not answered by OK")
                    outcomes[chosen[position]] = Outcome.STORED

            fly(wire, [sizes[index] for index in chosen], buffers, read, deadline)
            return outcomes

        return self._run(work, deadline)

    def ping(self, *, deadline: float) -> None:
        def work(wire: Wire) -> None:
            wire.send([command(b"PING")], deadline)
            reply = wire.reply(deadline)
            if not holds(reply, "+") or reply.text != "PONG":
                raise ProtocolSurprise("a PING was not answered by PONG")

        self._run(work, deadline)

    def close(self) -> None:
        self._pool.close()

    def _each(
        self,
        verb: bytes,
        keys: Sequence[PackedKey],
        words: Sequence[bytes],
        meaning: dict[int, Outcome],
        deadline: float,
    ) -> list[Outcome]:
        """One command a key, answered by a number."""
        if not keys:
            return []

        def work(wire: Wire) -> list[Outcome]:
            outcomes = [Outcome.FAILED] * len(keys)

            def read(index: int) -> None:
                reply = wire.reply(deadline)
                if holds(reply, ":"):
                    if reply.number not in meaning:
                        raise ProtocolSurprise("a number came that the command does not answer")
                    outcomes[index] = meaning[reply.number]

            commands = [command(verb, self._prefix + key, *words) for key in keys]
            fly(wire, [len(each) for each in commands], lambda index: [commands[index]], read, deadline)
            return outcomes

        return self._run(work, deadline)

    def _run(self, work: Callable[[Wire], T], deadline: float) -> T:
        """Does `work` on a borrowed connection. Nothing of `work` outlives it: the error raised for a failure has no
        context whose frames would keep the caller's buffers."""
        wire = self._pool.acquire(deadline)
        try:
            result = work(wire)
        except (OSError, ProtocolSurprise, Refused) as error:
            fact, hint = _explain(error)
            self._pool.discard(wire)
        except BaseException:
            self._pool.discard(wire)
            raise
        else:
            self._pool.release(wire)
            return result
        raise TierError("the tier is closed" if self._pool.closed else fact, where=self._where, hint=hint)


def _sizes(keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]]) -> list[int]:
    if len(keys) != len(parts):
        raise ValueError(f"{len(keys)} keys, but parts for {len(parts)}")
    return [sum(part.nbytes for part in each) for each in parts]


def _flat(parts: Sequence[memoryview]) -> list[memoryview]:
    return [part.cast("B") for part in parts if part.nbytes]


def _explain(error: Exception) -> tuple[str, str]:
    if isinstance(error, TimeoutError):
        return "no answer before the deadline", ""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__, ""
    if isinstance(error, Refused):
        return f"the server answers: {error}", _HINTS.get(error.code, "")
    return f"protocol surprise: {error}", "is url the address of a Redis server?"
