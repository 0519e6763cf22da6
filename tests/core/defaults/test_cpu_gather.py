"""The transport `cpu_gather`: what is written where, and what is left alone."""

from __future__ import annotations

import gc
import weakref

import pytest

from kvf_layouts.dynamic_cache import DynamicCacheLayout
from kvframework.api.transport import Registration
from kvframework.client.kv_client import checked_transfer
from kvframework.errors import BadLayout
from tests.core.defaults import gather_engine
from tests.core.defaults.gather_engine import Engine, both_ways, digest
from tests.support.lazy import torch

__all__ = ["both_ways"]
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    global CpuGather, engine_memory, np, torch_copies
    import numpy as np

    from kvf_cpu_gather import engine_memory, torch_copies
    from kvf_cpu_gather.context import CpuGather


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float64"])
@pytest.mark.parametrize("axes", [gather_engine.NHD, gather_engine.HND], ids=["NHD", "HND"])
def test_what_is_stored_is_canonical_and_comes_back(axes, dtype):
    engine = Engine(axes, dtype)
    future = engine.store()
    assert future.query()
    assert future.result().stored == 2
    assert engine.link.object_bytes(digest(0)) == engine.tokens([5, 2]).numpy().tobytes()
    assert engine.link.object_bytes(digest(1)) == engine.tokens([7, 8]).numpy().tobytes()

    other = Engine(gather_engine.NHD, dtype, seed=2, link=engine.link)
    untouched = other.tokens([0, 1, 2, 5, 6, 7, 8, 9]).clone()
    assert other.load([[3, 4, 11, 10]]).result().ok
    assert torch.equal(other.tokens([3, 4, 11, 10]), engine.tokens(gather_engine.IDS[0]))
    assert torch.equal(other.tokens([0, 1, 2, 5, 6, 7, 8, 9]), untouched)
    assert engine.link.open_leases == 0


def test_bytes_of_the_arena_outside_the_ranges_are_not_touched():
    engine = Engine()
    engine.store()
    places = engine.link.written
    inside = {i for place in places for i in range(place.offset, place.offset + place.length)}
    outside = bytes(b for i, b in enumerate(engine.link.mapped) if i not in inside)
    assert set(outside) == {0xEE}


def test_a_dynamic_cache_and_paged_memory_share_objects():
    engine = Engine()
    engine.store()
    pair = {
        f"l{i}": (
            torch.zeros(1, gather_engine.HEADS, 19, gather_engine.DIM),
            torch.zeros(1, gather_engine.HEADS, 19, gather_engine.DIM),
        )
        for i in range(gather_engine.LAYERS)
    }
    layout = DynamicCacheLayout()
    declared = layout.describe(pair, block_size=gather_engine.BLOCK)
    assert layout.object_desc(declared, gather_engine.CHUNK) == engine.desc
    transport = CpuGather(engine.link)
    registration = Registration(2, 0, bytes(16), declared, engine.desc)
    transport.on_registered(registration, layout)
    transfer = checked_transfer(registration, gather_engine.key(), pair, [range(4)], None, storing=False)
    assert transport.load(transfer, 0).result().ok
    want = (
        engine.tokens(gather_engine.IDS[0])
        .view(torch.float32)
        .view(2, gather_engine.LAYERS, 16, gather_engine.HEADS, gather_engine.DIM)
    )
    for layer in range(gather_engine.LAYERS):
        for plane in (0, 1):
            assert torch.equal(pair[f"l{layer}"][plane][0, :, :16], want[plane, layer].transpose(0, 1))
            assert not pair[f"l{layer}"][plane][0, :, 16:].any()


def test_the_way_of_tensors_that_are_not_in_host_memory(monkeypatch):
    """No device is needed to see that the other branch moves the same bytes."""
    waits = []
    monkeypatch.setattr(torch_copies, "HOST", frozenset())
    monkeypatch.setattr(engine_memory, "wait_for_devices", waits.append)
    monkeypatch.setattr(engine_memory, "mark_device", lambda _views: None)
    engine = Engine(gather_engine.HND)
    assert engine.store().result()
    assert engine.link.object_bytes(digest(0)) == engine.tokens([5, 2]).numpy().tobytes()
    other = Engine(gather_engine.NHD, seed=2, link=engine.link)
    assert other.load([[3, 9, 11, 10]], skip=5).result()
    assert torch.equal(other.tokens([3, 9, 11, 10])[:, :, 5:], engine.tokens(gather_engine.IDS[0])[:, :, 5:])
    assert len(waits) == 1


def test_stable_memory_is_seen_once(monkeypatch):
    engine, seen = Engine(), []
    views = engine.layout.block_views
    monkeypatch.setattr(engine.layout, "block_views", lambda *args: seen.append(1) or views(*args))
    for _ in range(3):
        assert engine.store().result()
        assert engine.load().result()
    assert len(seen) == 1


def test_no_memory_is_held_between_calls():
    """An engine that sleeps gives its memory back, whatever was remembered of it."""
    memory = np.zeros((2, 12, 4, 2, 3), np.float32)
    freed = weakref.ref(memory)
    engine = Engine(kv={"l0": torch.from_numpy(memory)})
    for _ in range(2):
        assert engine.store().result()
    del memory
    engine.kv.clear()
    gc.collect()
    assert freed() is None


@pytest.mark.parametrize("change", ["another tensor", "moved in place", "swapped names"])
def test_memory_that_has_changed_is_seen_anew(change):
    engine = Engine(link=None)
    assert engine.store().result()
    other = Engine(seed=2, link=engine.link)
    assert other.load().result()  # what it remembers from now on is where its tensors lie
    former = {name: tensor.clone() for name, tensor in other.kv.items()}
    first = other.kv["l0"]
    if change == "another tensor":
        other.kv["l0"] = torch.zeros_like(first)
    elif change == "moved in place":
        first.set_(torch.zeros_like(first).untyped_storage(), 0, first.shape, first.stride())
    else:
        other.kv = dict(zip(["l0", "l1"], reversed(other.kv.values()), strict=True))
    ids = [3, 9, 11, 10]
    assert other.load([ids]).result()
    views = other.layout.block_views(other.registration.layout, other.kv)[0]
    stored = engine.tokens(gather_engine.IDS[0]).view(torch.float32)
    for plane in (0, 1):
        for layer, view in enumerate(views[plane]):
            assert torch.equal(view[ids].flatten(0, 1), stored[plane, layer])
    if change == "another tensor":
        assert torch.equal(first, former["l0"])


def test_other_strides_are_refused_as_if_nothing_were_remembered():
    engine = Engine()
    assert engine.store().result()
    tensor = engine.kv["l0"]
    plane, block, *inner = tensor.stride()
    spread = torch.zeros(2 * tensor.numel())
    tensor.set_(spread.untyped_storage(), 0, tensor.shape, (2 * plane, 2 * block, *inner))
    with pytest.raises(BadLayout, match="strides"):
        engine.store()


def test_a_storage_that_was_cut_is_refused_as_if_nothing_were_remembered():
    engine = Engine()
    assert engine.store().result()
    tensor = engine.kv["l0"]
    address = tensor.data_ptr()
    for size in (1024, 512, 960) * 100:  # until it lies where it lay, which it soon does
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(size)
        if tensor.data_ptr() == address:
            break
    with pytest.raises(RuntimeError, match="out of bounds for storage"):
        engine.store()


def test_tensors_of_every_autograd_mode():
    shape = (2, gather_engine.BLOCKS, gather_engine.BLOCK, gather_engine.HEADS, gather_engine.DIM)
    with torch.inference_mode():
        inference = {f"l{i}": torch.randn(shape) for i in range(gather_engine.LAYERS)}
    leaves = {f"l{i}": torch.randn(shape, requires_grad=True) for i in range(gather_engine.LAYERS)}
    engine = Engine(kv=leaves)
    assert engine.store().result()
    other = Engine(kv=inference, link=engine.link)
    assert other.load().result()
    assert torch.equal(other.tokens(gather_engine.IDS[0]), engine.tokens(gather_engine.IDS[0]))
    with torch.inference_mode():
        assert other.load([[1, 3, 5, 7]]).result()
    with torch.no_grad():
        assert engine.load([[1, 3, 5, 7]]).result()
    assert torch.equal(other.tokens([1, 3, 5, 7]), engine.tokens([1, 3, 5, 7]))


@pytest.mark.parametrize("kind", [list, tuple, range, "tensor"])
def test_block_ids_may_be_any_sequence_of_integers(kind):
    engine = Engine()
    make = torch.tensor if kind == "tensor" else kind
    ids = range(4) if kind is range else make([0, 1, 2, 3])
    assert engine.store([ids]).result()
    assert engine.link.object_bytes(digest(1)) == engine.tokens([2, 3]).numpy().tobytes()
