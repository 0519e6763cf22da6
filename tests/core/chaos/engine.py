"""An engine of the chaos harness, in its own process: it looks up, loads and stores prompts until the harness stops it,
and checks every byte that it loads. Needs torch.

A traceback at its end is a bug of the harness. Broken promises are reported as messages, see `tests.core.chaos.events`.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec
import torch

from kvframework.client import KVClient, RequestHashes, SchedulerAdapter, WorkerAdapter
from kvframework.client.kv_client import bare_transfer
from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m
from tests.core.chaos.events import Claim, Complaint, Event, Settings, Tally, encode
from tests.core.chaos.memory import AXES, BLOCK, BLOCKS, CHUNK, OBJECT_BYTES, PER_CHUNK, PagedMemory
from tests.core.chaos.watch import STOPS, Watch
from tests.core.tiers.prompts import Prompt, overlapping

PROMPTS = 60
L2_S = 2.0  # seconds for L2 to answer
SURE_S = 1.0  # well below the leases and tickets of these servers
PAUSE_S, AWAY_S = 0.05, 0.2  # between two turns, and while the server is away
_REGISTER_S = 300.0
_TELL_EVERY_S = 0.5


class Pause:
    """An event of the engine that comes late: the transfer waits for it while it holds its ranges."""

    def __init__(self, seconds: float, then: Callable[[], object] = lambda: None) -> None:
        self._seconds = seconds
        self._then = then

    def synchronize(self) -> None:
        time.sleep(self._seconds)
        self._then()


class Engine:
    """An engine with one thread and one request at a time; its calls block."""

    def __init__(self, settings: Settings, line: Connection) -> None:
        self._line = line
        self._telling = threading.Lock()
        self._chance = random.Random(f"{settings.seed}/{settings.number}/{settings.incarnation}")
        self._prompts = overlapping(settings.seed, PROMPTS)
        self._memory = PagedMemory()
        self._model = settings.model
        self._instance_id = settings.number
        self._client = KVClient(
            settings.endpoint, name=f"chaos {settings.number}", deadline_scale=settings.deadline_scale
        )
        self._watch = Watch(self._client, self.tell)
        self._worker = WorkerAdapter(
            self._client,
            instance_id=settings.number,
            model_name=settings.model,
            layout_options={"axes": AXES},
            transport_options={"path": settings.path},
        )
        self._namespace = self._register()
        self._scheduler = SchedulerAdapter(
            self._client, model_name=settings.model, namespace=self._namespace, chunk_tokens=CHUNK
        )
        self._tally = Tally()
        self._told_at = 0.0

    def run(self) -> None:
        ways: list[tuple[Callable[[Prompt, RequestHashes], None], int]] = [
            (self._turn, 16),
            (self._abandon_lookup, 1),
            (self._cancel_lookup, 1),
            (self._forget_lookup, 1),
            (self._abort_store, 1),
            (self._withdraw_store, 1),
        ]
        took_s = 0.0
        # At most half of the time it works: the server needs processor time too, above all to start.
        while not self._line.poll(min(took_s, PAUSE_S) if self._client.usable else AWAY_S):
            began = time.monotonic()
            prompt = self._chance.choice(self._prompts)
            # Few request ids, so that ids of different engines collide.
            request = RequestHashes(
                self._client.hasher, CHUNK, request_id=f"r{self._chance.randrange(4)}", digests=b"".join(prompt.digests)
            )
            (way,) = self._chance.choices([each for each, _ in ways], [weight for _, weight in ways])
            way(prompt, request)
            self._count(turns=1)
            took_s = time.monotonic() - began
            if began >= self._told_at + _TELL_EVERY_S:
                self._tell_tally()

    def tell(self, event: Event) -> None:
        """Report an event, from any thread. Errors are ignored: if the harness has ended, the next poll ends this
        process."""
        with self._telling, suppress(OSError):
            self._line.send_bytes(encode(event))

    def close(self) -> None:
        self._worker.close()
        self._client.close()
        self._watch.check_nothing_is_pending()
        self._tell_tally()

    # ways

    def _turn(self, prompt: Prompt, request: RequestHashes) -> None:
        loaded = self._load(prompt, request)
        self._store(prompt, request, loaded)
        self._scheduler.end_request(request.request_id)
        self._worker.get_finished()
        self._worker.take_failed_blocks()

    def _abandon_lookup(self, prompt: Prompt, request: RequestHashes) -> None:
        self._scheduler.lookup(request)
        self._scheduler.end_request(request.request_id)
        self._count(aborted=1)

    def _cancel_lookup(self, prompt: Prompt, request: RequestHashes) -> None:
        found = self._scheduler.lookup(request)
        if found.ticket:
            self._client.send("CANCEL", m.Cancel(ticket=found.ticket))
        self._count(aborted=1)

    def _forget_lookup(self, prompt: Prompt, request: RequestHashes) -> None:
        """End without releasing the ticket, which then expires."""
        self._scheduler.lookup(request)
        self._count(aborted=1)

    def _abort_store(self, prompt: Prompt, request: RequestHashes) -> None:
        """Write and abort: the bytes must never become visible."""
        try:
            key = self._worker.key(request, 0, request.hashed_tokens)
            registration = self._worker.registration
            assert registration is not None
            with self._client.prepare_store(bare_transfer(registration, key)).result(60.0) as plan:
                for place in plan.ranges:
                    plan.arena[place.offset : place.offset + place.length] = b"\x5a" * place.length
        except KVFrameworkError:
            pass
        self._count(aborted=1)

    def _withdraw_store(self, prompt: Prompt, request: RequestHashes) -> None:
        """End the request while its KV is being gathered."""
        blocks = self._blocks(len(prompt))
        self._memory.compute(self._namespace, prompt.digests, blocks)
        pause = Pause(self._chance.uniform(0, 0.02), lambda: self._scheduler.end_request(request.request_id))
        future = self._worker.submit_store(request, 0, request.hashed_tokens, [blocks], event=pause)  # type: ignore[arg-type]
        future.result(60.0)  # until then the store uses these blocks
        self._worker.get_finished()
        self._count(aborted=1)

    # steps

    def _load(self, prompt: Prompt, request: RequestHashes) -> int:
        """Return the number of loaded chunks, after a check of every byte."""
        began, failures, boot_id = time.monotonic(), self._watch.failures.total(), self._client.boot_id
        found = self._scheduler.wait(self._scheduler.lookup(request), L2_S)
        pinned = time.monotonic()
        chunks = found.hit_tokens // CHUNK
        held = bool(chunks) and self._retrieve(prompt, request, chunks)
        ended = time.monotonic()
        undisturbed = self._watch.failures.total() == failures and self._client.boot_id == boot_id
        if chunks and not held:
            self._count(failed_loads=1)
            if undisturbed and ended - pinned < SURE_S:
                text = f"{chunks} chunks that a ticket pins could not be loaded"
                self.tell(Complaint(text, began, ended, excuses=(*STOPS, "stop_server", "kill_server")))
        self._scheduler.free(found)
        return chunks if held else 0

    def _retrieve(self, prompt: Prompt, request: RequestHashes, chunks: int) -> bool:
        digests, blocks, end = prompt.digests[:chunks], self._blocks(chunks), chunks * CHUNK
        skipped = self._chance.choice((0, 0, 0, self._chance.randrange(end)))
        self._memory.poison()
        began = time.monotonic()
        future = self._worker.submit_retrieve(
            request,
            0,
            end,
            [blocks],
            event=self._pause(),
            skip_first_n_tokens=skipped,  # type: ignore[arg-type]
        )
        held = future.result(60.0).ok
        if held:
            wrong = self._memory.wrong_bytes(self._namespace, digests, blocks, skipped)
            checked = chunks * OBJECT_BYTES - skipped * (OBJECT_BYTES // CHUNK)
            self._count(loads=1, chunks_loaded=chunks, bytes_checked=checked)
        else:
            wrong = self._memory.stray_bytes(blocks)
        if wrong:
            self.tell(Complaint(f"WRONG BYTES in a load of {chunks} chunks: {wrong}", began, time.monotonic()))
        return held

    def _store(self, prompt: Prompt, request: RequestHashes, first: int) -> None:
        chunks = len(prompt) - first
        if not chunks:
            return
        blocks, digests = self._blocks(chunks), prompt.digests[first:]
        claim = self._claim(request) if self._chance.random() < 0.25 else None
        self._memory.compute(self._namespace, digests, blocks)
        began = time.monotonic()
        future = self._worker.submit_store(
            request,
            first * CHUNK,
            request.hashed_tokens,
            [blocks],
            event=self._pause(),  # type: ignore[arg-type]
        )
        outcome = future.result(60.0)
        if self._memory.changed():
            self.tell(Complaint("a store changed the engine's memory", began, time.monotonic()))
        told = outcome.stored + outcome.present + outcome.in_flight + outcome.dropped + outcome.unknown
        if told != chunks:
            self.tell(Complaint(f"a store of {chunks} chunks said {outcome}", began, time.monotonic()))
        self._count(chunks_stored=outcome.stored, chunks_dropped=outcome.dropped)
        if claim is not None and outcome.stored and outcome.stored + outcome.present == chunks:
            # Chunks that the load found may have been evicted since, so the claim covers only the chunks stored here.
            self.tell(msgspec.structs.replace(claim, first=first))

    def _claim(self, request: RequestHashes) -> Claim | None:
        began = time.monotonic()
        try:
            reply = self._client.request("REPORT_STATUS", m.Empty(), m.StatusReply, timeout=1.0)
        except KVFrameworkError:
            return None
        status = msgspec.json.decode(reply.document)
        digests = request.digests(request.hashed_tokens)
        evictions, boot_id = status["l1"]["evictions"], status["server"]["boot_id"]
        return Claim(self._model, self._namespace, digests, 0, evictions, boot_id, began)

    def _blocks(self, chunks: int) -> list[int]:
        if self._chance.random() < 0.5:
            first = self._chance.randrange(BLOCKS - chunks * PER_CHUNK + 1)
            return list(range(first, first + chunks * PER_CHUNK))
        return self._chance.sample(range(BLOCKS), chunks * PER_CHUNK)

    def _pause(self) -> Pause | None:
        return Pause(self._chance.uniform(0.0, 0.05)) if self._chance.random() < 0.2 else None

    def _register(self) -> bytes:
        """Register; the server may be down, or may not know yet that the last incarnation has died."""
        until = time.monotonic() + _REGISTER_S
        while True:
            try:
                return self._worker.register_kv_caches(self._memory.kv_caches, block_size=BLOCK).namespace
            except KVFrameworkError:
                if time.monotonic() >= until:
                    raise
            if self._line.poll(0.1):
                self._client.close()
                sys.exit(0)

    def _count(self, **amounts: int) -> None:
        now = {name: getattr(self._tally, name) + amount for name, amount in amounts.items()}
        self._tally = msgspec.structs.replace(self._tally, **now)

    def _tell_tally(self) -> None:
        self.tell(self._tally)
        self._tally, self._told_at = Tally(), time.monotonic()


def live(settings: Settings, line: Connection) -> None:
    """Run the engine until the harness sends a message on `line` or ends."""
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO, force=True)
    torch.set_num_threads(1)
    engine = Engine(settings, line)
    engine.tell(Tally())
    engine.run()
    engine.close()
