"""An engine process of these tests: stores and loads until its standard input ends, whatever becomes of its server.

Argument: the settings as JSON. One thread is the engine's; another watches the connection. Both append what they see
to the file `events`, one JSON a line. A wrong byte, or a call that takes too long, ends it with a traceback; else it
prints its report as one line of JSON at the end.
"""

from __future__ import annotations

import json
import random
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch

from kvframework.client import KVClient, RequestHashes, SchedulerAdapter, WorkerAdapter

LAYERS, BLOCKS, BLOCK, HEADS, DIM = 2, 128, 16, 2, 4
AXES = ["plane", "block", "token", "head", "dim"]
CHUNK = 256
MODEL = "survivor"
# The prompts that all engines have in common; each has others of its own besides.
KNOWN = [[100 * number + chunk for chunk in range(1 + number % 3)] for number in range(8)]
MISSES = 20
PAUSE_S = 0.005
# No call may take longer. What is waited for at the most is the wire's patience with bulk data.
PATIENCE_S = 15.0

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    endpoint: str
    instance_id: int
    path: str  # of cpu_gather: arena or wire
    events: str


@dataclass
class Report:
    turns: int = 0
    stored: int = 0
    loaded: int = 0
    slowest_s: float = 0.0


def tokens_of(prompt: list[int]) -> list[int]:
    return [segment for segment in prompt for _ in range(CHUNK)]


class Events:
    """Appended to by both threads; a line is written in one piece."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("a", buffering=1)  # noqa: SIM115 - for as long as the process lives
        self._lock = threading.Lock()

    def tell(self, what: str, boot: bytes | None) -> None:
        with self._lock:
            self._file.write(json.dumps({"what": what, "at": time.monotonic(), "boot": (boot or b"").hex()}) + "\n")


class Watcher:
    """Tells "gone" and "up" as soon as the client knows it."""

    def __init__(self, client: KVClient, events: Events) -> None:
        self._client, self._events = client, events
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        boot: bytes | None = None
        while True:
            now = self._client.boot_id if self._client.usable else None
            if now != boot:
                if boot is not None:
                    self._events.tell("gone", boot)
                if now is not None:
                    self._events.tell("up", now)
                boot = now
            time.sleep(0.002)


class Survivor:
    """The engine's memory is two halves of blocks: those it computes in, and those it loads into."""

    def __init__(self, settings: Settings, client: KVClient, report: Report) -> None:
        self._client, self._report = client, report
        self._chance = random.Random(settings.instance_id)
        self._fresh = 1000 * settings.instance_id
        self._kv = {f"layer{at}": torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM) for at in range(LAYERS)}
        self._worker = WorkerAdapter(
            client,
            instance_id=settings.instance_id,
            model_name=MODEL,
            layout="paged",
            layout_options={"axes": AXES},
            transport_options={"path": settings.path},
        )
        registration = self._worker.register_kv_caches(self._kv, block_size=BLOCK)
        self._scheduler = SchedulerAdapter(
            client, model_name=MODEL, namespace=registration.namespace, chunk_tokens=registration.desc.chunk_tokens
        )

    def turn(self) -> tuple[bool, bool]:
        """Looks a prompt up, loads the hit, computes and stores the whole: what was stored, and loaded rightly."""
        if self._chance.random() < 0.5:
            prompt = self._chance.choice(KNOWN)
        else:
            self._fresh += 1
            prompt = [1_000_000 + self._fresh]
        return self.serve(prompt)

    def serve(self, prompt: list[int]) -> tuple[bool, bool]:
        request = RequestHashes(self._client.hasher, CHUNK, request_id=f"r{self._report.turns}")
        request.extend(tokens_of(prompt))
        found = self._timed(lambda: self._scheduler.lookup(request))
        found = self._timed(lambda: self._scheduler.wait(found, 2.0))
        loaded = bool(found.hit_tokens) and self._load(request, found.hit_tokens)
        stored = self._store(request, len(prompt))
        self._timed(lambda: self._scheduler.free(found))
        done = self._timed(self._worker.get_finished)
        assert request.request_id in done[0], "a store is still under way"
        self._worker.take_failed_blocks()
        self._report.turns += 1
        self._report.stored += stored
        self._report.loaded += loaded
        return stored, loaded

    def _load(self, request: RequestHashes, tokens: int) -> bool:
        blocks = list(range(BLOCKS // 2, BLOCKS // 2 + tokens // BLOCK))
        for tensor in self._kv.values():
            tensor[:, blocks] = -1
        if not self._timed(lambda: self._worker.submit_retrieve(request, 0, tokens, [blocks]).result(PATIENCE_S)).ok:
            return False
        for layer, tensor in enumerate(self._kv.values()):
            expected = _content(request, layer, tokens // CHUNK)
            assert torch.equal(tensor[:, blocks], expected), f"WRONG BYTES in layer {layer} of {request.request_id}"
        return True

    def _store(self, request: RequestHashes, chunks: int) -> bool:
        blocks = list(range(chunks * CHUNK // BLOCK))
        for layer, tensor in enumerate(self._kv.values()):
            tensor[:, blocks] = _content(request, layer, chunks)
        return self._timed(
            lambda: self._worker.submit_store(request, 0, chunks * CHUNK, [blocks]).result(PATIENCE_S)
        ).ok

    def _timed(self, call: Callable[[], T]) -> T:
        began = time.monotonic()
        result = call()
        took = time.monotonic() - began
        self._report.slowest_s = max(self._report.slowest_s, took)
        assert took < PATIENCE_S, f"a call took {took:.1f} s"
        return result


def _content(request: RequestHashes, layer: int, chunks: int) -> torch.Tensor:
    """The KV of the first chunks, which follows from their digests."""
    digests = request.digests(chunks * CHUNK)
    parts = []
    for chunk in range(chunks):
        seed = int.from_bytes(digests[32 * chunk : 32 * chunk + 7], "little") + layer
        generator = torch.Generator().manual_seed(seed)
        parts.append(torch.randn((2, CHUNK // BLOCK, BLOCK, HEADS, DIM), generator=generator))
    return torch.cat(parts, 1)


def run(engine: Survivor, client: KVClient, events: Events) -> None:
    for prompt in KNOWN:
        engine.serve(prompt)
    events.tell("ready", client.boot_id)
    worked: set[bytes] = set()
    did: set[str] = set()
    boot, misses = client.boot_id, 0
    while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
        now = client.boot_id
        if now != boot:
            boot, misses, did = now, 0, set()
        stored, loaded = engine.turn()
        if boot is None:
            misses += 1
            if misses == MISSES:
                events.tell("missed", None)
            continue
        did |= {name for name, true in (("stored", stored), ("loaded", loaded)) if true}
        if len(did) == 2 and boot not in worked and client.boot_id == boot:
            worked.add(boot)
            events.tell("worked", boot)


def main() -> None:
    torch.set_num_threads(1)
    settings = Settings(**json.loads(sys.argv[1]))
    report = Report()
    events = Events(settings.events)
    # The machine that runs tests is slower than an engine allows its cache to be.
    with KVClient(settings.endpoint, deadline_scale=20.0) as client:
        assert client.wait_up(20)
        Watcher(client, events)
        engine = Survivor(settings, client, report)
        run(engine, client, events)
    print(json.dumps(asdict(report)))


if __name__ == "__main__":
    main()
