"""The layout `opaque`: raw bytes of whole blocks, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvf_layouts.declaring import OpaqueRule
from kvf_layouts.opaque import OpaqueLayout
from kvf_layouts.paged import PagedLayout
from kvframework.api.keys import compute_namespace
from kvframework.errors import BadLayout, BadRange
from tests.support.engines import ArenaEngine
from tests.support.lazy import torch

pytestmark = pytest.mark.torch


BLOCK, BLOCKS, CHUNK = 4, 10, 8


def engine_of(kv, layout, link=None):
    return ArenaEngine(kv, layout, block_size=BLOCK, chunk=CHUNK, link=link)


def cpu_packed(seed: int, dtype: str = "bfloat16") -> dict[str, torch.Tensor]:
    """vLLM on CPUs: `[blocks, heads, tokens, 2 * dim]` views of one storage, packed inside by instruction set."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(
        0, 256, (2, BLOCKS, 2, BLOCK, 6 * getattr(torch, dtype).itemsize), dtype=torch.uint8, generator=generator
    )
    return {f"l{index}": layer for index, layer in enumerate(bits.view(getattr(torch, dtype)))}


def raw(tensor: torch.Tensor, block: int) -> bytes:
    return tensor[block].contiguous().view(torch.uint8).numpy().tobytes()


@settings(max_examples=40)
@given(
    source=st.permutations(range(BLOCKS)),
    target=st.permutations(range(BLOCKS)),
    skip=st.integers(0, 4),
    dtype=st.sampled_from(["bfloat16", "float8_e4m3fn", "uint8", "float32"]),
)
def test_an_object_is_each_layers_raw_blocks_and_comes_back(source, target, skip, dtype):
    layout = OpaqueLayout("amx", 0)
    engine = engine_of(cpu_packed(1, dtype), layout)
    assert engine.store([source[:4]], 2).result()
    for chunk, digest in enumerate((b"\1" * 32, b"\2" * 32)):
        blocks = source[chunk * 2 : chunk * 2 + 2]
        assert engine.link.object_bytes(digest) == b"".join(raw(kv, b) for kv in engine.kv.values() for b in blocks)
    other = engine_of(cpu_packed(2, dtype), layout, link=engine.link)
    before = {name: kv.clone() for name, kv in other.kv.items()}
    assert other.load([target[:4]], 2, skip * BLOCK).result()
    for name, kv in other.kv.items():
        loaded = dict(zip(target[skip:4], source[skip:4], strict=True))
        for block in range(BLOCKS):
            expected = engine.kv[name][loaded[block]] if block in loaded else before[name][block]
            assert torch.equal(kv[block].view(torch.uint8), expected.view(torch.uint8))


def test_only_whole_blocks_are_skipped():
    engine = engine_of(cpu_packed(1), OpaqueLayout("amx", 0))
    engine.store([[0, 1, 2, 3]], 2)
    calls = list(engine.link.calls)
    with pytest.raises(BadRange, match="opaque blocks") as caught:
        engine.load([[0, 1, 2, 3]], 2, 6)
    assert "4" in caught.value.available
    assert engine.link.calls == calls, "refused before anything is pinned"


def test_the_packing_is_in_the_form_and_the_namespace():
    def namespace(desc):
        return compute_namespace(model="m", desc=desc, hasher_fingerprint="h", world_size=1)

    kv = cpu_packed(1)
    amx, vec = (engine_of(kv, OpaqueLayout(packing, 0)).desc for packing in ("amx", "vec"))
    assert amx.groups[0].form == "opaque:amx"
    assert amx.groups[0].shape == (1, 2, 2, 2 * BLOCK * 6 * 2)
    canonical = PagedLayout(("block", "head", "token", "dim"))
    descs = [amx, vec, canonical.object_desc(canonical.describe(kv, block_size=BLOCK), CHUNK)]
    assert len({namespace(desc) for desc in descs}) == 3


def test_what_is_not_declared_is_refused():
    kv = cpu_packed(1)
    with pytest.raises(BadLayout, match="packing of the blocks is not declared"):
        OpaqueLayout(block_axis=0).describe(kv, block_size=BLOCK)
    with pytest.raises(BadLayout, match=r"block axis .* is not declared"):
        OpaqueLayout("amx").describe(kv, block_size=BLOCK)
    with pytest.raises(BadLayout, match="is 4"):
        OpaqueLayout("amx", 4).describe(kv, block_size=BLOCK)
    with pytest.raises(BadLayout, match="no layers"):
        OpaqueLayout("amx", 0).describe({}, block_size=BLOCK)
    with pytest.raises(BadLayout, match="the bytes of a block are not contiguous: shape") as caught:
        OpaqueLayout("amx", 1).describe({"a": torch.zeros(2, BLOCKS, 8)}, block_size=BLOCK)
    assert "pair" in caught.value.hint
    with pytest.raises(BadLayout, match="shares memory"):
        OpaqueLayout("amx", 0).describe({"a": kv["l0"], "b": kv["l0"]}, block_size=BLOCK)


def test_planes_that_lie_apart_go_as_a_pair_and_order_in_memory_counts():
    memory = torch.arange(2 * BLOCKS * 8, dtype=torch.int16).view(2, BLOCKS, 2, 4)
    engine = engine_of({"a": tuple(memory.unbind(0))}, OpaqueLayout("x", 0))
    engine.store([[3, 1, 0, 2]], 2)
    assert engine.desc.groups[0].shape == (2, 1, 2, 16)
    expected = b"".join(memory[plane, block].numpy().tobytes() for plane in (0, 1) for block in (3, 1))
    assert engine.link.object_bytes(b"\1" * 32) == expected
    turned = engine_of({"a": tuple(memory.transpose(2, 3).unbind(0))}, OpaqueLayout("x", 0))
    turned.store([[3, 1, 0, 2]], 2)
    assert turned.link.object_bytes(b"\1" * 32) == expected, "raw bytes as they lie, not as they are indexed"


def test_groups_of_opaque_blocks_with_windows_and_states():
    kv = {"a": torch.zeros(BLOCKS, 5), "s": torch.zeros(7, BLOCKS, 3).transpose(0, 1).contiguous()}
    layout = OpaqueLayout("x", 0, [OpaqueRule(("s",), state=True), OpaqueRule(("a",), window=6)])
    engine = engine_of(kv, layout)
    state, window = engine.declared.groups
    assert (state.state, window.window) == (True, 6)
    assert [group.shape for group in engine.desc.groups] == [(1, 1, 1, 84), (1, 1, 2, 20)]
    for number, tensor in enumerate(kv.values()):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + number)
    assert engine.store([[0, 1, 2, 3], [9, 8, 7, 6]], 2).result().stored == 4
    kept = {name: tensor.clone() for name, tensor in kv.items()}
    for tensor in kv.values():
        tensor.zero_()
    assert engine.load([[999, 999, 999, 5], [999, 999, 0, 1]], 2, 4).result()
    assert torch.equal(kv["s"][5], kept["s"][3])
    assert torch.equal(kv["a"][0], kept["a"][7])
    assert torch.equal(kv["a"][1], kept["a"][6])
    assert not kv["a"][2:].any()


def test_the_engine_may_decide_the_chunks():
    kv = {"a": torch.zeros(BLOCKS, 5), "s": torch.zeros(BLOCKS, 3)}
    rules = [OpaqueRule(("s",), state=True, block_size=2 * BLOCK), OpaqueRule(("a",))]
    declared = OpaqueLayout("x", 0, rules, chunk_tokens=4 * BLOCK).describe(kv, block_size=BLOCK)
    for chunk_size in (1, 256):
        desc = OpaqueLayout().object_desc(declared, chunk_size)
        assert desc.chunk_tokens == 4 * BLOCK
        assert [group.shape for group in desc.groups] == [(1, 1, 1, 12), (1, 1, 4, 20)]


@pytest.mark.parametrize(("chunk_tokens", "said"), [(3 * BLOCK, "multiple of block_size 8"), (1 << 25, "33554432")])
def test_chunks_that_are_not_whole_blocks_are_refused(chunk_tokens, said):
    kv = {"a": torch.zeros(BLOCKS, 5), "s": torch.zeros(BLOCKS, 3)}
    rules = [OpaqueRule(("s",), state=True, block_size=2 * BLOCK), OpaqueRule(("a",))]
    with pytest.raises(BadLayout, match=said):
        OpaqueLayout("x", 0, rules, chunk_tokens=chunk_tokens).describe(kv, block_size=BLOCK)
