"""The part `engine`: from a tier into an engine's memory, as on a node that has never seen a prompt.

This process is the engine; server and Redis are others. Needs torch, which is imported when the part runs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvframework.client import KVClient
from kvframework.registry.registry import PluginRegistry
from kvframework_bench.console import Stage
from kvframework_bench.copy_reference import fastest_copy
from kvframework_bench.errors import BenchFailed, BenchUnavailable, Skipped, measure_or_skip, require_torch
from kvframework_bench.l2.figures import EngineRow
from kvframework_bench.l2.file_reference import can_bypass_cache, drop_from_cache, file_system, read_files
from kvframework_bench.l2.redis_reference import bare_cases, bare_client, fastest_way
from kvframework_bench.l2.redis_server import running_redis
from kvframework_bench.l2.sizes import Sizes
from kvframework_bench.l2.tier import (
    TIMEOUT_S,
    Values,
    await_written,
    check_plugin,
    keys_for,
    open_tier,
    redis_settings,
)
from kvframework_bench.rounds import Case, Rounds, interleave, rate_gb_s, ratio, timed
from kvframework_bench.server import emptied, running_server
from kvframework_bench.workload import Shape

if TYPE_CHECKING:
    from kvframework_bench.engine import Transfers

_ARENA_SLACK = 32 << 20
_WAIT_S = 60.0
_HELD_S = 1.0
# As many threads as the filesystem tier says for its loads.
_READERS = 4
CHUNK_TOKENS = 256
# A file has a head and padding beside its value; a namespace's record is smaller than any value here.
_FILE_SLACK, _RECORD_SLACK = 1 << 16, 1 << 14
MEMORY_FOLDER = Path("/dev/shm")


class Source(NamedTuple):
    """A tier with the stored prompt. `references` are the cases to measure beside it, `fastest` picks the reference of
    them; `verify` checks what they moved. `before` is called before each load, outside its time."""

    name: str
    settings: list[str]
    references: dict[str, Case]
    fastest: Callable[[Mapping[str, Rounds]], tuple[str, Rounds]]
    verify: Callable[[], None] = lambda: None
    before: Callable[[], None] = lambda: None


def bench_engine(
    sizes: Sizes, directory: Path, registry: PluginRegistry, skipped: list[Skipped], stage: Stage
) -> list[EngineRow]:
    """Measure the loads. Raises `BenchUnavailable` without torch, redis-py or a redis-server, `BenchFailed`, and
    `WrongBytes`."""
    require_torch()
    rows = []
    for source in (_redis, _disk, _memory_files):
        for shape in sizes.shapes:
            row = measure_or_skip(
                skipped,
                f"engine, {source.__name__[1:].replace('_', ' ')}",
                lambda source=source, shape=shape: _row(source, shape, sizes.engine_rounds, directory, registry, stage),  # type: ignore[misc]
            )
            rows += [row] if row is not None else []
    return rows


@contextmanager
def _redis(shape: Shape, nbytes: int, directory: Path, registry: PluginRegistry) -> Iterator[Source]:
    check_plugin(registry, "tier", "redis")
    with (
        running_redis(directory) as redis,
        bare_client(redis) as bare,
        open_tier(registry, "redis", {"url": redis.url}) as tier,
    ):
        values = Values(nbytes, shape.nbytes // nbytes)
        keys, own = keys_for(len(values.sources), b"b"), keys_for(len(values.sources), b"t")
        bare.put(keys, values.sources)
        tier.put(own, [[each] for each in values.sources], deadline=time.monotonic() + _WAIT_S)
        cases = bare_cases("get", lambda under_way: bare.get(keys, values.targets, under_way=under_way))

        def alone() -> float:
            started = time.perf_counter()
            tier.get_into(own, [[each] for each in values.targets], deadline=time.monotonic() + _WAIT_S)
            return time.perf_counter() - started

        yield Source(
            "redis",
            redis_settings(redis.url, timeout_s=TIMEOUT_S),
            {**cases, "the tier alone": alone},
            lambda measured: fastest_way("get", measured),
            lambda: values.verify("the bare client"),
        )


@contextmanager
def _disk(shape: Shape, _nbytes: int, directory: Path, registry: PluginRegistry) -> Iterator[Source]:
    """Files that are not in the page cache; the reference reads them plainly, by as many threads."""
    check_plugin(registry, "tier", "filesystem")
    if not can_bypass_cache(directory):
        raise BenchUnavailable(f"the file system {file_system(directory)} keeps the files in the page cache")
    with tempfile.TemporaryDirectory(dir=directory) as place, _plain_reads(shape, Path(place)) as read:

        def drop() -> None:
            drop_from_cache(_values(Path(place)))

        def plain() -> float:
            drop()
            return read()

        yield Source(
            f"files on {file_system(Path(place))}",
            _settings(place),
            {"plain": plain},
            lambda measured: (f"plain files, not cached, {_READERS} threads", measured["plain"]),
            before=drop,
        )


@contextmanager
def _plain_reads(shape: Shape, place: Path) -> Iterator[Case]:
    """Plain reads of the tier's files, by as many threads as it says for its loads."""
    with ThreadPoolExecutor(_READERS) as pool:
        rooms = [memoryview(bytearray(shape.nbytes // _READERS + _FILE_SLACK)) for _ in range(_READERS)]

        def read() -> float:
            paths = _values(place)
            parts = [paths[first::_READERS] for first in range(_READERS)]
            return timed(lambda: list(pool.map(lambda part, room: read_files(part, [room] * len(part)), parts, rooms)))

        yield read


def _values(place: Path) -> list[Path]:
    found = (path for path in place.glob("l2/*/*") if path.is_file())
    return sorted(path for path in found if path.stat().st_size > _RECORD_SLACK)


@contextmanager
def _memory_files(shape: Shape, _nbytes: int, _directory: Path, registry: PluginRegistry) -> Iterator[Source]:
    check_plugin(registry, "tier", "filesystem")
    folder = tempfile.TemporaryDirectory(prefix="kvf-bench-", dir=MEMORY_FOLDER)
    with folder as place, fastest_copy(shape.nbytes) as copy, _plain_reads(shape, Path(place)) as plain:
        yield Source(
            f"files on {file_system(Path(place))}",
            _settings(place),
            {"copy": copy.run, "the tier alone": plain},
            lambda measured: (f"`copy` ({copy.name})", measured["copy"]),
        )


def _settings(place: str) -> list[str]:
    values = {"use": "filesystem", "path": f"{place}/l2", "capacity": "4GiB", "timeout_s": TIMEOUT_S}
    return [f"l2.0.{key}={value}" for key, value in values.items()]


def _row(
    source: Callable[[Shape, int, Path, PluginRegistry], AbstractContextManager[Source]],
    shape: Shape,
    rounds: int,
    directory: Path,
    registry: PluginRegistry,
    stage: Stage,
) -> EngineRow:
    from kvframework_bench.engine import PagedMemory, Transfers

    nbytes = shape.bytes_per_token * CHUNK_TOKENS
    with ExitStack() as stack:
        at = stack.enter_context(source(shape, nbytes, directory, registry))
        advance = stack.enter_context(stage(f"from {at.name} to the engine, {shape.name}", rounds + 2))
        server = stack.enter_context(running_server(directory, shape.nbytes + _ARENA_SLACK, at.settings))
        client = stack.enter_context(server.client())
        memory = PagedMemory(shape, shuffled=True)
        transfers = stack.enter_context(Transfers(client, shape, memory, {}))
        if transfers.object_bytes != nbytes:
            raise BenchFailed(f"the server's objects have {transfers.object_bytes} bytes", available=f"{nbytes} bytes")
        transfers.store()
        await_written(server, client)
        loads = _Loads(client, transfers, shape.tokens, at.before)
        _verify(loads, loads.whole)
        _verify(loads, loads.arriving)
        advance()
        loads.to_l1.clear()
        cases: dict[str, Case] = {"whole": loads.whole, "arriving": loads.arriving, **at.references}
        measured = interleave(cases, rounds=rounds, advance=advance)
        to_l1 = [[seconds] for seconds in loads.to_l1]
        at.verify()
        _verify(loads, loads.arriving)
        advance()
    way, reference = at.fastest(measured)
    alone = measured.get("the tier alone", reference)
    return EngineRow(
        source=at.name,
        shape=shape.name,
        object_bytes=nbytes,
        nbytes=shape.nbytes,
        verified=True,
        reference=way,
        reference_gb_s=rate_gb_s(shape.nbytes, reference),
        tier_gb_s=rate_gb_s(shape.nbytes, alone),
        to_l1_gb_s=rate_gb_s(shape.nbytes, to_l1),
        to_engine_gb_s=rate_gb_s(shape.nbytes, measured["whole"]),
        ratio_to_reference=ratio(reference, measured["whole"]),
        arriving_gb_s=rate_gb_s(shape.nbytes, measured["arriving"]),
        arriving_ratio_to_reference=ratio(reference, measured["arriving"]),
        arriving_ratio_to_tier=ratio(alone, measured["arriving"]),
    )


def _verify(loads: _Loads, load: Case) -> None:
    loads.transfers.memory.poison()
    load()
    loads.transfers.memory.verify()


class _Loads:
    """LOOKUP and RETRIEVE of a prompt that only the tier has. `to_l1` are the seconds until the whole hit was pinned,
    where it is waited for."""

    def __init__(self, client: KVClient, transfers: Transfers, tokens: int, before: Callable[[], None]) -> None:
        self.transfers = transfers
        self.to_l1: list[float] = []
        self._client = client
        self._tokens = tokens
        self._before = before
        self._scheduler = transfers.scheduler()

    def whole(self) -> float:
        """Return the seconds of a load of all that is waited for. Raises `BenchFailed` unless the tier had all of it
        and L1 nothing."""
        self._empty()
        started = time.perf_counter()
        found = self._scheduler.wait(self._scheduler.lookup(self.transfers.request, wait_s=_HELD_S), _WAIT_S)
        self.to_l1.append(time.perf_counter() - started)
        self._check(found.hit_tokens)
        self.transfers.retrieve()
        seconds = time.perf_counter() - started
        self._scheduler.free(found)
        return seconds

    def arriving(self) -> float:
        """Return the seconds of a load that takes what has arrived while the rest arrives. Raises as `whole` does."""
        self._empty()
        done = 0
        started = time.perf_counter()
        asked = self._scheduler.lookup(self.transfers.request, wait_s=_HELD_S)
        for found in self._scheduler.arrivals(asked, _WAIT_S):
            if found.hit_tokens > done:
                self.transfers.retrieve_part(done, found.hit_tokens)
                done = found.hit_tokens
        seconds = time.perf_counter() - started
        self._check(done)
        self._scheduler.free(found)
        return seconds

    def _empty(self) -> None:
        cleared = emptied(self._client)
        if cleared.in_use or not cleared.objects:
            raise BenchFailed(
                f"before a lookup, {cleared.objects} objects left L1, and {cleared.in_use} are in use",
                available="all objects of the prompt leave L1",
            )
        self._before()

    def _check(self, tokens: int) -> None:
        if tokens != self._tokens:
            raise BenchFailed(f"a lookup found {tokens} tokens in all", available=f"{self._tokens} tokens")
