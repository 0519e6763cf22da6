"""A worker's registration and its transfers against a real server process, with tensors as vLLM lays them out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvf_vllm.attach import AttachedInstance
from kvf_vllm.canonical import BlockForm, CanonicalBlocks, LayerForm
from kvf_vllm.layouts import GroupFacts, Handover, OpaqueBlocks, block_tensors
from kvf_vllm.lookups import ServerLookups
from kvf_vllm.options import VllmOptions
from kvf_vllm.scheduler import SchedulerSide
from kvf_vllm.step_messages import StepPlan, StepReport
from kvf_vllm.worker import WorkerSide
from kvframework.client import KVClient, KvIdentity, WorkerAdapter, integration
from kvframework.errors import BadLayout
from tests.support.lazy import torch
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.waiting import wait_until
from tests.vllm.stand_ins import FakeRequest

pytestmark = pytest.mark.torch


BLOCKS, HEADS, BLOCK, DIM = 32, 2, 16, 8
CHUNK = 32
HYBRID = (GroupFacts(("l.0", "l.1"), BLOCK), GroupFacts(("w.0",), BLOCK, window=20))
PLAIN = HYBRID[:1]
RECURRENT = (*PLAIN, GroupFacts(("s.0",), BLOCK, state=True))
WHOLE = OpaqueBlocks("p")
OPTIONS = VllmOptions(connect_timeout_s=1.0, deadline_scale=20.0)


def canonical(backend: str, isa: str, cache_layout: str) -> CanonicalBlocks:
    described = LayerForm(
        backend, isa, cache_layout, "FullAttentionSpec", "float32", "float32", "auto", HEADS, DIM, DIM, BLOCK
    )
    return CanonicalBlocks(dict.fromkeys((layer for group in HYBRID for layer in group.layers), described))


class Connected:
    """One vLLM engine's connector, without vLLM: the scheduler's side, and those of `workers`, with their
    registrations."""

    clients: list[KVClient]
    workers: list[tuple[WorkerSide, AttachedInstance]]
    scheduler: SchedulerSide

    def step(self, plan: StepPlan) -> list[tuple[set[str], set[str]]]:
        report, finished = StepReport(), []
        for worker, instance in self.workers:
            worker.before_step(plan)
            worker.load(plan)
            worker.store(plan)
            finished.append(worker.finished_loads())
            instance.collect()
            report = report.merge(worker.take_report())
        self.scheduler.heard(report)
        return finished

    def compute(self, request: FakeRequest, table: list[list[int]], states: Sequence[Handover] = ()) -> None:
        self.match(request)
        tokens = request.num_tokens - request.num_computed_tokens
        handed = {request.request_id: states}
        self.step(self.scheduler.plan_step({request.request_id: tokens}, lambda _request_id: table, (), handed))
        request.num_computed_tokens += tokens

    def match(self, request: FakeRequest, computed: int = 0) -> int:
        found: list[int | None] = []

        def settled() -> bool:
            found.append(self.scheduler.matched_tokens(request, computed)[0])
            return found[-1] is not None

        wait_until(settled, what="the lookup")
        assert found[-1] is not None
        return found[-1]

    def load(self, request: FakeRequest, table: list[list[int]], external: int) -> Any:
        self.scheduler.allocated(request, table, external)
        return self.step(self.scheduler.plan_step({}, lambda _request_id: None))

    def close(self) -> None:
        self.scheduler.close()
        for worker, instance in self.workers:
            worker.close()
            instance.close()
        for client in self.clients:
            client.close()


class Engine(Connected):
    """With one worker, and tensors of several groups over the same memory."""

    def __init__(self, server: ServerProcess, groups: tuple[GroupFacts, ...] = PLAIN, form: BlockForm = WHOLE) -> None:
        # A layer of every group lies in the same memory, as hybrid models have it; block ids differ.
        layers = max(len(group.layers) for group in groups)
        self.memory = torch.randn(layers, BLOCKS, HEADS, BLOCK, 2 * DIM)
        self.kv = {name: self.memory[index] for group in groups for index, name in enumerate(group.layers)}
        patience_s = 60.0 if server.process else 0.1
        self.clients = [KVClient(server.endpoint, connect_timeout_s=patience_s, deadline_scale=20.0) for _ in range(2)]
        self.instance = AttachedInstance(
            self.clients[0],
            OPTIONS,
            identity=KvIdentity("m", "r", dtype="bfloat16"),
            groups=groups,
            form=form,
            rank=0,
            world_size=1,
            num_blocks=BLOCKS,
        )
        self.instance.attach(self.kv)
        self.clients[1].wait_up(patience_s)
        self.worker = WorkerSide(self.instance, block_size=BLOCK if len(groups) == 1 else 0)
        self.workers = [(self.worker, self.instance)]
        self.scheduler = SchedulerSide(ServerLookups(self.clients[1]), groups, OPTIONS)
        self.step(StepPlan())

    def step(self, plan: StepPlan) -> Any:
        return super().step(plan)[0]


def spied_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []
    begin = engine.clients[0]._connection.begin

    def spy(name: str, *rest: Any, **options: Any) -> Any:
        asked.append(name)
        return begin(name, *rest, **options)

    monkeypatch.setattr(engine.clients[0]._connection, "begin", spy)
    return asked


process = server_fixture(f"server.chunk_size={CHUNK}", scope="module")


@pytest.fixture
def server(process: ServerProcess) -> ServerProcess:
    return process.emptied()


@pytest.fixture
def make(server: ServerProcess) -> Iterator[Any]:
    engines: list[Engine] = []

    def made(*args: Any, **kwargs: Any) -> Engine:
        engines.append(Engine(server, *args, **kwargs))
        return engines[-1]

    yield made
    for engine in engines:
        engine.close()


def test_a_steps_requests_go_to_the_server_as_batches(
    make: Any, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests in one step, stored and then loaded by another engine byte by byte."""
    batches: list[tuple[str, int]] = []
    for name in ("batched_submit_store", "batched_submit_retrieve"):
        single = getattr(WorkerAdapter, name)

        def spy(self: WorkerAdapter, requests: Any, *args: Any, _name: str = name, _single: Any = single, **more: Any):  # type: ignore[no-untyped-def]
            batches.append((_name, len(requests)))
            return _single(self, requests, *args, **more)

        monkeypatch.setattr(WorkerAdapter, name, spy)
    first, other = make(), make()
    prompts = {"a": [*range(CHUNK)], "b": [*range(100, 100 + CHUNK)]}
    tables = {"a": [[5, 4]], "b": [[9, 8]]}
    requests = [FakeRequest(name, tokens) for name, tokens in prompts.items()]
    assert [first.match(request) for request in requests] == [0, 0]
    first.step(first.scheduler.plan_step(dict.fromkeys(prompts, CHUNK), tables.__getitem__))
    targets = {"a": [[10, 11]], "b": [[12, 13]]}
    for request in requests:
        assert other.match(request) == CHUNK
        other.scheduler.allocated(request, targets[request.request_id], CHUNK)
    before = other.memory.clone()
    assert other.step(other.scheduler.plan_step({}, lambda _request_id: None)) == ({"a", "b"}, set())
    assert torch.equal(other.memory[:, 10:14], first.memory[:, [5, 4, 9, 8]])
    untouched = [block for block in range(BLOCKS) if not 10 <= block < 14]
    assert torch.equal(other.memory[:, untouched], before[:, untouched])
    assert batches == [("batched_submit_store", 2), ("batched_submit_retrieve", 2)]
    counts, nbytes = other.worker.tally.counts, before[:, 10:14].numel() * 4
    assert (counts["loaded_tokens"], counts["loaded_bytes"]) == (2 * CHUNK, nbytes)
    assert first.worker.tally.counts["stored_bytes"] == nbytes
    assert [(each["dtype"], each["model_dtype"]) for each in server.status()["instances"]] == [
        ("uint8", "bfloat16")
    ] * 2


def test_local_blocks_are_not_written(make: Any) -> None:
    first, other = make(), make()
    tokens = list(range(2 * CHUNK))
    request = FakeRequest("a", tokens)
    first.match(request)
    first.compute(request, [[1, 2, 3, 4]])
    again = FakeRequest("b", tokens)
    # vLLM has the first block itself: half a chunk.
    assert other.match(again, BLOCK) == 2 * CHUNK - BLOCK
    local = other.memory[:, 7].clone()
    other.load(again, [[7, 8, 9, 10]], 2 * CHUNK - BLOCK)
    assert torch.equal(other.memory[:, 7], local)
    assert torch.equal(other.memory[:, 8:11], first.memory[:, 2:5])


@pytest.mark.parametrize("form", [WHOLE, canonical("CPU_ATTN", "vec", "LBHNC")], ids=["opaque", "canonical"])
def test_groups_with_a_window_move_what_the_window_needs(
    make: Any, form: BlockForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = make(HYBRID, form), make(HYBRID, form)
    tokens = list(range(3 * CHUNK + 1))
    # The window group has given its first blocks away.
    first.compute(FakeRequest("a", tokens), [[1, 2, 3, 4, 5, 6, 7], [0, 0, 20, 21, 22, 23, 24]])
    again = FakeRequest("b", tokens)
    begin = spied_on(other, monkeypatch)
    assert other.match(again) == 3 * CHUNK
    other.load(again, [[10, 11, 12, 13, 14, 15], [0, 0, 0, 0, 25, 26]], 3 * CHUNK)
    assert begin == []
    assert torch.equal(other.memory[:, 10:16], first.memory[:, 1:7])
    # One layer: the other one's memory under these block ids belongs to nobody.
    assert torch.equal(other.memory[0, 25:27], first.memory[0, 22:24])


def test_a_hit_ends_only_where_a_state_is_and_has_it(make: Any) -> None:
    first, other = make(RECURRENT), make(RECURRENT)
    tokens = list(range(3 * BLOCK + 1))
    # Of the states vLLM has kept the one that block 21 holds, wherever its table says that states lie.
    first.compute(FakeRequest("a", tokens), [[1, 2, 3, 4], [0, 0, 20, 22]], [(1, 21, 3 * BLOCK)])
    assert other.match(FakeRequest("b", tokens[: 2 * BLOCK + 1])) == 0, "the KV is there, but no state at its end"
    assert other.match(FakeRequest("c", [*tokens[: 2 * BLOCK], *[7] * BLOCK])) == 0
    again = FakeRequest("d", tokens)
    # The chunk is a block, although the server's chunk_size is two.
    assert other.match(again) == 3 * BLOCK
    before = other.memory.clone()
    assert other.load(again, [[10, 11, 12], [0, 0, 25]], 3 * BLOCK) == ({"d"}, set())
    assert torch.equal(other.memory[:, 10:13], first.memory[:, 1:4])
    assert torch.equal(other.memory[0, 25], first.memory[0, 21])
    untouched = [block for block in range(BLOCKS) if block not in (10, 11, 12, 25)]
    assert torch.equal(other.memory[:, untouched], before[:, untouched])
    nbytes = (before[:, 10:13].numel() + before[0, 25].numel()) * 4
    assert (first.worker.tally.counts["stored_bytes"], other.worker.tally.counts["loaded_bytes"]) == (nbytes, nbytes)


def test_kv_without_its_state_is_not_loaded(make: Any, server: ServerProcess) -> None:
    first, other = make(RECURRENT), make(RECURRENT)
    tokens = list(range(2 * BLOCK + 1))
    first.compute(FakeRequest("a", tokens), [[1, 2, 3], [0, 20, 22]])
    assert first.worker.tally.counts["stored_tokens"] == 2 * BLOCK
    assert other.match(FakeRequest("b", tokens)) == 0
    # Another engine computes the same, and keeps the state.
    make(RECURRENT).compute(FakeRequest("c", tokens), [[1, 2, 3], [0, 20, 22]], [(1, 20, 2 * BLOCK)])
    assert make(RECURRENT).match(FakeRequest("d", tokens)) == 2 * BLOCK


@pytest.mark.parametrize("groups", [PLAIN, RECURRENT], ids=["plain", "states"])
def test_what_is_lost_between_lookup_and_load_is_computed(
    make: Any, server: ServerProcess, groups: tuple[GroupFacts, ...]
) -> None:
    """vLLM is told the blocks of a single group, and the request if there are several."""
    first, other = make(groups), make(groups)
    tokens, is_single = list(range(2 * BLOCK + 1)), groups == PLAIN
    states = () if is_single else [(1, 20, 2 * BLOCK)]
    first.compute(FakeRequest("a", tokens), [[1, 2, 3], [0, 20, 22]][: len(groups)], states)
    again = FakeRequest("b", tokens)
    assert other.match(again) == 2 * BLOCK
    server.kill9()
    failed = set() if is_single else {"b"}
    assert other.load(again, [[10, 11], [0, 25]][: len(groups)], 2 * BLOCK) == ({"b"}, failed)
    assert other.worker.take_failed_blocks() == ({10, 11} if is_single else set())
    assert other.match(again) == 0


def test_another_packing_never_mixes(make: Any) -> None:
    first, other = make(), make(form=OpaqueBlocks("q"))
    first.compute(FakeRequest("a", list(range(CHUNK))), [[1, 2]])
    assert other.match(FakeRequest("b", list(range(CHUNK)))) == 0
    assert make().match(FakeRequest("c", list(range(CHUNK)))) == CHUNK


def test_a_server_that_comes_later_is_found(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    server.stop()
    with closing(Engine(server)) as engine:
        assert caplog.text.count("no KV is loaded or stored until a server accepts this engine") == 1
        request = FakeRequest("a", list(range(CHUNK)))
        assert engine.match(request) == 0
        engine.compute(request, [[1, 2]])
        server.start()

        def served() -> bool:
            engine.step(StepPlan())
            return engine.instance.served is not None and engine.clients[1].usable

        wait_until(served, 30, "the registration")
        later = FakeRequest("b", list(range(CHUNK)))
        assert engine.match(later) == 0
        engine.compute(later, [[3, 4]])
        assert engine.match(FakeRequest("c", list(range(CHUNK)))) == CHUNK


def test_a_broken_plugin_does_not_stop_the_engine(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register = WorkerAdapter.register_kv_caches

    def broken(*_arguments: object, **_options: object) -> None:
        raise ImportError("half of a plugin")

    monkeypatch.setattr(WorkerAdapter, "register_kv_caches", broken)
    monkeypatch.setattr(integration, "RETRY_S", 0.01)
    with closing(Engine(server)) as engine:
        assert engine.match(FakeRequest("a", list(range(CHUNK)))) == 0
        assert caplog.text.count("no KV is loaded or stored") == 1
        assert caplog.text.count("Traceback") == 1
        monkeypatch.setattr(WorkerAdapter, "register_kv_caches", register)
        wait_until(lambda: engine.instance.served is not None, 30, "the registration")


def test_tensors_that_are_not_as_declared_are_refused() -> None:
    tensor = torch.zeros(BLOCKS, 2)
    with pytest.raises(BadLayout, match="no KV tensor"):
        block_tensors(PLAIN, {"l.0": tensor}, BLOCKS)
    with pytest.raises(BadLayout, match="does not count blocks"):
        block_tensors(PLAIN, {"l.0": tensor, "l.1": tensor[1:]}, BLOCKS)


def test_a_layer_that_uses_the_kv_of_another_is_left_out_and_cut_blocks_are_joined() -> None:
    memory = torch.arange(BLOCKS * 4 * 3).view(BLOCKS * 4, 3)
    found = block_tensors(PLAIN, {"l.0": memory, "l.1": memory}, BLOCKS)
    assert list(found) == ["l.0"]
    assert found["l.0"].shape == (BLOCKS, 4, 3)
    assert torch.equal(found["l.0"][2].reshape(-1), torch.arange(2 * 12, 3 * 12))


@pytest.mark.engine_feature("vLLM", "sleep and wake", "stand-ins")
def test_an_engine_that_sleeps_is_registered_again_when_it_wakes(make: Any, server: ServerProcess) -> None:
    engine = make()
    engine.compute(FakeRequest("a", list(range(2 * CHUNK))), [[1, 2, 3, 4]])

    def registered() -> int:
        with server.client() as client:
            return len(client.status()["instances"])

    before = registered()
    for _ in range(2):
        engine.instance.detach()
    assert registered() == before - 1
    assert engine.instance.served is None
    again = FakeRequest("b", list(range(2 * CHUNK)))
    assert engine.match(again) == 2 * CHUNK
    assert engine.load(again, [[5, 6, 7, 8]], 2 * CHUNK)[0] == {"b"}
    assert engine.worker.take_failed_blocks() == {5, 6, 7, 8}
    for _ in range(2):
        engine.instance.attach_again()
    assert registered() == before
    assert engine.match(FakeRequest("c", list(range(2 * CHUNK)))) == 2 * CHUNK
    assert engine.load(FakeRequest("c", list(range(2 * CHUNK))), [[9, 10, 11, 12]], 2 * CHUNK) == ({"c"}, set())
    assert engine.worker.take_failed_blocks() == set()
    assert torch.equal(engine.kv["l.0"][[9, 10, 11, 12]], engine.kv["l.0"][[1, 2, 3, 4]])


def test_an_engine_is_renamed_in_the_background(make: Any, server: ServerProcess) -> None:
    engine, other = make(), make()
    request = FakeRequest("a", list(range(2 * CHUNK)))
    for each in (engine, other):
        assert each.match(request) == 0
    before = engine.instance.served
    hashing = threading.Event()

    def slowly() -> KvIdentity:
        hashing.wait(60)
        return KvIdentity("m", "r2")

    overtaken = engine.instance.rename(slowly)
    naming = engine.instance.rename(lambda: KvIdentity("m", "r3"))
    assert engine.instance.served == before
    hashing.set()
    assert (overtaken.result(60), naming.result(60)) == (False, True)
    wait_until(lambda: engine.instance.served is not None, what="the registration by the new name")
    assert engine.instance.served not in (None, before)
    # The same name again, and one that cannot be found: the registration stays.
    renamed = engine.instance.served
    assert engine.instance.rename(lambda: KvIdentity("m", "r3")).result(60)
    assert not engine.instance.rename(lambda: KvIdentity("m", Path("/nonexistent").read_text())).result(60)
    assert engine.instance.served is renamed
    engine.step(StepPlan())
    engine.compute(request, [[1, 2, 3, 4]])
    assert engine.match(FakeRequest("b", list(range(2 * CHUNK)))) == 2 * CHUNK
    assert other.match(FakeRequest("b", list(range(2 * CHUNK)))) == 0
