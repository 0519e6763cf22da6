"""The promises of the first design that are never removed: each is named here, with a test of its own or the test
elsewhere that keeps it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvframework.api.futures import Promise
from kvframework.api.keys import compute_namespace
from kvframework.api.layout import KVLayout, LayerGroup, canonical_desc
from kvframework.api.transport import StoreOutcome
from kvframework.client import KVClient, register_canonical
from kvframework.config.load import load_config
from kvframework.errors import NamespaceMismatch
from kvframework.registry.registry import PluginRegistry
from kvframework.server import Server
from kvframework.storage.l2.tiers import Tiers
from kvframework.wire import messages as m
from kvframework.wire.frames import join, split
from kvframework.wire.protocol import REQUESTS
from tests.core.server.gated_transport import GatedPlugin
from tests.core.server.in_process import serving
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

TESTS = Path(__file__).parents[2]
# Two layer groups, of which the second holds a quarter of the slots.
GROUPS = (LayerGroup(2, 16, 1, 8, "float32"), LayerGroup(1, 16, 1, 8, "float16", compress_ratio=4))
LAYOUT = KVLayout("paged", GROUPS, num_blocks=64)

# Where a promise has its tests elsewhere: file and test.
KEPT_ELSEWHERE = {
    "batched submits loop over the single calls, in order": (
        "core/client/test_batches.py::test_a_batch_is_its_single_transfers_in_order"
    ),
    "batched submits take lists of one length": "core/client/test_batches.py::test_lists_of_unequal_length_are_refused",
    "vLLM's adapter submits a step's requests as batches": (
        "vllm/test_attached.py::test_a_steps_requests_go_to_the_server_as_batches"
    ),
    "SGLang's adapter submits states as a batch": (
        "sglang/test_pages.py::test_states_are_loaded_as_one_batch_up_to_the_first_that_is_missing"
    ),
    "views are derived, never stored twice": "core/defaults/test_cpu_gather.py::test_no_memory_is_held_between_calls",
    "the eight fields have a public client call": (
        "core/client/test_canonical.py::test_a_canonical_instance_stores_and_a_scheduler_without_a_registration_finds_it"
    ),
    "to_cuda_future() for the users of CUDA": (
        "devices/test_device_future.py::test_a_stream_goes_on_however_the_transfer_ends"
    ),
    "the layout goes with submit_prefetch_task in blend's lookup": (
        "blend/test_l2.py::test_one_task_with_the_registered_layout"
    ),
    "no pickle": "test_forbidden.py::test_no_file_turns_data_into_code",
    "CUDA IPC moves KV": "cuda/test_simulated.py::test_engines_on_two_gpus_share_what_one_server_keeps",
    "CPU gather moves KV": "core/defaults/test_cpu_gather.py::test_what_is_stored_is_canonical_and_comes_back",
    "L1 is pinned": "core/defaults/test_pinned.py::test_ready_grows_to_the_end_and_is_resident_by_then",
    "Redis is an L2": "core/survival/test_redis_under_eight_clients.py::test_no_fault_of_redis_harms_eight_clients",
}


@pytest.mark.parametrize("promise", KEPT_ELSEWHERE)
def test_the_test_that_keeps_a_promise_is_there(promise: str) -> None:
    file, _, name = KEPT_ELSEWHERE[promise].partition("::")
    found = [each.name for each in ast.walk(ast.parse((TESTS / file).read_text())) if isinstance(each, ast.FunctionDef)]
    assert name in found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    tier = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}")
    with serving("transport.1.use=gated", *tier, plugins=(GatedPlugin(),)) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[WireClient]:
    with WireClient(server.endpoint) as connected:
        yield connected


def register_gpu(client: WireClient, memory: Path, *, model: str = "gpu", world_size: int = 1) -> m.Registered:
    """An instance of the transport whose server copies."""
    memory.write_bytes(bytes(1 << 16))
    namespace = compute_namespace(
        model=model, desc=canonical_desc(LAYOUT, 256), hasher_fingerprint="sha256/1", world_size=world_size
    )
    payload = m.RegisterKvCache(2, model, world_size, 0, namespace, "gated", LAYOUT, (str(memory).encode(),))
    registered: m.Registered = client.call("REGISTER_KV_CACHE", payload)
    return registered


def test_a_request_carries_one_key_and_has_one_answer(client: WireClient) -> None:
    """A worker's key names its rank. LOOKUP's names none, and finds what all ranks have."""
    registered = client.register(world_size=2)
    tokens, hits = list(range(512)), []
    for rank in range(2):
        client.store(key_for(registered, tokens, world_size=2, worker_id=rank), b"x")
        key = key_for(registered, tokens, world_size=2, worker_id=None)
        frames = join(1, "LOOKUP", m.Lookup(key))
        assert len(frames) == 3, "an id, a name and one payload"
        asked = client.send("LOOKUP", m.Lookup(key))
        # The answer of a later request follows at once.
        marked = client.send("NOOP", m.Empty())
        answers = [client.receive(), client.receive()]
        assert [each[0] for each in answers] == [asked, marked]
        hits.append(msgspec.msgpack.decode(answers[0][2], type=m.LookupReply).hit_tokens)
    assert hits == [0, 512]


def test_one_registry_has_the_contexts_of_both_ways_of_transport(
    server: Server, client: WireClient, tmp_path: Path
) -> None:
    """`is_gpu` and `get_layout_desc(chunk_size)` are the context's, and the desc is derived once."""
    other = client.register()
    gpu = register_gpu(client, tmp_path / "memory")
    contexts = server.service.contexts
    assert {number: context.is_gpu for number, context in contexts.items()} == {1: False, 2: True}
    assert [contexts[number].get_layout_desc(256) for number in (1, 2)] == [other.desc, gpu.desc]
    assert contexts[2].get_layout_desc(256) is contexts[2].get_layout_desc(256)
    assert contexts[2].get_layout_desc(512).chunk_tokens == 512


def test_an_instance_without_a_gpu_registers_with_eight_named_fields_in_one_frame(server: Server) -> None:
    payload = m.RegisterNonGpuContextPayload(7, "tiny", 2, 16, 4, 64, "bfloat16", True)
    _, name, *frames = join(1, "REGISTER_KV_CACHE_NON_GPU_CONTEXT", payload)
    assert len(frames) == 1
    assert msgspec.msgpack.decode(frames[0]) == {
        "instance_id": 7,
        "model_name": "tiny",
        "world_size": 2,
        "block_size": 16,
        "num_layers": 4,
        "hidden_dim_size": 64,
        "dtype_str": "bfloat16",
        "use_mla": True,
    }
    assert split(join(1, bytes(name).decode(), payload)).type in REQUESTS
    with KVClient(server.endpoint) as engine:
        assert engine.wait_up(20)
        instance = register_canonical(
            engine,
            instance_id=7,
            model_name="tiny",
            world_size=2,
            block_size=16,
            num_layers=4,
            hidden_dim_size=64,
            dtype="bfloat16",
            use_mla=True,
        )
        assert instance.registration.desc == server.service.contexts[7].get_layout_desc(256)


@pytest.mark.torch
def test_the_adapter_owns_the_futures_and_knows_of_no_transport(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transport hands out a future and has no part in the answer of `get_finished`."""
    from kvf_cpu_gather.context import CpuGather
    from tests.support.engines import CHUNK, PagedEngine

    pending: Promise[StoreOutcome] = Promise()
    with KVClient(server.endpoint) as connected:
        assert connected.wait_up(20)
        engine = PagedEngine(connected)
        monkeypatch.setattr(CpuGather, "store", lambda *_given: pending)
        future = engine.worker.submit_store(engine.request([1] * CHUNK), 0, CHUNK, [list(range(16))])
        assert engine.worker.get_finished() == (set(), set())
        monkeypatch.delattr(CpuGather, "store")
        pending.set_result(StoreOutcome(stored=1))
        assert future.result(0) == StoreOutcome(stored=1)
        assert engine.worker.get_finished() == ({"r"}, set())
        monkeypatch.undo()
        engine.worker.close()


def test_the_layout_goes_with_the_load_from_l2(client: WireClient, monkeypatch: pytest.MonkeyPatch) -> None:
    descs: list[object] = []
    single = Tiers.submit_prefetch_task

    def spy(self: Tiers, keys: Sequence[Any], layout_desc: Any, **more: Any) -> Any:
        descs.append(layout_desc)
        return single(self, keys, layout_desc, **more)

    monkeypatch.setattr(Tiers, "submit_prefetch_task", spy)
    registered = client.register(num_layers=3)
    key = key_for(registered, list(range(512)))
    client.store(key, b"x")
    wait_until(lambda: not client.status()["l2"][0]["write_pending"], what="the write to L2")
    client.call("CLEAR", m.Clear())
    found = client.lookup(key)
    assert found.pending
    assert descs == [registered.desc]


def test_model_and_world_size_come_at_registration(client: WireClient, tmp_path: Path) -> None:
    """A request that names others is refused."""
    registered = register_gpu(client, tmp_path / "memory", model="mine", world_size=2)
    (instance,) = client.status()["instances"]
    assert (instance["model"], instance["world_size"], instance["rank"]) == ("mine", 2, 0)
    tokens = list(range(256))
    for named in ({"model_name": "theirs", "world_size": 2}, {"model_name": "mine", "world_size": 4}):
        with pytest.raises(NamespaceMismatch):
            client.call("STORE", m.TransferRequest(key_for(registered, tokens, **named), 2, (bytes(64), bytes(64))))


def test_the_status_names_instances_by_class_and_the_block_sizes_of_their_groups(
    client: WireClient, tmp_path: Path
) -> None:
    client.register()
    register_gpu(client, tmp_path / "memory")
    document = client.status()
    assert (document["gpu_instance_ids"], document["non_gpu_instance_ids"]) == ([2], [1])
    assert [each["instance_id"] for each in document["instances"]] == [1, 2]
    one, two = document["instances"]
    assert (one["logical_block_size"], one["group_physical_block_sizes"], one["group_compress_ratios"]) == (
        16,
        [16],
        [1],
    )
    assert two["logical_block_size"] == 16
    assert (two["group_physical_block_sizes"], two["group_compress_ratios"]) == ([16, 4], [1, 4])


def kinds_of(kind: msgspec.inspect.Type, seen: set[type]) -> set[str]:
    """The names of the kinds of all values in a message."""
    inspect = msgspec.inspect
    found = {type(kind).__name__}
    if isinstance(kind, inspect.StructType):
        if kind.cls not in seen:
            seen.add(kind.cls)
            found = found.union(*(kinds_of(field.type, seen) for field in kind.fields))
        return found
    inner: list[msgspec.inspect.Type] = []
    if isinstance(kind, inspect.UnionType):
        inner = list(kind.types)
    elif isinstance(kind, inspect.TupleType):
        inner = list(kind.item_types)
    elif isinstance(kind, inspect.CollectionType):
        inner = [kind.item_type]
    elif isinstance(kind, inspect.DictType):
        inner = [kind.key_type, kind.value_type]
    elif isinstance(kind, inspect.Metadata):
        inner = [kind.type]
    return found.union(*(kinds_of(each, seen) for each in inner))


SCALARS = {"IntType", "FloatType", "BoolType", "StrType", "BytesType", "NoneType", "LiteralType"}
HOLDERS = {"StructType", "UnionType", "VarTupleType", "TupleType", "ListType", "DictType", "Metadata"}


@pytest.mark.parametrize("name", REQUESTS)
def test_only_scalars_go_over_the_wire(name: str) -> None:
    """And structs, lists and maps of them: nothing that a receiver would have to run, or guess the type of."""
    spec, seen = REQUESTS[name], set[type]()
    kinds = kinds_of(msgspec.inspect.type_info(spec.payload), seen)
    kinds |= kinds_of(msgspec.inspect.type_info(spec.response), seen)
    assert not kinds - SCALARS - HOLDERS


def test_transports_memory_and_tier_are_plugins_named_in_the_toml(tmp_path: Path) -> None:
    toml = tmp_path / "kvf.toml"
    toml.write_text(
        '[l1]\nuse = "pinned"\ncapacity = "16MiB"\n[[transport]]\nuse = "cuda_ipc"\n[[transport]]\nuse = "cpu_gather"\n'
        '[[l2]]\nuse = "redis"\nurl = "redis://localhost"\n'
    )
    config, registry = load_config(toml, ()), PluginRegistry()
    assert [table.use for table in config.transport] == ["cuda_ipc", "cpu_gather"]
    assert {table.use for table in config.transport} <= {*registry.names("transport")}
    assert config.l1.memory.use in registry.names("memory")
    assert [each.tier.use for each in config.l2] == ["redis"]
    assert "redis" in registry.names("tier")
    toml.write_text('[l1]\nuse = "pinned"\ncapacity = "16MiB"\n[[transport]]\nuse = "cpu_gather"\n')
    with serving(config=toml) as server, WireClient(server.endpoint) as client:
        registered = client.register()
        client.store(key_for(registered, list(range(256))), b"named")
        assert client.retrieve(key_for(registered, list(range(256)))) is not None
        assert [*client.status()["transports"]] == ["cpu_gather"]
