"""The checks of `kvframework doctor` for a Redis: whether it answers, its memory limit, its eviction policy. Runs in a
process of its own; changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from kvf_redis import RedisOptions
from kvf_redis.connect import Connector, Sentinels
from kvf_redis.resp import Place
from kvf_redis.settings import Settings, read_settings
from kvframework.api.plugin import ByteSize, Finding, TableContext
from kvframework.errors import TierError

# The tier cannot delete without UNLINK.
_LEAST_VERSION = (4,)
_CACHE = "CONFIG SET maxmemory-policy allkeys-lru, and the same in redis.conf"


def diagnose(options: RedisOptions, context: TableContext, deadline: float) -> list[Finding]:
    """Check the Redis; blocks until `deadline` at most. Of a cluster, only the first node that answers is checked.
    Raises `ConfigFieldError`."""
    settings = read_settings(options, where=context.where)
    connector = settings.connector
    try:
        place, seconds = _first_answer(options, settings, context.where, deadline)
        facts = connector.ask(place, "INFO", read=_facts, deadline=deadline)
    except TierError as error:
        advice = error.hint or "start Redis, or correct url: until then the server runs without this tier"
        return [Finding("redis.reachable", "fail", f"{error.where.rpartition(': ')[2]}: {error.fact}", advice)]
    version = facts.get("redis_version", "")
    name = f"{facts.get('server_name', 'redis')} {facts.get('valkey_version', version)}"
    where = str(place or settings.path)
    answered = f"{where} answers in {seconds * 1000:.1f} ms, connection and login included: {name}"
    findings = [Finding("redis.reachable", "ok", answered)]
    if not version or tuple(int(each) for each in version.split(".")[:1] if each.isdigit()) < _LEAST_VERSION:
        fact = f"{name} is older than Redis 4" if version else "the Redis user may not read INFO"
        advice = "use Redis 4 or newer" if version else "allow +info to the Redis user; only this check needs +info"
        return [*findings, Finding("redis.version", "fail" if version else "warn", fact, advice)]
    written = _writes(facts, _saves(connector, place, deadline))
    return [*findings, *_room(facts), *_policy(facts, options), written]


def _first_answer(options: RedisOptions, settings: Settings, where: str, deadline: float) -> tuple[Place | None, float]:
    """The first server that answers a PING, and how long the PING took in seconds."""
    places: tuple[Place | None, ...] = settings.places or (None,)
    if settings.sentinels is not None:
        sentinels = Sentinels(
            settings.sentinels, settings.places, settings.connector, master_name=options.master_name, where=where
        )
        places = (sentinels.master(deadline),)
    failure: TierError | None = None
    for index, place in enumerate(places):
        started = time.monotonic()
        share = started + (deadline - started) / (len(places) - index + 1)
        try:
            settings.connector.ask(place, "PING", read=str, deadline=share)
        except TierError as error:
            failure = failure or error
        else:
            return place, time.monotonic() - started
    assert failure is not None, "no address is configured"
    raise failure


def _facts(reply: Any) -> dict[str, str]:
    lines = bytes(reply).decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _room(facts: dict[str, str]) -> Iterator[Finding]:
    used, limit = (int(facts.get(name, 0)) for name in ("used_memory", "maxmemory"))
    if limit:
        yield Finding("redis.maxmemory", "ok", f"Redis uses {ByteSize(used)} of {ByteSize(limit)}")
        return
    machine = facts.get("total_system_memory", "")
    yield Finding(
        "redis.maxmemory",
        "warn",
        f"maxmemory is 0: Redis grows until the machine{f' ({ByteSize(int(machine))})' if machine else ''} is full",
        "set maxmemory below the machine's memory, by CONFIG SET maxmemory SIZE and in redis.conf",
    )


def _policy(facts: dict[str, str], options: RedisOptions) -> Iterator[Finding]:
    policy = facts.get("maxmemory_policy", "")
    if policy == "noeviction":
        yield Finding(
            "redis.policy", "warn", "the eviction policy is noeviction: a full Redis stores nothing more", _CACHE
        )
    elif policy.startswith("volatile-") and not options.ttl_s:
        fact = f"{policy} evicts only keys that expire, and without ttl_s this tier's keys do not expire"
        yield Finding("redis.policy", "warn", fact, f"set ttl_s, or {_CACHE}")
    elif policy:
        yield Finding("redis.policy", "ok", f"{policy}: Redis evicts keys when it is full")


def _writes(facts: dict[str, str], save: str) -> Finding:
    """Whether it writes to a disk what is only a cache."""
    if facts.get("aof_enabled") == "1":
        return Finding(
            "redis.persistence",
            "warn",
            "appendonly is on: Redis also writes every value to a disk",
            'set appendonly no and save "" on a Redis that is only a cache',
        )
    if save:
        fact = f"save is '{save}': Redis forks and writes the cache to a disk"
        return Finding("redis.persistence", "warn", fact, "CONFIG SET save '', and save \"\" in redis.conf")
    return Finding("redis.persistence", "ok", "Redis writes nothing to a disk: appendonly and save are off")


def _saves(connector: Connector, place: Place | None, deadline: float) -> str:
    """When the server forks to write to a disk; "" for never, and where CONFIG is refused."""
    try:
        return connector.ask(place, "CONFIG", "GET", "save", read=_second, deadline=deadline) or ""
    except TierError:
        return ""


def _second(reply: Any) -> str | None:
    return bytes(reply[1]).decode() if reply else None
