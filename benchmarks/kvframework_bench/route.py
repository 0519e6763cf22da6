"""`python -m kvframework_bench.route`: what a router takes, in memory and time, and what follows for a thousand nodes.

In this process, without sockets: batches as publishers encode them go in, JSON requests go in and out. The last rows
are arithmetic on the others; docs/scale.md has them in words.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvframework.http.messages import Request
from kvframework.http.rights import Rights
from kvframework.route import subscription
from kvframework.route.app import App
from kvframework.route.router import Router
from kvframework.route.settings import Node

BLOCK = 16
CHUNK = 256
_CHUNKS_A_BATCH = 64
_TOPIC = b"kv@node@model"
_PROMPT = 32768
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


def main(
    blocks: Annotated[int, typer.Option(help="Blocks of the index, and announced.")] = 10_000_000,
    nodes: Annotated[int, typer.Option(help="Publishers that tell them.")] = 8,
    many: Annotated[int, typer.Option(help="Publishers of the scores among many.")] = _NODES,
) -> None:
    """Print the figures as Markdown."""
    subscription.AWAY_S = math.inf  # none of these publishers is there
    asyncio.run(_run(blocks, nodes, many))


async def _run(blocks: int, nodes: int, many: int) -> None:
    router = await _following(blocks, nodes)
    rows = await _filled(router, blocks, nodes)
    typer.echo("| what | figure |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows))
    await router.stop()
    del router
    gc.collect()
    router = await _following(many * 4096, many)
    rows = _among_many(router)
    typer.echo("\n" + "\n".join(f"| {name} | {value} |" for name, value in rows))
    await router.stop()


async def _following(blocks: int, nodes: int) -> Router:
    router = Router(blocks)
    router.follow([Node(f"n{number}", f"ipc:///nowhere/{number}") for number in range(nodes)])
    return router


async def _filled(router: Router, blocks: int, nodes: int) -> list[tuple[str, str]]:
    """Fill the index; return rows."""
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
    document = router.document()
    scores = [
        (f"`/score`, {tokens // 1024}k tokens, half of {nodes} nodes have them, p50", _score_ms(router, tokens))
        for tokens in (1024, 8192, 32768)
    ]
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
    return [
        ("blocks announced, and without room", f"{told:,}, {refused:,}"),
        ("memory a block: of the tables, resident", f"{router.index.bytes / blocks:.1f}, {took / told:.1f} bytes"),
        ("a block on the wire", f"{wire:.0f} bytes"),
        ("taken in, of batches with 1,024 blocks", f"{rate:,.0f} blocks/s, {batches / spent:,.0f} batches/s"),
        ("removed", f"{removed / removed_s:,.0f} blocks/s"),
        ("new ones in their places, and without room", f"{removed:,}, {lost:,}"),
        *((name, f"{value:.2f} ms") for name, value in scores),
        (f"a publisher with {held:,} blocks forgotten", f"{1000 * cleared_s:.0f} ms, in {steps} steps"),
        ("blocks in the index then", f"{document['blocks']:,}"),
        *_thousand(rate, wire, removed / removed_s, router.index.bytes / blocks),
    ]


def _among_many(router: Router) -> list[tuple[str, str]]:
    """Return rows about scores among many nodes."""
    followed = list(router._followed.values())
    speaker = Speaker(1)
    parts, _ = speaker.prompt(list(range(_PROMPT)))
    for payload in parts:
        followed[0].contents.apply(_TOPIC, payload)
    for each in followed[1:]:  # so that each has a place to be looked at
        each.contents.apply(_TOPIC, speaker.prompt(list(range(1000, 1000 + CHUNK)))[0][0])
    one = _score_ms(router, _PROMPT)
    for each in followed:
        for payload in parts:
            each.contents.apply(_TOPIC, payload)
    return [
        (f"`/score`, 32k tokens, one of {len(followed):,} nodes has them, p50", f"{one:.2f} ms"),
        (f"`/score`, 32k tokens, all {len(followed):,} nodes have them, p50", f"{_score_ms(router, _PROMPT):.1f} ms"),
    ]


def _thousand(rate: float, wire: float, removals: float, held: float) -> list[tuple[str, str]]:
    """Return rows of arithmetic: all blocks of all nodes are new once in `_LIFE_S`."""
    turned = _NODES * _HELD / _LIFE_S
    nbytes = turned * (wire + 9)
    processes = turned / rate + turned / removals
    return [
        (f"{_NODES:,} nodes of {_HELD:,} blocks, each new in {_LIFE_S / 3600:.0f} h", f"{turned:,.0f} blocks/s"),
        ("their events", f"{nbytes / 1e6:,.0f} MB/s"),
        ("cores that take them in", f"{processes:.1f}"),
        ("memory, all routers together", f"{_NODES * _HELD * held / 1e9:,.0f} GB"),
        ("one node heard from its beginning", f"{_HELD * wire / 1e6:,.0f} MB, {_HELD / rate:.0f} s of a core"),
    ]


def _score_ms(router: Router, tokens: int) -> float:
    app = App(router, Rights(lambda: "", loopback=False))
    body = msgspec.json.encode({"tokens": list(range(tokens)), "model": "model"})
    reply = app.answer(Request("POST", "/score", {}, body))
    scores: dict[str, dict[str, int]] = msgspec.json.decode(reply.body)
    if max(sum(score.values()) for score in scores.values()) != tokens:
        raise typer.Exit(1)
    return 1000 * _median(lambda: app.answer(Request("POST", "/score", {}, body)))


def _median(call: Callable[[], object], rounds: int = 21) -> float:
    """Seconds of processor time, which other processes do not lengthen."""
    taken = []
    for _ in range(rounds):
        began = time.process_time()
        call()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def _resident_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


if __name__ == "__main__":
    typer.run(main)
