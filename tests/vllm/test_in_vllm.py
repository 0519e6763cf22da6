"""The connector's words in vLLM's own classes, without an engine: events, statistics and metrics."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvf_vllm.events import Announcements
from kvf_vllm.requests import Wish
from kvf_vllm.step_messages import StepPlan
from tests.support.lazy import torch
from tests.vllm.stand_ins import BLOCK, FakeInstance, FakeRequest

# vLLM's imports take long, and warn.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


def features() -> list[Any]:
    return [
        SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))
        for name, offset, length in (("cat", 3, 6), ("dog", 9, 1), ("bird", 10, 20))
    ]


def test_vllm_names_images_and_salts_alike() -> None:
    import vllm.v1.core.kv_cache_utils as theirs

    request = FakeRequest("a", list(range(40)), cache_salt="dynamo-cache-salt:t", mm_features=features())
    mine = Announcements(BLOCK, salts=True).of(request, Wish(), 0, 40)
    keys, index = [], 0
    for start in range(0, 40, BLOCK):
        found, index = theirs.generate_block_hash_extra_keys(request, start, start + BLOCK, index)
        keys.append(found)
    # vLLM before 0.31 had no tags of its own there.
    assert list(mine.extra_keys) == getattr(theirs, "to_event_extra_keys", list)(keys)


def test_subscribers_read_the_salt_where_they_look_for_it() -> None:
    from vllm.distributed.kv_events import KVEventBatch

    from kvf_vllm.connector import published

    request = FakeRequest("a", list(range(8)), cache_salt="tenant")
    event = Announcements(BLOCK, salts=True).of(request, Wish(), 0, 8)
    payload = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=[published(event)]))
    (sent,) = msgspec.msgpack.decode(payload)[1]
    assert (sent["type"], sent["cache_salt"]) == ("BlockStored", "tenant")
    (read,) = msgspec.msgpack.decode(payload, type=KVEventBatch).events
    assert list(read.extra_keys) == [("dynamo-cache-salt:tenant",), None]


def test_vllms_own_hints_are_read_from_its_own_request() -> None:
    hints = pytest.importorskip("vllm.v1.kv_hints", reason="from vLLM 0.32 on")
    from vllm.v1.request import Request

    from kvf_vllm.requests import wish_of
    from kvframework.api.keys import Retain
    from vllm import SamplingParams

    said = {"directives": [{"start": 0, "end": 256, "priority": 90, "duration": 60}]}
    actions = [hints.KvHintAction(action_id="1", action_type="kv.retain", action_version="1.0", payload=said)]
    envelope = hints.KvHintsEnvelope(protocol_version="0.1", message_id="m", actions=actions)
    request = Request("r", list(range(300)), SamplingParams(max_tokens=1), None, kv_hints=envelope)
    assert wish_of(request).retain == (Retain("keep", 60.0, 90, 0, 256),)


def test_the_multi_connector_finds_the_class_of_statistics_by_its_name() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from kvf_vllm.registration import CONNECTORS, NAME
    from tests.vllm.stand_ins import connector_class

    for name in CONNECTORS:
        counts = {"hit_tokens": 3} if name == NAME else {"kvframework": {"hit_tokens": 3}, "types": {}, "data": {}}
        stats = MultiConnector.build_kv_connector_stats({connector_class(name).__name__: counts})
        assert stats.reduce() == {name: {"hit_tokens": 3}}


def test_a_wrong_option_is_refused_before_a_connector_is_made() -> None:
    from kvf_vllm.registration import CONNECTORS
    from kvframework.errors import ConfigFieldError
    from tests.vllm.stand_ins import connector_class

    wrong = {"kvframework.laod": "sync"}
    for name in CONNECTORS:
        connector = connector_class(name)
        with pytest.raises(ConfigFieldError, match=r"unknown option kvframework\.laod"):
            connector.requires_piecewise_for_cudagraph(wrong)
        transfer = SimpleNamespace(kv_connector=name, kv_connector_extra_config=wrong)
        with pytest.raises(ConfigFieldError, match=r"unknown option kvframework\.laod"):
            connector.get_required_kvcache_layout(SimpleNamespace(kv_transfer_config=transfer))


@pytest.mark.parametrize(
    ("option", "value"),
    [("load", "sync"), ("layout", "canonical"), ("transport", "cuda_ipc"), ("transport_options", {"a": 1})],
)
def test_what_means_nothing_where_vllm_moves_the_bytes_is_refused(option: str, value: object) -> None:
    from kvf_vllm.offloading.connector import KvFrameworkOffloading
    from kvframework.errors import ConfigFieldError

    with pytest.raises(ConfigFieldError, match=rf"(?s)kvframework\.{option} is .*vLLM moves the bytes"):
        KvFrameworkOffloading.requires_piecewise_for_cudagraph({f"kvframework.{option}": value})


def recurrent(mode: str, kind: str = "GDN_ATTN") -> Any:
    """vLLM's own KV cache configuration of a model with one recurrent layer beside one of attention."""
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

    full = FullAttentionSpec(block_size=640, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    state = MambaSpec(
        block_size=640,
        shapes=((3, 1024), (4, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=MambaAttentionBackendEnum[kind],
        mamba_cache_mode=mode,
    )
    groups = [KVCacheGroupSpec(["l.0"], full), KVCacheGroupSpec(["l.1"], state)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def test_states_in_vllms_own_words() -> None:
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    from kvf_vllm.facts import groups_of
    from kvframework.errors import BadLayout

    for kind in MambaAttentionBackendEnum.__members__:
        if kind == "CUSTOM":
            with pytest.raises(BadLayout, match="of the kind CUSTOM"):
                groups_of(recurrent("align", kind))
            continue
        full, state = groups_of(recurrent("align", kind))
        assert (full.state, state.state, state.block_size) == (False, True, 640)
    with pytest.raises(BadLayout, match="does not keep"):
        groups_of(recurrent("none"))


def test_stages_of_a_hybrid_have_its_groups_and_chunk_whatever_layers_they_hold() -> None:
    from vllm.v1.core.kv_cache_utils import _project_kv_cache_groups_to_worker

    from kvf_vllm.facts import groups_of
    from kvf_vllm.layouts import OpaqueBlocks

    groups = recurrent("align").kv_cache_groups
    specs = {name: group.kv_cache_spec for group in groups for name in group.layer_names}
    stages = [
        groups_of(SimpleNamespace(kv_cache_groups=_project_kv_cache_groups_to_worker(groups, {name: specs[name]})))
        for name in ("l.0", "l.1")
    ]
    assert [[group.layers for group in stage] for stage in stages] == [[("l.0",), ()], [(), ("l.1",)]]
    assert [[(group.block_size, group.state) for group in stage] for stage in stages] == [
        [(640, False), (640, True)]
    ] * 2
    assert [OpaqueBlocks("p").options(stage)["chunk_tokens"] for stage in stages] == [640, 640]


def test_loads_within_a_step_are_refused_where_vllm_could_not_name_the_failed_ones() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    from kvf_vllm.connector import KvFrameworkConnector
    from kvframework.errors import ConfigFieldError

    spec = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=64)
    windows = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l.0"], spec)])
    transfer = SimpleNamespace(
        kv_connector="KvFrameworkConnector",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"kvframework.load": "sync"},
    )
    config = SimpleNamespace(kv_transfer_config=transfer, parallel_config=SimpleNamespace())
    with pytest.raises(ConfigFieldError, match="sliding windows"):
        KvFrameworkConnector(config, KVConnectorRole.WORKER, windows)


def test_copies_of_states_are_among_the_blocks_to_be_written() -> None:
    """vLLM makes room for a state that it is about to overwrite in a block that stands in no table."""
    from vllm.v1.core.sched.output import SchedulerOutput

    from kvf_vllm.connector import _new_blocks
    from kvf_vllm.layouts import GroupFacts

    output = SchedulerOutput.make_empty()
    assert _new_blocks(output, (GroupFacts(("l.1",), 640, state=True),)) == set()
    output.kv_cache_block_copies = [SimpleNamespace(src_block_id=3, dst_block_id=7)]
    assert _new_blocks(output, (GroupFacts(("l.1",), 640, state=True),)) == {7}


def test_metrics_of_several_engines_are_one_and_what_they_do_not_know_harms_none() -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    from kvf_vllm.connector import KvFrameworkConnector

    config, kinds = SimpleNamespace(kv_transfer_config=None), {kind: kind for kind in (Counter, Gauge, Histogram)}
    for total in (3, 6):
        shown = KvFrameworkConnector.build_prom_metrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"]})
        shown.observe({"hit_tokens": 3, "unheard_of": 4, "miss_requests|lora": 1, "seconds": {"load": [0.1], "x": [1]}})
        shown.observe({"hit_tokens": -3})
        shown.observe({"hit_tokens": 3}, engine_idx=7)
        labels = {"model_name": "m", "engine": "0"}
        assert REGISTRY.get_sample_value("kvframework:hit_tokens_total", labels) == total
    # The application's own metric by this name: the engine goes without the connector's.
    REGISTRY.unregister(shown._counters["errors"])
    from kvf_vllm import metrics

    metrics._made.clear()
    Counter("kvframework:errors", "somebody else's")
    KvFrameworkConnector.build_prom_metrics(config, kinds, ["model_name"], {0: ["m"]}).observe({"errors": 1})


def test_the_counts_of_vllms_offloading_stand_beside_the_connectors_own() -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

    from kvf_vllm.offloading.connector import KvFrameworkOffloading
    from kvf_vllm.offloading.metrics import BothCounted

    theirs = OffloadingConnectorStats()
    theirs.increase_counter("vllm:kv_offload_load_bytes", 7)
    counted = BothCounted.of({"hit_tokens": 3, "seconds": {"load": [0.5]}}, None)
    assert not counted.is_empty()
    assert BothCounted.of({}, None).is_empty()
    data = counted.aggregate(BothCounted.of({"hit_tokens": 4}, theirs)).data
    again = KvFrameworkOffloading.build_kv_connector_stats(data)
    assert again.reduce() == {"hit_tokens": 7, "load_ms_mean": 500.0, "vllm:kv_offload_load_bytes": 7}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    # Not the process's own, in which other tests have left theirs.
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    for times in (1, 2):
        # vLLM's own cannot be made twice in a process: they go on in the first.
        shown = KvFrameworkOffloading.build_prom_metrics(config, kinds, ["model_name"], {0: ["both"]})
        shown.observe(data)
        assert registry.get_sample_value("kvframework:hit_tokens_total", {"model_name": "both"}) == times * 7
    assert registry.get_sample_value("vllm:kv_offload_load_bytes_total", {"model_name": "both"}) == 7


def test_pipeline_stages_are_told_apart_in_vllms_own_configuration() -> None:
    """vLLM starts no pipeline on a CPU: its classes for two stages of two workers, as its own code makes them."""
    from vllm.config import ParallelConfig
    from vllm.v1.core.kv_cache_utils import _project_kv_cache_groups_to_worker
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

    from kvf_vllm.connector import Report
    from kvf_vllm.facts import groups_of, part_of, place_of
    from kvf_vllm.step_messages import Served, StepReport

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    layers = [f"model.layers.{index}.self_attn.attn" for index in range(3)]
    whole = [KVCacheGroupSpec(layers, spec)]
    parallel = ParallelConfig(pipeline_parallel_size=2, tensor_parallel_size=2)
    assert parallel.world_size == 4
    names, places = [], []
    for rank, held in enumerate((layers[:2], layers[:2], layers[2:], layers[2:])):
        parallel.rank = rank
        mine = _project_kv_cache_groups_to_worker(whole, dict.fromkeys(held, spec))
        groups = groups_of(SimpleNamespace(kv_cache_groups=mine))
        assert [group.layers for group in groups] == [tuple(held)]
        places.append(place_of(parallel, SimpleNamespace()))
        model = SimpleNamespace(get_total_num_kv_heads=lambda: 4, get_total_num_hidden_layers=lambda: 3)
        names.append(part_of(model, parallel, places[-1], groups).stage)
    assert [(place.stage, place.rank, place.world_size) for place in places] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 2),
        (1, 1, 2),
    ]
    assert names[0] == names[1] != names[2] == names[3]
    reports = [Report(StepReport(served={rank: Served("m", b"n", 16, 2, rank // 2)})) for rank in range(4)]
    merged = reports[0]
    for report in reports[1:]:
        merged = merged.aggregate(report)
    assert {rank: served.stage for rank, served in merged.report.served.items() if served} == {0: 0, 1: 0, 2: 1, 3: 1}


def worker_of(**fields: Any) -> Any:
    from kvf_vllm.connector import KvFrameworkConnector
    from kvf_vllm.worker import WorkerSide
    from kvframework.client import ErrorNotes

    connector = object.__new__(KvFrameworkConnector)
    worker = WorkerSide(FakeInstance(), block_size=BLOCK)
    given = {"_scheduler": None, "_client": None, "_resets": None, "_updates": None, "errors": ErrorNotes()}
    vars(connector).update(given, _worker=worker, _instance=SimpleNamespace(close=lambda: None), **fields)
    return connector


def test_beside_other_connectors_weights_that_were_updated_never_have_a_name() -> None:
    """Those may load what the old ones have computed."""
    connector = worker_of(_named=object(), _is_beside_others=True)
    connector._weights_change()
    connector._weights_changed(1.0)
    (weights,) = connector._worker.take_report().weights.values()
    assert (weights.updates, weights.is_shared) == (1, None)


def test_without_a_view_of_the_updates_there_is_no_cache(caplog: pytest.LogCaptureFixture) -> None:
    connector = worker_of(_updates=SimpleNamespace(is_following=False))
    connector.handle_preemptions(SimpleNamespace(plan=StepPlan()))
    assert connector._worker is None
    assert "this vLLM does not report updates of its weights" in caplog.text


def test_a_stage_with_more_layers_than_another_has_its_slot_in_the_same_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM starts no pipeline on a CPU: what its workers would tell, and where each of them then copies."""
    from kvf_vllm.adapters import LoadedAdapters
    from kvf_vllm.engine_names import EngineNames
    from kvf_vllm.offloading import connector as module
    from kvf_vllm.offloading.messages import Laid, StepPlan, StepReport
    from kvf_vllm.offloading.worker import ServedArena, WorkerSide
    from kvf_vllm.weights import EngineWeights
    from kvframework.client import KvIdentity, OpaqueObjects

    made: list[OpaqueObjects] = []
    monkeypatch.setattr(module, "OpaqueInstance", lambda _client, objects: made.append(objects))
    connector = object.__new__(module.KvFrameworkOffloading)
    parallel = SimpleNamespace(tp_size=1, pp_size=2, dcp_size=1, pcp_size=1)
    config = SimpleNamespace(parallel=parallel, groups=[SimpleNamespace(group_id=0)])
    connector._spec = SimpleNamespace(slots=2, config=config, tokens_per_chunk=(16,), unit_tokens=16)
    connector._client = object()
    names = EngineNames(2, EngineWeights(), connector._register)
    told = [Laid("m", b"", 16, 1, rank, (), KvIdentity("m", "r"), f"p{rank}", 300 - 100 * rank) for rank in (0, 1)]
    first, second = (StepReport(served={rank: each}) for rank, each in enumerate(told))
    names.heard(first)
    assert not made
    names.heard(first.aggregate(second))
    (objects,) = made
    assert (objects.object_bytes, objects.packing) == ([600], "vllm-offload1/p0+p1")
    of_stage = SimpleNamespace(
        config=SimpleNamespace(parallel=SimpleNamespace(rank=1), canonical_layout=False), replicated_layout=False
    )
    worker = WorkerSide(of_stage, None, None, ServedArena(), LoadedAdapters())
    worker.slot = SimpleNamespace(offset=0)
    worker._begin(StepPlan({}, {}, slot_bytes=connector._slot_bytes))
    assert worker.slot.offset == 300


def test_an_update_of_the_weights_spoils_the_loads_under_way_and_fails_what_was_planned_for_the_old_ones() -> None:
    from kvf_vllm.adapters import LoadedAdapters
    from kvf_vllm.offloading.messages import ArenaPlaces, StepPlan
    from kvf_vllm.offloading.worker import ServedArena, WorkerSide

    parallel = SimpleNamespace(parallel=SimpleNamespace(rank=0), canonical_layout=False)
    worker = WorkerSide(
        SimpleNamespace(config=parallel, replicated_layout=False), None, None, ServedArena(), LoadedAdapters()
    )
    from vllm.v1.kv_offload.base import TransferResult

    copies = SimpleNamespace(ended=[], waited=set())
    copies.wait = copies.waited.update
    copies.get_finished = lambda: [copies.ended.pop() for _ in range(len(copies.ended))]
    copies.submit_load = copies.submit_store = lambda *_: True
    worker.worker = copies

    def job(number: int) -> Any:
        return SimpleNamespace(req_id=f"r{number}", src_spec=ArenaPlaces(number), dst_spec=ArenaPlaces(number))

    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    load = job(1)
    load.dst_spec = GPULoadStoreSpec([0], group_sizes=[1], block_indices=[0])
    worker.start_kv_transfers(StepPlan({7: load}, {}))
    worker.weights_change()
    assert copies.waited == {7}
    copies.ended.append(TransferResult(7, True, 10, 0.1))
    assert worker.get_finished(set())[1] == {"r1"}
    assert worker.failed_loads == {"r1"}
    store = job(2)
    store.src_spec = GPULoadStoreSpec([0], group_sizes=[1], block_indices=[0])
    worker.prepare_store_kv(StepPlan({}, {8: store}))
    copies.ended.append(TransferResult(8, True, 10, 0.1))
    worker.get_finished(set())
    assert worker._connector_worker_meta.failed == {2}
    assert worker.tally.counts == {"failed_loads": 1, "failed_stores": 1}
