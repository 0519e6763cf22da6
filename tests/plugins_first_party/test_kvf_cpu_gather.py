"""The transport `cpu_gather`: what is written where, what is left alone, and that failures are misses."""

from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvf_cpu_gather import arena_path, copying  # noqa: E402
from kvf_cpu_gather import kvf_transports as hook  # noqa: E402
from kvf_cpu_gather.context import CpuGather  # noqa: E402
from kvf_cpu_gather.throttle import ThrottledLog  # noqa: E402
from kvf_layouts.dynamic_cache import DynamicCacheLayout  # noqa: E402
from kvf_layouts.paged import PagedLayout  # noqa: E402
from kvframework.api import (  # noqa: E402
    CacheKey,
    GroupDesc,
    KVLayout,
    LayerGroup,
    Layout,
    MemoryLayoutDesc,
    Registration,
)
from kvframework.errors import (  # noqa: E402
    BadBlockIds,
    BadLayout,
    BadRange,
    DeadlineExceeded,
    LeaseUnknown,
    NotRegistered,
    ServerGone,
)
from tests.plugins_first_party.arena_link import ArenaLink  # noqa: E402

pytestmark = pytest.mark.torch

BLOCK, CHUNK, HEADS, DIM, BLOCKS, LAYERS = 4, 8, 2, 3, 12, 2
NHD = ("plane", "block", "token", "head", "dim")
HND = ("plane", "block", "head", "token", "dim")
IDS = [[5, 2, 7, 8]]  # two chunks: scattered blocks, then neighbours


def digest(index: int) -> bytes:
    return bytes([index]) * 32


def key(start: int = 0, end: int = 2 * CHUNK) -> CacheKey:
    digests = b"".join(digest(i) for i in range(end // CHUNK))
    return CacheKey("m", 1, 0, bytes(16), start, end, "r", digests=digests)


class Engine:
    """An engine's paged memory, its transport, and the double behind it."""

    def __init__(self, axes=NHD, dtype=torch.float32, seed=1, link=None, kv_caches=None, path="auto"):
        self.layout = PagedLayout(axes)
        sizes = {"plane": 2, "block": BLOCKS, "token": BLOCK, "head": HEADS, "dim": DIM}
        generator = torch.Generator().manual_seed(seed)
        shape = [sizes[axis] for axis in axes]
        self.kv_caches = kv_caches or {
            f"l{i}": torch.randn(shape, generator=generator).to(dtype) for i in range(LAYERS)
        }
        declared = self.layout.describe(self.kv_caches, block_size=BLOCK)
        self.desc = self.layout.object_desc(declared, CHUNK)
        self.link = link or ArenaLink(self.desc)
        self.registration = Registration(1, 0, bytes(16), declared, self.desc)
        self.transport = CpuGather(self.link, path)
        self.transport.register(self.registration, self.layout)

    def store(self, ids=IDS, cache_key=None, event=None):
        return self.transport.submit_store("r", cache_key or key(), 1, self.kv_caches, ids, event, self.per_chunk)

    def retrieve(self, ids=IDS, cache_key=None, skip=0, event=None):
        return self.transport.submit_retrieve(
            "r", cache_key or key(), 1, self.kv_caches, ids, event, self.per_chunk, skip
        )

    @property
    def per_chunk(self):
        return [self.desc.chunk_tokens // group.block_size for group in self.registration.layout.groups]

    def tokens(self, ids):
        """[planes, layers, tokens, heads, dim] of these blocks, as bytes-comparable integers."""
        views = self.layout.block_views(self.registration.layout, self.kv_caches)[0]
        stacked = torch.stack([torch.stack([view[ids] for view in plane]) for plane in views])
        return stacked.flatten(2, 3).contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64])
@pytest.mark.parametrize("axes", [NHD, HND], ids=["NHD", "HND"])
def test_what_is_stored_is_canonical_and_comes_back(axes, dtype):
    engine = Engine(axes, dtype)
    future = engine.store()
    assert future.query()
    assert future.result() is True
    assert future.detail.stored == 2
    assert engine.link.object_bytes(digest(0)) == engine.tokens([5, 2]).numpy().tobytes()
    assert engine.link.object_bytes(digest(1)) == engine.tokens([7, 8]).numpy().tobytes()

    other = Engine(NHD, dtype, seed=2, link=engine.link)
    untouched = other.tokens([0, 1, 2, 5, 6, 7, 8, 9]).clone()
    assert other.retrieve([[3, 4, 11, 10]]).result() is True
    assert torch.equal(other.tokens([3, 4, 11, 10]), engine.tokens(IDS[0]))
    assert torch.equal(other.tokens([0, 1, 2, 5, 6, 7, 8, 9]), untouched)
    assert engine.link.open_leases == 0


def test_only_what_the_server_lacks_is_written():
    engine = Engine()
    engine.store([[5, 2]], key(0, CHUNK))
    before = engine.link.object_bytes(digest(0))
    for tensor in engine.kv_caches.values():
        tensor.add_(1.0)
    future = engine.store()
    assert (future.detail.stored, future.detail.present) == (1, 1)
    assert len(engine.link.written) == 2
    assert engine.link.object_bytes(digest(0)) == before
    again = engine.store()
    assert (again.result(), again.detail.present, again.detail.stored) == (True, 2, 0)
    assert engine.link.calls[-1] == "prepare_store"


def test_bytes_of_the_arena_outside_the_ranges_are_not_touched():
    engine = Engine()
    engine.store()
    places = engine.link.written
    inside = {i for place in places for i in range(place.offset, place.offset + place.length)}
    outside = bytes(b for i, b in enumerate(engine.link.mapped) if i not in inside)
    assert set(outside) == {0xEE}


@settings(max_examples=80, deadline=None)
@given(
    source=st.permutations(range(BLOCKS)),
    target=st.permutations(range(BLOCKS)),
    chunks=st.integers(1, 3),
    skip=st.integers(0, 3 * CHUNK),
    axes=st.sampled_from([(NHD, HND), (HND, NHD), (NHD, NHD)]),
    runs=st.booleans(),
)
def test_gather_then_scatter_is_the_identity_and_skipped_slots_stay(source, target, chunks, skip, axes, runs):
    skip = min(skip, chunks * CHUNK)
    count = chunks * CHUNK // BLOCK
    source = list(range(count)) if runs else source[:count]
    target, rest = (list(range(count)), list(range(count, BLOCKS))) if runs else (target[:count], target[count:])
    cache_key = key(0, chunks * CHUNK)
    engine = Engine(axes[0])
    assert engine.store([source], cache_key).result()
    other = Engine(axes[1], seed=2, link=engine.link)
    before, before_rest = other.tokens(target).clone(), other.tokens(rest).clone()
    assert other.retrieve([target], cache_key, skip=skip).result()
    after, want = other.tokens(target), engine.tokens(source)
    assert torch.equal(after[:, :, :skip], before[:, :, :skip])
    assert torch.equal(after[:, :, skip:], want[:, :, skip:])
    assert torch.equal(other.tokens(rest), before_rest)


def test_a_later_part_of_a_request_is_its_own_chunks():
    engine = Engine()
    engine.store()
    other = Engine(seed=2, link=engine.link)
    assert other.retrieve([[0, 1]], key(CHUNK, 2 * CHUNK)).result()
    assert torch.equal(other.tokens([0, 1]), engine.tokens([7, 8]))


def test_a_dynamic_cache_and_paged_memory_share_objects():
    engine = Engine()
    engine.store()
    pair = {f"l{i}": (torch.zeros(1, HEADS, 19, DIM), torch.zeros(1, HEADS, 19, DIM)) for i in range(LAYERS)}
    layout = DynamicCacheLayout()
    declared = layout.describe(pair, block_size=BLOCK)
    assert layout.object_desc(declared, CHUNK) == engine.desc
    transport = CpuGather(engine.link)
    transport.register(Registration(2, 0, bytes(16), declared, engine.desc), layout)
    assert transport.submit_retrieve("r", key(), 2, pair, [range(4)], None, [2]).result()
    want = engine.tokens(IDS[0]).view(torch.float32).view(2, LAYERS, 16, HEADS, DIM)
    for layer in range(LAYERS):
        for plane in (0, 1):
            assert torch.equal(pair[f"l{layer}"][plane][0, :, :16], want[plane, layer].transpose(0, 1))
            assert not pair[f"l{layer}"][plane][0, :, 16:].any()


class Compressed(Layout):
    """Two layer groups, the second with one slot for two tokens."""

    name = "compressed"

    def describe(self, kv_caches, *, block_size):
        return KVLayout(
            self.name,
            (
                LayerGroup(1, BLOCK, 1, DIM, "float32", planes=1),
                LayerGroup(1, CHUNK, 1, DIM, "float32", planes=1, compress_ratio=2),
            ),
        )

    def block_views(self, layout, kv_caches):
        return [[[kv_caches["full"]]], [[kv_caches["small"]]]]


def test_groups_with_their_own_block_sizes_and_compression():
    layout = Compressed()
    tensors = {"full": torch.randn(6, BLOCK, 1, DIM), "small": torch.randn(4, CHUNK // 2, 1, DIM)}
    declared = layout.describe(tensors, block_size=BLOCK)
    desc = layout.object_desc(declared, CHUNK)
    link = ArenaLink(desc)
    transport = CpuGather(link)
    transport.register(Registration(1, 0, bytes(16), declared, desc), layout)
    ids = [[4, 0, 1, 2], [3, 1]]
    future = transport.submit_store("r", key(), 1, tensors, ids, None, [2, 1])
    assert future.detail.stored == 4
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert transport.submit_retrieve("r", key(), 1, target, ids, None, [2, 1], 5).result()
    assert torch.equal(target["full"][[1, 2]], tensors["full"][[1, 2]])
    assert not target["full"][4].any()
    assert not target["full"][0, 0].any()
    assert torch.equal(target["full"][0, 1:], tensors["full"][0, 1:])
    # tokens 4 and 5 share slot 2: token 5 is wanted, so the slot is written
    assert not target["small"][3, :2].any()
    assert torch.equal(target["small"][3, 2:], tensors["small"][3, 2:])
    assert torch.equal(target["small"][1], tensors["small"][1])


BAD_IDS = {
    "too high": [[5, 2, 7, BLOCKS]],
    "negative": [[5, 2, -1, 8]],
    "too few": [[5, 2, 7]],
    "too many": [[5, 2, 7, 8, 9]],
    "no list for the group": [],
    "a list too many": [[5, 2, 7, 8], [1]],
    "no integers": [["a", "b", "c", "d"]],
}


@pytest.mark.parametrize("ids", BAD_IDS.values(), ids=BAD_IDS)
def test_bad_block_ids_are_refused_before_anything_is_reserved(ids):
    engine = Engine()
    for submit in (engine.store, engine.retrieve):
        with pytest.raises(BadBlockIds):
            submit(ids)
    assert engine.link.calls == []


def test_wrong_ranges_counts_and_order_of_calls_are_refused():
    engine = Engine()
    for start, end in ((0, CHUNK + 1), (1, CHUNK + 1), (CHUNK, CHUNK)):
        with pytest.raises(BadRange):
            engine.store(cache_key=key(start, end))
    for skip in (-1, 2 * CHUNK + 1):
        with pytest.raises(BadRange):
            engine.retrieve(skip=skip)
    with pytest.raises(BadBlockIds, match="blocks_in_chunk"):
        engine.transport.submit_store("r", key(), 1, engine.kv_caches, IDS, None, [3])
    engine.transport.close()
    engine.transport.close()
    with pytest.raises(NotRegistered):
        engine.store()
    assert engine.link.calls == []


def test_objects_in_another_form_than_canonical_are_refused():
    engine = Engine()
    desc = MemoryLayoutDesc(CHUNK, (GroupDesc((64,), "uint8", form="packed"),))
    with pytest.raises(BadLayout, match="packed"):
        engine.transport.register(Registration(1, 0, bytes(16), engine.registration.layout, desc), engine.layout)


@pytest.mark.parametrize("method", ["prepare_store", "commit_store"])
@pytest.mark.parametrize("error", [ServerGone("gone"), DeadlineExceeded("late"), LeaseUnknown("no lease")])
def test_a_failing_server_is_a_store_that_dropped(method, error, caplog):
    engine = Engine()
    engine.link.failing[method] = error
    with caplog.at_level(logging.WARNING, "kvf_cpu_gather"):
        for _ in range(5):
            future = engine.store()
            assert future.result() is False
            assert future.detail.dropped == 2
    assert len(caplog.records) == 1
    assert error.code in caplog.text
    assert engine.link.open_leases == 0


def test_an_abort_that_fails_too_stays_silent():
    engine = Engine()
    engine.link.failing = {"commit_store": ServerGone("gone"), "abort_store": ServerGone("gone")}
    assert engine.store().result() is False


@pytest.mark.parametrize("method", ["prepare_retrieve", "commit_retrieve"])
def test_a_failing_server_is_a_load_that_missed(method):
    engine = Engine()
    engine.store()
    engine.link.failing[method] = DeadlineExceeded("late")
    assert engine.retrieve().result() is False


def test_a_miss_and_a_lost_pin_are_false():
    engine = Engine()
    assert engine.retrieve().result() is False
    engine.store()
    engine.link.held = False
    assert engine.retrieve().result() is False


def test_an_arena_that_is_not_mapped_is_a_miss_that_says_why(caplog):
    engine = Engine(path="arena")
    engine.link.mapped = None
    assert engine.store().result() is False
    assert engine.retrieve().result() is False
    assert "not mapped" in caplog.text
    assert engine.link.calls == []


def test_ranges_that_cannot_be_meant_are_a_failure_and_end_the_lease(caplog):
    engine = Engine()
    engine.store()
    for digest_and_group, place in list(engine.link.objects.items()):
        engine.link.objects[digest_and_group] = type(place)(place.chunk, 0, len(engine.link.mapped) - 8, place.length)
    before = engine.tokens(IDS[0]).clone()
    assert engine.retrieve().result() is False
    assert torch.equal(engine.tokens(IDS[0]), before)
    assert engine.link.open_leases == 0
    assert "the server names" in caplog.text


class Event:
    def __init__(self, error=None):
        self.waited = 0
        self.error = error

    def synchronize(self):
        self.waited += 1
        if self.error:
            raise self.error


def test_the_way_of_tensors_that_are_not_in_host_memory(monkeypatch):
    """No device is needed to see that the other branch moves the same bytes."""
    waits = []
    monkeypatch.setattr(copying, "_HOST", frozenset())
    monkeypatch.setattr(arena_path, "wait_for_devices", waits.append)
    engine = Engine(HND)
    assert engine.store().result()
    assert engine.link.object_bytes(digest(0)) == engine.tokens([5, 2]).numpy().tobytes()
    other = Engine(NHD, seed=2, link=engine.link)
    assert other.retrieve([[3, 9, 11, 10]], skip=5).result()
    assert torch.equal(other.tokens([3, 9, 11, 10])[:, :, 5:], engine.tokens(IDS[0])[:, :, 5:])
    assert len(waits) == 1


def test_the_event_is_waited_for_before_memory_is_touched():
    engine, event = Engine(), Event()
    engine.store(event=event)
    engine.retrieve(event=event)
    assert event.waited == 2
    failing = Engine()
    assert failing.store(event=Event(RuntimeError("device lost"))).result() is False
    assert failing.link.calls == ["prepare_store", "abort_store"]
    with pytest.raises(KeyboardInterrupt):
        failing.store(event=Event(KeyboardInterrupt()))
    assert failing.link.open_leases == 0


def test_tensors_of_every_autograd_mode():
    shape = (2, BLOCKS, BLOCK, HEADS, DIM)
    with torch.inference_mode():
        inference = {f"l{i}": torch.randn(shape) for i in range(LAYERS)}
    leaves = {f"l{i}": torch.randn(shape, requires_grad=True) for i in range(LAYERS)}
    engine = Engine(kv_caches=leaves)
    assert engine.store().result()
    other = Engine(kv_caches=inference, link=engine.link)
    assert other.retrieve().result()
    assert torch.equal(other.tokens(IDS[0]), engine.tokens(IDS[0]))
    with torch.inference_mode():
        assert other.retrieve([[1, 3, 5, 7]]).result()
    with torch.no_grad():
        assert engine.retrieve([[1, 3, 5, 7]]).result()
    assert torch.equal(other.tokens([1, 3, 5, 7]), engine.tokens([1, 3, 5, 7]))


@pytest.mark.parametrize("kind", [list, tuple, range, torch.tensor])
def test_block_ids_may_be_any_sequence_of_integers(kind):
    engine = Engine()
    ids = range(4) if kind is range else kind([0, 1, 2, 3])
    assert engine.store([ids]).result()
    assert engine.link.object_bytes(digest(1)) == engine.tokens([2, 3]).numpy().tobytes()


def test_the_log_is_limited_per_reason_and_counts_what_it_left_out(caplog):
    now = [0.0]
    quiet = ThrottledLog(logging.getLogger("quiet"), interval_s=10.0, clock=lambda: now[0])
    for _ in range(3):
        quiet.warning("a", "first")
    quiet.warning("b", "second")
    now[0] = 10.0
    quiet.warning("a", "third")
    assert [record.getMessage() for record in caplog.records] == [
        "first", "second", "third (2 more since the last such line)",
    ]  # fmt: skip


def test_the_hook_offers_an_engine_driven_transport():
    (provider,) = hook()
    assert (provider.name, provider.create_server, provider.is_gpu) == ("cpu_gather", None, False)
    assert provider.probe() is None
    link = ArenaLink(MemoryLayoutDesc(CHUNK, (GroupDesc((2, 1, CHUNK, 4), "float32"),)))
    transport = provider.create(provider.options(), link)
    assert transport.memory_handles({}) == ()
    transport.close()
