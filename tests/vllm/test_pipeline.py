"""An engine whose layers are split into pipeline stages, against a real server: every stage has names of its own, and
only what all of them have is a hit."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvf_hashers.sha256 import Sha256
from kvf_vllm.attach import AttachedInstance
from kvf_vllm.facts import part_of, place_of
from kvf_vllm.layouts import GroupFacts, OpaqueBlocks
from kvf_vllm.lookups import ServerLookups, StagedResult, _together
from kvf_vllm.options import VllmOptions
from kvf_vllm.scheduler import SchedulerSide
from kvf_vllm.step_messages import Served, StepPlan, StepReport
from kvf_vllm.worker import WorkerSide
from kvframework.client import KVClient, KvIdentity, LookupResult, RequestHashes
from tests.support.lazy import torch
from tests.support.server_process import ServerProcess, server_fixture
from tests.support.waiting import wait_until
from tests.vllm.stand_ins import SERVED, FakeRequest, FakeServer, computed, filled, scene, table
from tests.vllm.test_attached import Connected

pytestmark = pytest.mark.torch


CHUNK, BLOCK, BLOCKS = 32, 16, 16
OPTIONS = VllmOptions(connect_timeout_s=1.0, deadline_scale=20.0)
# Stages of unequal size; the second one has no layer of the second group.
EVEN = ((GroupFacts(("l.0", "l.1", "l.2"), BLOCK),), (GroupFacts(("l.3",), BLOCK),))
WINDOWED = (
    (GroupFacts(("l.0",), BLOCK), GroupFacts(("w.0",), BLOCK, window=20)),
    (GroupFacts(("l.1",), BLOCK), GroupFacts((), BLOCK, window=20)),
)
# A hybrid of which one stage holds nothing but states, another nothing but attention, a third both.
RECURRENT = (
    (GroupFacts((), BLOCK), GroupFacts(("s.0", "s.1"), BLOCK, state=True), GroupFacts(("s.2",), BLOCK, state=True)),
    (GroupFacts(("l.3",), BLOCK), GroupFacts((), BLOCK, state=True), GroupFacts((), BLOCK, state=True)),
)
BOTH = ((GroupFacts(("l.0",), BLOCK), GroupFacts(("s.1",), BLOCK, state=True), GroupFacts((), BLOCK, state=True)),)


MODEL = SimpleNamespace(get_total_num_kv_heads=lambda: 1, get_total_num_hidden_layers=lambda: 4)


class Parallel:
    """vLLM's ParallelConfig of one worker."""

    tensor_parallel_size = 1

    def __init__(self, rank: int, stages: int) -> None:
        self.rank, self.world_size, self.pipeline_parallel_size = rank, stages, stages


class Engine(Connected):
    def __init__(self, server: ServerProcess, stages: Any = EVEN) -> None:
        self.clients = [
            KVClient(server.endpoint, connect_timeout_s=1.0, deadline_scale=20.0) for _ in range(len(stages) + 1)
        ]
        self.kv = [
            {name: torch.randn(BLOCKS, 2, BLOCK, 16) for group in groups for name in group.layers} for groups in stages
        ]
        self.workers = []
        for rank, groups in enumerate(stages):
            parallel = Parallel(rank, len(stages))
            place = place_of(parallel, None)
            instance = AttachedInstance(
                self.clients[rank],
                OPTIONS,
                identity=KvIdentity("m", "r"),
                part=part_of(MODEL, parallel, place, groups),
                groups=groups,
                form=OpaqueBlocks("p"),
                rank=place.rank,
                world_size=place.world_size,
                num_blocks=BLOCKS,
                stage=place.stage,
            )
            instance.attach(self.kv[rank])
            self.workers.append((WorkerSide(instance, worker=rank), instance))
        self.clients[-1].wait_up(5)
        self.scheduler = SchedulerSide(ServerLookups(self.clients[-1]), stages[0], OPTIONS, workers=len(stages))
        self.step(StepPlan())


process = server_fixture(f"server.chunk_size={CHUNK}", scope="module")


@pytest.fixture
def make(process: ServerProcess) -> Iterator[Any]:
    server, engines = process.emptied(), []

    def made(*args: Any) -> Engine:
        engines.append(Engine(server, *args))
        return engines[-1]

    yield made
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("stages", [EVEN, WINDOWED])
@pytest.mark.engine_feature("vLLM", "pipeline parallel", "stand-ins")
def test_each_stage_loads_its_own_layers(make: Any, stages: Any) -> None:
    first, other = make(stages), make(stages)
    tokens = list(range(3 * CHUNK))
    here = [[1, 2, 3, 4, 5, 6]] * len(stages[0])
    there = [[9, 8, 7, 12, 11, 10]] * len(stages[0])
    first.compute(FakeRequest("a", tokens), here)
    request = FakeRequest("b", tokens)
    assert other.match(request) == 3 * CHUNK - (CHUNK if len(stages[0]) > 1 else 0)
    hit = other.match(request)
    assert [received for received, _ in other.load(request, there, hit)] == [{"b"}, {"b"}]
    blocks = hit // BLOCK
    for mine, its in zip(other.kv, first.kv, strict=True):
        for name in its:
            if not name.startswith("w"):
                assert torch.equal(mine[name][there[0][:blocks]], its[name][here[0][:blocks]]), name


@pytest.mark.parametrize("stages", [RECURRENT, RECURRENT[::-1], (*RECURRENT, *BOTH)])
@pytest.mark.engine_feature("vLLM", "pipeline parallel", "stand-ins")
def test_stages_of_a_hybrid_load_keys_and_values_or_states_or_both(make: Any, stages: Any) -> None:
    first, other = make(stages), make(stages)
    tokens = list(range(3 * BLOCK + 1))
    here, there = [[1, 2, 3, 4], [0, 0, 5, 6], [0, 0, 7, 8]], [[9, 8, 7], [0, 12, 14], [0, 13, 15]]
    first.compute(FakeRequest("a", tokens), here, [(1, 10, 2 * BLOCK), (2, 11, 2 * BLOCK)])
    request = FakeRequest("b", tokens)
    assert other.match(request) == 2 * BLOCK
    before = [{name: tensor.clone() for name, tensor in kv.items()} for kv in other.kv]
    assert other.load(request, there, 2 * BLOCK) == [({"b"}, set())] * len(stages)
    for stage, groups in enumerate(stages):
        for group, source, target in zip(groups, ([1, 2], [10], [11]), ([9, 8], [12], [13]), strict=True):
            for name in group.layers:
                wanted = before[stage][name]
                wanted[target] = first.kv[stage][name][source]
                assert torch.equal(other.kv[stage][name], wanted), name


@pytest.mark.engine_feature("vLLM", "pipeline parallel", "stand-ins")
def test_a_hit_ends_where_every_stage_can_end_it(make: Any, process: ServerProcess) -> None:
    """One stage has less than the other, whose states lie elsewhere: the first state that both can use is the hit."""
    first, tokens = make(RECURRENT), list(range(5 * BLOCK + 1))
    tables = [list(range(1, 7)), [0] * 6, [0] * 6]
    first.compute(FakeRequest("a", tokens[: BLOCK + 1]), tables, [(1, 10, BLOCK), (2, 11, BLOCK)])
    # What only the stage of attention has, and what only the stage of states has.
    for length, left_out in ((3, 0), (5, 1)):
        kept = list(first.workers)
        del first.workers[left_out]
        request = FakeRequest(str(length), tokens[: length * BLOCK + 1])
        first.compute(request, tables, [(group, 10 + group, length * BLOCK) for group in (1, 2)])
        first.workers = kept
        first.scheduler.finished(request)
    other, request = make(RECURRENT), FakeRequest("b", tokens)
    assert other.match(request) == BLOCK
    assert other.load(request, [[1], [12], [13]], BLOCK) == [({"b"}, set())] * 2
    with process.client() as client:
        wait_until(lambda: client.status()["tickets"] == 0, what="the next PING")


def test_what_one_stage_lacks_is_no_hit(make: Any) -> None:
    first = make()
    tokens = list(range(2 * CHUNK))
    worker, instance = first.workers.pop()
    request = FakeRequest("a", tokens)
    first.compute(request, [[1, 2, 3, 4]])
    first.workers.append((worker, instance))
    assert make().match(FakeRequest("b", tokens)) == 0


def test_engines_that_are_split_otherwise_share_nothing(make: Any) -> None:
    first = make()
    tokens = list(range(2 * CHUNK))
    first.compute(FakeRequest("a", tokens), [[1, 2, 3, 4]])
    other = ((GroupFacts(("l.0", "l.1"), BLOCK),), (GroupFacts(("l.2", "l.3"), BLOCK),))
    assert make(other).match(FakeRequest("b", tokens)) == 0
    assert make().match(FakeRequest("c", tokens)) == 2 * CHUNK


def test_results_of_stages_are_one_as_far_as_all_have_it() -> None:
    one, other = LookupResult(64, "t1", asked_tokens=96), LookupResult(32, "", pending=True, asked_tokens=96)
    request = RequestHashes(Sha256(), CHUNK, request_id="a")
    assert _together([one], request, 16, None) is one
    assert _together([other, one], request, 16, None) == StagedResult(
        32, "t1", True, 96, 16, parts=[other, one], request=request
    )


def test_stages_with_other_chunks_or_one_stage_with_two_names_store_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for served in (Served("m", b"s" * 16, 16, 1, 1), Served("m", b"x" * 16, 8, 1, 0)):
        side = SchedulerSide(FakeServer(), EVEN[0], VllmOptions(), workers=2)
        side.heard(StepReport(served={0: SERVED, 1: served}))
        assert "differently" in caplog.text
        request = FakeRequest("a", list(range(16)))
        assert side.matched_tokens(request, 0) == (0, False)
        side.allocated(request, table(16), 0)
        assert dict(side.tally.counts) == {"miss_requests|workers_differ": 1}
        caplog.clear()


def test_what_is_computed_behind_an_open_load_is_stored_when_all_workers_have_it() -> None:
    """A load within the step may fail in another worker, and what this one computes is wrong then."""
    server, side, request = scene(24, workers=2, load="sync")
    filled(server, list(range(8)))
    assert side.matched_tokens(request, 0) == (8, False)
    side.allocated(request, table(24), 8)
    request.num_computed_tokens = 8
    assert not computed(side, request, 16, table(24)).stores
    side.heard(StepReport(loaded={"a": 1}))  # type: ignore[arg-type]
    request.all_token_ids.append(24)
    assert not computed(side, request, 1, table(28)).stores
    side.heard(StepReport(loaded={"a": 1}))  # type: ignore[arg-type]
    request.all_token_ids.append(25)
    (store,) = computed(side, request, 1, table(28)).stores
    assert (store.start, store.end) == (8, 24)
