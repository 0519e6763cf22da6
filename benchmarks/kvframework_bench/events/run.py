"""`kvframework bench events`: what telling routers costs by itself, and LOOKUP of servers that tell, or do not.

Three servers: one with `[events]`, whose messages a reader reads, and two without, of which one is there to show the
noise. Prompts are stored in each before its lookups are measured, so that one of them has something to tell meanwhile.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvf_events.block_index import Medium, Stored
from kvf_events.chunks import Chunk
from kvf_events.history import Encoder
from kvf_events.options import Format
from kvframework.api.keys import CacheKey, ChunkContent
from kvframework.record_ring import RecordRing
from kvframework_bench.console import Stage, no_progress
from kvframework_bench.errors import BenchFailed
from kvframework_bench.events.figures import EVENTS, TARGET_US, EventsFigures, TellingCost
from kvframework_bench.observe.figures import AGAIN, NONE, ObservedLookup
from kvframework_bench.observe.prompts import lookup_cases
from kvframework_bench.prefix import Prefixes
from kvframework_bench.process import scratch
from kvframework_bench.rounds import Case, Latency, Rounds, Spread, percentile, ratio
from kvframework_bench.server import RunningServer, running_server, status

_ARENA_BYTES = 8 << 20
_CHUNK, _BLOCK = 256, 16
_CHUNKS_A_BATCH = 64
_PROMPT = 2048
_VOCABULARY = 128_000
_READ_S, _POLL_S = 30.0, 0.01


class Sizes(msgspec.Struct, frozen=True):
    """Rounds, the seconds of each server in each of them, and prompts stored in each second of it."""

    rounds: int = 20
    seconds: float = 2.0
    stores: int = 20


FULL = Sizes()
QUICK = Sizes(rounds=2, seconds=0.2)


def bench_events(sizes: Sizes = FULL, *, seed: int = 1, stage: Stage = no_progress) -> EventsFigures:
    """Measure; takes three minutes. For the main thread. Raises `BenchFailed`, also when an answer is wrong."""
    with ExitStack() as stack:
        directory = stack.enter_context(scratch())
        advance = stack.enter_context(stage("storing and asking", sizes.rounds))
        costs = [*_encoding(sizes.rounds, seed), _handing_over(sizes.rounds)]
        telling = [f"events.endpoint=ipc://{directory}/told.sock", f"events.state={directory}"]
        servers = {name: _Server(stack, directory, name, seed) for name in (NONE, AGAIN)}
        servers[EVENTS] = _Server(stack, directory, EVENTS, seed, telling)
        reader = stack.enter_context(_reading(telling[0].partition("=")[2]))
        before = servers[EVENTS].events()["counters"]["batches"]
        measured: dict[str, dict[str, list[list[float]]]] = {
            lookup: {name: [] for name in servers} for lookup in servers[NONE].cases
        }
        for index in range(sizes.rounds):
            for name, server in list(servers.items())[:: -1 if index % 2 else 1]:
                for lookup, samples in server.measure(sizes).items():
                    measured[lookup][name].append(samples)
            advance()
        return EventsFigures(
            seed=seed,
            rounds=sizes.rounds,
            seconds=sizes.seconds,
            batches=servers[EVENTS].batches(reader, before) - before,
            costs=costs,
            lookups=[
                _row(name, lookup, rounds, by_server[NONE])
                for lookup, by_server in measured.items()
                for name, rounds in by_server.items()
            ],
        )


class _Server:
    """A server, its lookups, and prompts for it that no one has stored."""

    def __init__(
        self, stack: ExitStack, directory: Path, name: str, seed: int, settings: list[str] | None = None
    ) -> None:
        own = directory / name.replace(" ", "-").replace(",", "")
        own.mkdir()
        self.running: RunningServer = stack.enter_context(running_server(own, _ARENA_BYTES, settings or []))
        self._client = client = stack.enter_context(self.running.client())
        self._prefixes = Prefixes(client)
        self.cases: Mapping[str, Case] = lookup_cases(client, _ARENA_BYTES, seed, self._prefixes)
        self._tokens = random.Random(f"{seed}, stored meanwhile")

    def measure(self, sizes: Sizes) -> dict[str, list[float]]:
        """Return the seconds of the lookups that end within so many seconds, one of each at least; in between prompts
        are stored, and evict others."""
        samples: dict[str, list[float]] = {name: [] for name in self.cases}
        began = store_at = time.perf_counter()
        while not samples[next(iter(samples))] or time.perf_counter() < began + sizes.seconds:
            if time.perf_counter() >= store_at:
                store_at += 1 / sizes.stores
                tokens = [self._tokens.randrange(_VOCABULARY) for _ in range(_PROMPT)]
                self._prefixes.store(self._prefixes.request(tokens))
            for name, case in self.cases.items():
                samples[name].append(case())
        return samples

    def events(self) -> dict[str, Any]:
        """Return what its status says of them."""
        told: dict[str, Any] = status(self._client)["events"]
        return told

    def batches(self, read: Callable[[], int], before: int) -> int:
        """Return how many batches were announced, more than `before`, once no news wait and the last one is read, whose
        number `read` returns. Raises `BenchFailed`."""
        deadline = time.monotonic() + _READ_S
        while True:
            told = self.events()
            batches = int(told["counters"]["batches"])
            if not told["waiting"] and batches > before and read() >= told["next_number"] - 1:
                return batches
            if time.monotonic() > deadline:
                raise BenchFailed(f"the bench's reader did not receive all KV events within {_READ_S:.0f} s")
            time.sleep(_POLL_S)


@contextmanager
def _reading(endpoint: str) -> Iterator[Callable[[], int]]:
    """Read all that is announced, in a thread; yields what returns the number of the last message that has come."""
    context = zmq.Context()
    news = context.socket(zmq.SUB)
    news.linger = 0
    news.subscribe(b"kv@")
    news.connect(endpoint)
    stopping, last = threading.Event(), -1

    def run() -> None:
        nonlocal last
        while not stopping.is_set():
            if news.poll(50):
                last = int.from_bytes(news.recv_multipart()[1], "big")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield lambda: last
    finally:
        stopping.set()
        thread.join()
        context.destroy()


def _encoding(rounds: int, seed: int) -> list[TellingCost]:
    tokens = random.Random(seed)
    news = []
    for _ in range(_CHUNKS_A_BATCH):
        packed = b"".join(tokens.randrange(_VOCABULARY).to_bytes(4, "little") for _ in range(_CHUNK))
        hashes = tuple(tokens.getrandbits(63) for _ in range(_CHUNK // _BLOCK))
        chunk = Chunk(secrets.token_bytes(32), secrets.token_bytes(32), packed, hashes)
        news.append(Stored("bench", b"", "", Medium.CPU, chunk, 0, tokens.getrandbits(63)))
    costs = []
    forms: tuple[Format, ...] = ("map", "array")
    for form in forms:
        encoder = Encoder(form, _BLOCK)
        seconds = [_processor_s(lambda encoder=encoder: encoder.batch(0.0, news)) for _ in range(rounds)]  # type: ignore[misc]
        us = Spread.of([each / _CHUNKS_A_BATCH * 1e6 for each in seconds])
        costs.append(TellingCost(f"encoding, as {form}", us, TARGET_US))
    return costs


def _handing_over(rounds: int) -> TellingCost:
    """What the serving thread does for a commit of one chunk, and for its removal later."""
    ring = RecordRing(wanted=True)
    reader = ring.open()
    content = ChunkContent(bytes(4 * _CHUNK))
    key = CacheKey("bench", 1, None, bytes(16), 0, _CHUNK, "", digests=bytes(32))
    objects = [bytes(64)]

    def hand_over() -> None:
        for _ in range(_CHUNKS_A_BATCH):
            ring.added(objects)
            ring.registered(key, content)
            ring.removed(objects[0])

    seconds = []
    for _ in range(rounds):
        seconds.append(_processor_s(hand_over))
        reader.take()
    us = Spread.of([each / _CHUNKS_A_BATCH * 1e6 for each in seconds])
    return TellingCost("the serving thread, for its store and its eviction", us)


def _processor_s(call: Callable[[], object]) -> float:
    """Return the seconds of this thread that a call takes."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def _row(state: str, lookup: str, rounds: Rounds, reference: Rounds) -> ObservedLookup:
    own, other = ([percentile(sorted(samples), 0.99) for samples in each] for each in (rounds, reference))
    tails = Spread.of([a / b for a, b in zip(own, other, strict=True)])
    return ObservedLookup(state, lookup, Latency.of(rounds), ratio(rounds, reference), tails)
