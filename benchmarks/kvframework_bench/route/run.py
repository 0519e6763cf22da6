"""What a router takes, in memory and time, and what follows for a thousand nodes.

In this process, without sockets: batches as publishers encode them go in, JSON requests go in and out. The last rows
are arithmetic on the others; docs/routing.md has them in words.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from itertools import chain
from pathlib import Path

import msgspec

from kvf_observe.http.messages import Reply, Request, Rights, WantsBody
from kvf_route import subscription
from kvf_route.app import App
from kvf_route.router import Router
from kvf_route.settings import Node
from kvframework.api.installing import install_command
from kvframework_bench.console import Stage, no_progress
from kvframework_bench.errors import BenchFailed, BenchUnavailable
from kvframework_bench.route.figures import RouteFigure, RouteFigures, RouteScore

BLOCK = 16
CHUNK = 256
_CHUNKS_A_BATCH = 64
_TOPIC = b"kv@node@model"
_PROMPT = 32768
_ROUNDS = 11
# What the table of a thousand nodes assumes.
_NODES, _HELD, _LIFE_S = 1000, 10_000_000, 3600.0


class Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    """A chunk's event, as kvframework's servers and vLLM write it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class Gone(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[int]
    medium: str | None


class Speaker:
    """Makes batches of prompts of 32k tokens, with hashes of its own."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._encode = msgspec.msgpack.Encoder().encode

    def prompt(self, tokens: list[int]) -> tuple[list[bytes], list[int]]:
        """The batches that tell a prompt, and its hashes."""
        hashes = [self._random.getrandbits(63) for _ in range(len(tokens) // BLOCK)]
        events = []
        for at in range(0, len(tokens), CHUNK):
            first = at // BLOCK
            parent = hashes[first - 1] if first else None
            own = hashes[first : first + CHUNK // BLOCK]
            events.append(Stored(own, parent, tokens[at : at + CHUNK], BLOCK, None, "CPU", None))
        parts = [events[at : at + _CHUNKS_A_BATCH] for at in range(0, len(events), _CHUNKS_A_BATCH)]
        return [self._encode((time.time(), part, 0)) for part in parts], hashes

    def prompts(self, blocks: int) -> Iterator[tuple[list[bytes], list[int]]]:
        """Random prompts with so many blocks."""
        for _ in range(blocks // (_PROMPT // BLOCK)):
            yield self.prompt(self._random.choices(range(128_000), k=_PROMPT))

    def removal(self, hashes: list[int]) -> bytes:
        return self._encode((time.time(), [Gone(hashes, "CPU")], 0))


class Sizes(msgspec.Struct, frozen=True):
    """Blocks of the index, which `nodes` publishers announce; publishers of the scores among many."""

    blocks: int = 10_000_000
    nodes: int = 8
    many: int = _NODES


FULL = Sizes()
QUICK = Sizes(blocks=20_000, nodes=2, many=3)


def bench_route(sizes: Sizes = FULL, *, stage: Stage = no_progress) -> RouteFigures:
    """Measure; takes three minutes. Raises `BenchFailed` for a wrong score, and `BenchUnavailable` without what
    `kvframework route` needs."""
    for module in ("h11", "numpy"):
        if importlib.util.find_spec(module) is None:
            raise BenchUnavailable(f"{module} is not installed", hint=install_command(distribution="kvframework-route"))
    # None of these publishers is there.
    away, subscription.AWAY_S = subscription.AWAY_S, math.inf
    try:
        with stage("filling and reading an index", 2) as advance:
            return asyncio.run(_run(sizes, advance))
    finally:
        subscription.AWAY_S = away


async def _run(sizes: Sizes, advance: Callable[[], None]) -> RouteFigures:
    router = await _following(sizes.blocks, sizes.nodes)
    figures = _filled(router, sizes)
    advance()
    await router.stop()
    del router
    gc.collect()
    router = await _following(sizes.many * 4096, sizes.many)
    scores = _among_many(router)
    await router.stop()
    advance()
    return msgspec.structs.replace(figures, scores=figures.scores + scores)


async def _following(blocks: int, nodes: int) -> Router:
    router = Router(blocks)
    router.follow([Node(f"n{number}", f"ipc:///nowhere/{number}") for number in range(nodes)])
    return router


def _filled(router: Router, sizes: Sizes) -> RouteFigures:
    """Fill the index; return its figures."""
    blocks, nodes = sizes.blocks, sizes.nodes
    resident, spent, told, batches, nbytes = _resident_bytes(), 0.0, 0, 0, 0
    followed = list(router._followed.values())
    prompt = list(range(_PROMPT))
    latest: deque[list[int]] = deque(maxlen=200)  # the hashes of the last publisher's last prompts
    for number, each in enumerate(followed):
        speaker = Speaker(number)
        latest.clear()
        parts, hashes = speaker.prompt(prompt) if number < nodes // 2 else ([], [])
        for payloads, named in chain([(parts, hashes)], speaker.prompts(blocks // nodes - len(hashes))):
            for payload in payloads:
                began = time.process_time()
                each.contents.apply(_TOPIC, payload)
                spent += time.process_time() - began
                batches, nbytes = batches + 1, nbytes + len(payload)
            told += len(named)
            if named:
                latest.append(named)
    took = _resident_bytes() - resident
    refused = sum(each.contents.counts["refused"] for each in followed)
    held_by_all = router.document()["blocks"]
    scores = [_score(router, tokens, nodes, nodes // 2) for tokens in (1024, 8192, _PROMPT)]
    # Turnover, at full load: as much goes as comes.
    speaker, last, removed_s, removed = Speaker(10**6), followed[-1], 0.0, 0
    full = last.contents.counts["refused"]
    for gone, (payloads, _) in zip(list(latest), speaker.prompts(blocks), strict=False):
        payload, before = speaker.removal(gone), last.contents.blocks
        began = time.process_time()
        last.contents.apply(_TOPIC, payload)
        removed_s += time.process_time() - began
        removed += before - last.contents.blocks
        for payload in payloads:
            last.contents.apply(_TOPIC, payload)
    lost = last.contents.counts["refused"] - full
    began = time.process_time()
    held, steps = last.contents.blocks, 1
    last.contents.clear()
    while router.index.sweep():
        steps += 1
    cleared_s = time.process_time() - began
    rate, wire = told / spent, nbytes / told
    measured = [
        RouteFigure("blocks announced", told, "blocks"),
        RouteFigure("announced blocks without room", refused, "blocks"),
        RouteFigure("blocks in the full index", held_by_all, "blocks"),
        RouteFigure("memory of the index per block", router.index.bytes / blocks, "bytes"),
        RouteFigure("resident memory per block", took / told, "bytes"),
        RouteFigure("size of the events per block", wire, "bytes"),
        RouteFigure("events read, in batches with 1,024 blocks", rate, "blocks/s"),
        RouteFigure("batches read", batches / spent, "batches/s"),
        RouteFigure("blocks removed", removed / removed_s, "blocks/s"),
        RouteFigure("blocks announced in the room of removed blocks", removed, "blocks"),
        RouteFigure("blocks without room after removals", lost, "blocks"),
        RouteFigure(f"removing a publisher with {held:,} blocks, in {steps} steps", 1000 * cleared_s, "ms"),
    ]
    thousand = _thousand(rate, wire, removed / removed_s, router.index.bytes / blocks)
    return RouteFigures(blocks, nodes, measured, scores, thousand)


def _among_many(router: Router) -> list[RouteScore]:
    """Return scores among many nodes, of which one or all have the prompt."""
    followed = list(router._followed.values())
    speaker = Speaker(1)
    parts, _ = speaker.prompt(list(range(_PROMPT)))
    for payload in parts:
        followed[0].contents.apply(_TOPIC, payload)
    for each in followed[1:]:  # so that each has a place to be looked at
        each.contents.apply(_TOPIC, speaker.prompt(list(range(1000, 1000 + CHUNK)))[0][0])
    one = _score(router, _PROMPT, len(followed), 1)
    for each in followed:
        for payload in parts:
            each.contents.apply(_TOPIC, payload)
    return [one, _score(router, _PROMPT, len(followed), len(followed))]


def _thousand(rate: float, wire: float, removals: float, held: float) -> list[RouteFigure]:
    """Return arithmetic: all blocks of all nodes are new once in `_LIFE_S`."""
    turned = _NODES * _HELD / _LIFE_S
    name = f"new blocks of {_NODES:,} nodes with {_HELD:,} blocks, all replaced in {_LIFE_S / 3600:.0f} h"
    return [
        RouteFigure(name, turned, "blocks/s"),
        RouteFigure("events of these blocks", turned * (wire + 9) / 1e6, "MB/s"),
        RouteFigure("cores that read these events", turned / rate + turned / removals, "cores"),
        RouteFigure("memory of all routers together", _NODES * _HELD * held / 1e9, "GB"),
        RouteFigure("events of one node from its beginning", _HELD * wire / 1e6, "MB"),
        RouteFigure("CPU time to read the events of one node", _HELD / rate, "s"),
    ]


def _score(router: Router, tokens: int, nodes: int, having: int) -> RouteScore:
    """Ask for a prompt that so many nodes have. Raises `BenchFailed` for another answer."""
    app = App(router, Rights(lambda: "", loopback=False))
    body = msgspec.json.encode({"tokens": list(range(tokens)), "model": "model"})
    wholes, longest = [], []
    for _ in range(_ROUNDS):
        reply, steps = _answered(app, body)
        wholes.append(sum(steps))
        longest.append(max(steps))
    scores: dict[str, dict[str, int]] = msgspec.json.decode(reply.body)
    if (found := sum(sum(score.values()) == tokens for score in scores.values())) != having:
        raise BenchFailed(f"{found} of {nodes} nodes have the prompt", available=f"{having} nodes")
    return RouteScore(tokens, nodes, having, 1000 * statistics.median(wholes), 1000 * statistics.median(longest))


def _answered(app: App, body: bytes) -> tuple[Reply, list[float]]:
    """Return the answer to a score's body, and the seconds of each step, after which others have the loop."""
    steps = []
    wanted = app.answer(Request("POST", "/score"))
    assert isinstance(wanted, WantsBody)
    answer = wanted.answer(bytearray(body))
    assert isinstance(answer, Coroutine)
    while True:
        began = time.process_time()
        try:
            answer.send(None)
        except StopIteration as done:
            steps.append(time.process_time() - began)
            return done.value, steps
        steps.append(time.process_time() - began)


def _resident_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024
