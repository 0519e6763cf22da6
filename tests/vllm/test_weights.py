"""Weights that are updated in a running engine, without one: nothing is loaded that other weights have computed, nor
stored under their name, whatever the order of updates, steps and resets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvf_vllm.engine_names import EngineNames
from kvf_vllm.options import VllmOptions
from kvf_vllm.scheduler import SchedulerSide
from kvf_vllm.step_messages import Served, StepPlan, StepReport, TransferOp, Weights
from kvf_vllm.weights import EngineWeights, WeightVersions, run_secret
from kvf_vllm.worker import WorkerSide
from kvframework.api.futures import Future, Promise
from kvframework.api.transport import LoadOutcome, StoreOutcome
from kvframework.errors import ConfigFieldError
from tests.vllm.stand_ins import BLOCK, CHUNK, ONE_GROUP, Clock, FakeRequest, FakeServer, digest, scheduler


class Core:
    """vLLM's engine core, as far as versions of weights go."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(kv_cache_manager=object())

    def set_weight_version(self, weight_version: str) -> None:
        return

    def collective_rpc(self, method: str) -> None:
        return


# the model: one engine of two workers, vLLM's prefix cache, and the server


class SharedServer(FakeServer):
    """Objects by namespace, worker, salt and digest: the weights that have computed each."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[tuple[bytes, int, str, bytes], int] = {}
        # Tokens of all hits.
        self.found = 0

    def lookup(self, request: Any, start: int, end: int, wait_s: float = 0.0, speed: Any = None) -> Any:
        workers = range(self.served[0].world_size)
        self.known = {
            (salt, each)
            for namespace, _, salt, each in self.objects
            if all((namespace, worker, salt, each) in self.objects for worker in workers)
            and namespace == self.served[0].namespace
        }
        result = super().lookup(request, start, end, wait_s, speed)
        self.found += result.hit_tokens
        return result


class Worker:
    """One worker: its weights by number, the name of its registration, and what computed the chunks of its blocks."""

    def __init__(self, index: int, server: SharedServer) -> None:
        self.index = index
        self.server = server
        self.weights = 0
        self.side = WorkerSide(self, worker=index, block_size=BLOCK)
        self.blocks: dict[int, int] = {}
        self.served: Served | None = named(0)
        self.naming: tuple[Promise[bool], bool] | None = None
        self.wrong: list[str] = []

    def load(self, ops: Sequence[TransferOp], *, in_pieces: bool = False) -> list[Future[LoadOutcome]]:
        return [self._load(op) for op in ops]

    def store(self, ops: Sequence[TransferOp]) -> list[Future[StoreOutcome]]:
        return [self._store(op) for op in ops]

    def _load(self, op: TransferOp) -> Future[LoadOutcome]:
        for at in range(op.start, op.end, CHUNK):
            key = (self.served.namespace, self.index, op.salt, digest(op.digests, at))
            if key not in self.server.objects:
                return Future.resolved(LoadOutcome(False, "gone"))
            self.must(self.server.objects[key] == self.weights, "it loads what other weights have computed")
            for block in op.block_ids[0][(at - op.start) // BLOCK : (at - op.start + CHUNK) // BLOCK]:
                self.blocks[block] = self.weights
        return Future.resolved(LoadOutcome(True))

    def _store(self, op: TransferOp) -> Future[StoreOutcome]:
        for at in range(op.start, op.end, CHUNK):
            blocks = op.block_ids[0][(at - op.start) // BLOCK : (at - op.start + CHUNK) // BLOCK]
            self.must({self.blocks[block] for block in blocks} == {self.weights}, "it stores what others computed")
            self.must(bool(op.salt) or self.served == named(self.weights), "it stores under the name of other weights")
            self.server.objects[self.served.namespace, self.index, op.salt, digest(op.digests, at)] = self.weights
        return Future.resolved(StoreOutcome(stored=1))

    def must(self, is_right: bool, what: str) -> None:
        # An exception would be one more failed transfer.
        if not is_right:
            self.wrong.append(what)

    def nbytes(self, op: TransferOp) -> int:
        return 0

    def update(self, weights: int, *, from_files: bool) -> None:
        self.side.weights_change()
        self.weights = weights
        promise: Promise[bool] = Promise()
        self.naming = promise, from_files
        self.side.weights_changed(promise)

    def name(self) -> None:
        """The thread that reads files has ended."""
        if self.naming is not None:
            (promise, from_files), self.naming = self.naming, None
            if from_files:
                self.served = named(self.weights)
            promise.set_result(from_files)


def named(weights: int) -> Served:
    return Served("m", bytes([weights]) * 16, CHUNK, 2)


class Engine:
    """vLLM around both sides: plans may be executed later than the next one is made, blocks of requests that have ended
    are found by their tokens until the prefix cache is reset."""

    def __init__(self, caches_prefixes: bool, server: SharedServer | None = None, secret: bytes = b"of a run") -> None:
        self.server = server or SharedServer()
        self.caches_prefixes = caches_prefixes
        self.versions = WeightVersions(secret)
        weights = EngineWeights(caches_prefixes=caches_prefixes, versions=self.versions)
        self.side = SchedulerSide(self.server, ONE_GROUP, VllmOptions(), workers=2, weights=weights, clock=Clock())
        self.workers = [Worker(index, self.server) for index in range(2)]
        self.side.heard(StepReport(served={0: named(0), 1: named(0)}))
        self.core = Core()
        self.side.names.follow_versions(Core, self.core.scheduler.kv_cache_manager)
        self.waiting: list[FakeRequest] = []
        self.loading: dict[str, tuple[FakeRequest, int]] = {}
        self.running: dict[str, FakeRequest] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.cached: dict[tuple[int, ...], int] = {}
        self.plans: deque[tuple[StepPlan, list[int]]] = deque()
        self.count, self.next_block = 0, 1

    def update(self, *weights: int | None, from_files: bool = False) -> None:
        """Calls come between two executions. None: this worker keeps its weights."""
        self.core.collective_rpc("update_weights")
        for worker, each in zip(self.workers, weights, strict=True):
            if each is not None:
                worker.update(each, from_files=from_files)

    def announce(self) -> None:
        self.core.set_weight_version(str([worker.weights for worker in self.workers]))

    def come(self, prompt: int, chunks: int) -> None:
        self.count += 1
        self.waiting.append(FakeRequest(f"r{self.count}", [100 * prompt + at for at in range(chunks * CHUNK + 1)]))

    def schedule(self) -> None:
        for request in list(self.waiting):
            own = tuple(request.all_token_ids)
            blocks, local = [], 0
            while self.caches_prefixes and own[: local + BLOCK] in self.cached and local + BLOCK < len(own):
                blocks.append(self.cached[own[: local + BLOCK]])
                local += BLOCK
            external, _ = self.side.matched_tokens(request, local)
            if external is None:
                continue
            self.waiting.remove(request)
            fresh = range(self.next_block, self.next_block + len(own) // BLOCK + 1 - len(blocks))
            self.next_block = fresh.stop
            self.tables[request.request_id] = [[*blocks, *fresh]]
            self.side.allocated(request, self.tables[request.request_id], external)
            request.num_computed_tokens = local
            if external:
                self.loading[request.request_id] = request, local + external
            else:
                self.running[request.request_id] = request
        scheduled, written = {}, []
        for request_id, request in self.running.items():
            done = request.num_computed_tokens
            scheduled[request_id] = min(2 * CHUNK, request.num_tokens - done)
            if scheduled[request_id]:
                written += self.tables[request_id][0][done // BLOCK : -(-(done + scheduled[request_id]) // BLOCK)]
        scheduled = {request_id: tokens for request_id, tokens in scheduled.items() if tokens}
        self.plans.append((self.side.plan_step(scheduled, self.tables.get), written))
        for request_id, tokens in scheduled.items():
            request = self.running[request_id]
            request.num_computed_tokens += tokens
            self.cache(request)
            if request.num_computed_tokens == request.num_tokens:
                del self.running[request_id]
                self.side.finished(request)

    def cache(self, request: FakeRequest) -> None:
        for index in range(request.num_computed_tokens // BLOCK):
            self.cached.setdefault(
                tuple(request.all_token_ids[: (index + 1) * BLOCK]), self.tables[request.request_id][0][index]
            )

    def execute(self) -> None:
        if not self.plans:
            return
        plan, written = self.plans.popleft()
        report, failed = StepReport(), set()
        received: list[set[str]] = []
        for worker in self.workers:
            worker.side.before_step(plan)
            worker.side.load(plan)
            worker.blocks.update(dict.fromkeys(written, worker.weights))
            worker.side.store(plan)
            received.append(worker.side.finished_loads()[0])
            failed |= worker.side.take_failed_blocks()
            report = report.merge(worker.side.take_report())
        assert received[0] == received[1]
        for request_id in received[0]:
            request, end = self.loading.pop(request_id)
            if failed.isdisjoint(self.tables[request_id][0]):
                request.num_computed_tokens = min(end, request.num_tokens - 1)
                self.cache(request)
            self.running[request_id] = request
        self.side.heard(report)
        for request_id in received[0]:
            self.side.allocated(self.running[request_id], self.tables[request_id], 0)

    def reset(self, *, running: bool, connector: bool) -> None:
        if running and not self.loading:
            for request_id in list(self.running):
                self.waiting.append(self.running.pop(request_id))
        if not self.running and not self.loading:
            self.cached.clear()
            self.side.cache_was_reset()
        if connector:
            self.side.reset()

    def answer(self, prompt: int, chunks: int) -> None:
        self.come(prompt, chunks)
        self.settle()

    def settle(self) -> None:
        for _ in range(100 + 10 * self.count):
            if not (self.plans or self.waiting or self.running or self.loading):
                return
            for worker in self.workers:
                worker.name()
            self.schedule()
            while self.plans:
                self.execute()
        pytest.fail("requests wait for ever")


PROMPT = (st.integers(0, 1), st.integers(1, 3))
EVENTS = st.one_of(
    # A prompt that comes, or one that is answered with all those before it.
    st.tuples(st.just("come"), *PROMPT),
    st.tuples(st.just("answer"), *PROMPT),
    st.tuples(st.just("schedule")),
    st.tuples(st.just("execute")),
    st.tuples(st.just("name"), st.integers(0, 1)),
    # From the files of the start, or of another checkpoint; or tensors, of all or of one worker.
    st.tuples(st.just("files"), st.integers(0, 1)),
    st.tuples(st.just("tensors"), st.integers(2, 4), st.sampled_from(["all", "first", "second"])),
    st.tuples(st.just("announce")),
    st.tuples(st.just("reset"), st.booleans(), st.booleans()),
)


@settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(events=st.lists(EVENTS, max_size=25), caches_prefixes=st.booleans())
def test_whatever_happens_weights_never_mix(events: list[Any], caches_prefixes: bool) -> None:
    """What must not be says `Worker`. In the end an update from files, with a reset, shares again."""
    engine = Engine(caches_prefixes)
    for name, *arguments in events:
        if name == "files":
            engine.update(arguments[0], arguments[0], from_files=True)
        elif name == "tensors":
            trained, whose = arguments
            engine.update(trained if whose != "second" else None, 100 + trained if whose != "first" else None)
        elif name == "name":
            engine.workers[arguments[0]].name()
        elif name == "reset":
            engine.reset(running=arguments[0], connector=arguments[1])
        else:
            getattr(engine, name)(*arguments)
    engine.settle()
    engine.update(1, 1, from_files=True)
    engine.reset(running=False, connector=False)
    for prompt in (7, 8):
        engine.answer(prompt, 2)
    assert [worker.wrong for worker in engine.workers] == [[], []]
    other = scheduler(engine.server, workers=2)
    other.heard(StepReport(served={0: named(1), 1: named(1)}))
    assert other.matched_tokens(FakeRequest("x", [800 + at for at in range(2 * CHUNK + 1)]), 0) == (2 * CHUNK, True)


def test_who_has_the_secret_and_announces_the_same_version_shares() -> None:
    server = SharedServer()

    def cached(secret: bytes, weights: int, version: str = "", before: str = "") -> int:
        engine = Engine(True, server, secret)
        if before:
            engine.core.set_weight_version(before)
        engine.update(weights, weights)
        if version:
            engine.core.set_weight_version(version)
        engine.reset(running=False, connector=True)
        server.found = 0
        engine.answer(3, 2)
        assert [worker.wrong for worker in engine.workers] == [[], []]
        return server.found

    assert cached(b"one", 2, "v2") == 0
    assert cached(b"one", 2, "v2") == 2 * CHUNK
    assert cached(b"one", 3, "v3") == 0
    assert cached(b"two", 4, "v2") == 0
    assert cached(b"one", 5) == 0, "an update without a version"
    assert cached(b"one", 6, before="v2") == 0, "the version was announced before the update"
    assert cached(b"one", 7, "v2", before="v2") == 0, "one version for two weights"
    assert cached(b"one", 2, "v2", before="v1") == 2 * CHUNK


def test_a_version_that_comes_after_the_news_counts_from_then_on() -> None:
    server = SharedServer()
    for found in (0, 2 * CHUNK):
        engine = Engine(True, server)
        engine.update(2, 2)
        engine.reset(running=False, connector=False)
        engine.answer(1, 1)
        engine.announce()
        server.found = 0
        engine.answer(2, 2)
        assert server.found == found


def test_a_reset_after_the_news_of_an_update_hides_no_kv_of_its_weights() -> None:
    names = EngineNames(1, EngineWeights(), lambda _: None)
    names.heard(StepReport(served={0: named(0)}))
    names.planned(writes=True)
    names.heard(StepReport(weights={0: Weights(1, 1, None)}))
    names.hide()
    names.cache_was_reset()
    names.heard(StepReport(served={0: named(1)}, weights={0: Weights(1, 1, True)}))
    assert (names.served, names.generation) == (named(1), "")
    names.planned(writes=True)
    names.hide()
    assert names.generation


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        ("short", 0o600, "has 5 bytes\n  expected: 16 to 4096"),
        ("x" * 5000, 0o600, "has 4097 bytes"),
        ("x" * 32, 0o644, "other users may read or write"),
        (None, 0, "cannot be read: No such file or directory"),
    ],
)
def test_a_secret_that_is_none_ends_the_start(tmp_path: Path, content: str | None, mode: int, why: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    with pytest.raises(ConfigFieldError) as raised:
        run_secret(str(file), "the option")
    assert why in str(raised.value)
    assert str(file) in str(raised.value)
    assert raised.value.hint


def test_a_secret_is_read_as_one_line(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    assert run_secret(str(file), "") == b"0123456789abcdef"
