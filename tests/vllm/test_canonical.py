"""vLLM's layouts as canonical objects: which are refused, and that keys and values come out as they went in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvf_cpu_gather.kernel import load_kernel
from kvf_layouts.declaring import PagedRule
from kvf_layouts.paged import PagedLayout
from kvf_vllm.canonical import AXES, CanonicalBlocks, LayerForm
from kvf_vllm.layouts import GroupFacts
from kvframework.errors import BadLayout
from tests.support.engines import ArenaEngine
from tests.support.lazy import torch

pytestmark = pytest.mark.torch

# Attention backend, instruction set, cache layout.
LAYOUTS = {
    "cpu vec": ("CPU_ATTN", "vec", "LBHNC"),
    "cpu vec16": ("CPU_ATTN", "vec16", "LBHNC"),
    "flash HND": ("FLASH_ATTN", "", "LBHNC"),
    "flash NHD": ("FLASH_ATTN", "", "LBNHC"),
    "triton, blocks before layers": ("TRITON_ATTN", "", "BLHNC"),
    "flashinfer, blocks before layers, NHD": ("FLASHINFER", "", "BLNHC"),
    "flashinfer, layers inside": ("FLASHINFER", "", "BHLNC"),
    "flex": ("FLEX_ATTENTION", "", "LBNHC"),
    "heads before blocks": ("TRITON_ATTN", "", "LHBNC"),
}
_AXES = "LBHNC"


def engine_tensors(
    name: str, blocks: int, layers: int, heads: int, tokens: int, dim: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """One zeroed tensor `[blocks, heads, tokens, 2 * dim]` per layer, in the order of memory that the layout names."""
    sizes = dict(zip(_AXES, (layers, blocks, heads, tokens, 2 * dim), strict=True))
    order = LAYOUTS[name][2]
    memory = torch.zeros([sizes[axis] for axis in order], dtype=dtype)
    return list(memory.permute([order.index(axis) for axis in _AXES]))


def written_by_token(name: str, memory: Sequence[torch.Tensor], blocks: Sequence[int], content: torch.Tensor) -> None:
    """Writes `content`, `[2, layers, tokens, heads, dim]`, token by token into these blocks of each layer."""
    write = _cpu if LAYOUTS[name][0] == "CPU_ATTN" else _side_by_side
    for layer, tensor in enumerate(memory):
        size = tensor.shape[2]
        for token in range(len(blocks) * size):
            write(tensor[blocks[token // size]], token % size, content[0, layer, token], content[1, layer, token])


def _side_by_side(block: torch.Tensor, token: int, key: torch.Tensor, value: torch.Tensor) -> None:
    block[:, token] = torch.cat([key, value], dim=-1)


def _cpu(block: torch.Tensor, token: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Of each head the first half of its memory holds keys as [dim, tokens], the second values as [tokens, dim]."""
    heads, tokens, both = block.shape
    dim = both // 2
    for head in range(heads):
        memory = block[head].view(-1)
        memory[token : tokens * dim : tokens] = key[head]
        memory[tokens * dim + token * dim :][:dim] = value[head]


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    global prove_planes
    from kvf_vllm.canonical import prove_planes


KERNELS = [None, load_kernel(2)]


def form(**changes: Any) -> LayerForm:
    given: dict[str, Any] = {
        "backend": "CPU_ATTN",
        "isa": "vec",
        "cache_layout": "LBHNC",
        "spec": "FullAttentionSpec",
        "dtype": "float32",
        "model_dtype": "float32",
        "kv_dtype": "auto",
        "heads": 2,
        "head_size": 8,
        "head_size_v": 8,
        "block_size": 4,
    }
    return LayerForm(**{**given, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"isa": "amx", "dtype": "bfloat16", "model_dtype": "bfloat16"},
        {"isa": "neon"},
        {"isa": ""},
        {"isa": "vec_of_tomorrow"},
        {"cache_layout": "LBNHC"},
        {"backend": "FLASH_ATTN", "isa": "", "cache_layout": "NHBLC"},
        {"backend": "TURBOQUANT", "isa": ""},
        {"backend": "FLASHMLA", "isa": "", "spec": "MLAAttentionSpec"},
        {"backend": "FLASH_ATTN", "isa": "", "spec": "MLAAttentionSpec"},
        {"backend": "FLASH_ATTN", "isa": "", "packed": True},
        {"backend": "FLASH_ATTN", "isa": "", "head_size_v": 4},
        {"backend": "FLASH_ATTN", "isa": "", "kv_dtype": "fp8"},
        {"backend": "FLASH_ATTN", "isa": "", "dtype": "uint8", "kv_dtype": "fp8_e4m3"},
        {"backend": "FLASH_ATTN", "isa": "", "kv_dtype": "bfloat16"},
        {"backend": "FLASH_ATTN", "isa": "", "dtype": "bfloat16", "kv_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_what_does_not_convert_exactly_is_refused_at_start(changes: dict[str, Any]) -> None:
    with pytest.raises(BadLayout, match=r'kvframework\.layout is "canonical", but') as refused:
        CanonicalBlocks({"l.0": form(**changes)})
    assert "l.0" in refused.value.where
    assert "CPU_ATTN/vec; " in refused.value.available
    assert "opaque" in refused.value.hint


@pytest.mark.parametrize(
    "names", [("l.1", "l.0"), ("l.0", "l.0.x.1"), ("first", "second"), ("l0", "l1"), ("l.0", "m.0")]
)
def test_layers_whose_order_is_in_doubt_are_refused(names: tuple[str, ...]) -> None:
    blocks = CanonicalBlocks(dict.fromkeys(names, form()))
    tensors = {name: torch.zeros(3, 2, 4, 16) for name in names}
    with pytest.raises(BadLayout, match="order of the layers"):
        blocks.planes([GroupFacts(names, 4)], tensors, 3)


@pytest.mark.parametrize("shape", [(3, 2, 4, 8), (3, 4, 2, 16), (6, 2, 2, 16), (3, 4, 16)])
def test_a_tensor_that_is_not_as_its_description_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadLayout, match="shape"):
        CanonicalBlocks({"l.0": form()}).planes([GroupFacts(("l.0",), 4)], {"l.0": torch.zeros(shape)}, 3)


class Engine(ArenaEngine):
    """Tensors as vLLM holds them."""

    def __init__(self, memory: dict[str, torch.Tensor], described: LayerForm, chunk: int, kernel: Any) -> None:
        groups = [GroupFacts(tuple(memory), described.block_size)]
        num_blocks = next(iter(memory.values())).shape[0]
        tensors = CanonicalBlocks(dict.fromkeys(memory, described)).tensors(groups, memory, num_blocks)
        layout = PagedLayout(AXES, [PagedRule(tuple(memory), described.block_size)])
        super().__init__(tensors, layout, block_size=described.block_size, chunk=chunk, kernel=kernel)

    def objects(self, chunks: int) -> torch.Tensor:
        """What is stored, `[planes, layers, tokens, hidden]` of integers."""
        stored = [self.link.object_bytes(bytes([index]) * 32) for index in range(1, chunks + 1)]
        planes, layers, slots, _ = self.desc.groups[0].shape
        return torch.cat(
            [torch.frombuffer(bytearray(each), dtype=torch.uint8).view(planes, layers, slots, -1) for each in stored], 2
        )


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 3, 16]),
    tokens=st.sampled_from([1, 2, 16]),
    per_chunk=st.integers(1, 2),
    seed=st.integers(0, 1 << 16),
    data=st.data(),
)
def test_keys_and_values_become_canonical_bytes_and_come_back(
    name: str, dtype: str, layers: int, heads: int, dim: int, tokens: int, per_chunk: int, seed: int, data: Any
) -> None:
    """Two chunks are written by the documented order of each layout, stored, and loaded into other blocks."""
    generator = torch.Generator().manual_seed(seed)
    count = 2 * per_chunk
    # [plane, layer, token, head, dim] of random bits.
    size = getattr(torch, dtype).itemsize
    bits = torch.randint(0, 256, (2, layers, count * tokens, heads, dim * size), dtype=torch.uint8, generator=generator)
    content = bits.view(getattr(torch, dtype))
    backend, isa, cache_layout = LAYOUTS[name]
    described = form(
        backend=backend,
        isa=isa,
        cache_layout=cache_layout,
        dtype=dtype,
        model_dtype=dtype,
        heads=heads,
        head_size=dim,
        head_size_v=dim,
        block_size=tokens,
    )
    blocks = 2 * count + 1
    ids = data.draw(st.permutations(range(blocks)))
    stored, loaded = ids[:count], ids[count : 2 * count]
    skip = data.draw(st.integers(0, count)) * tokens
    for kernel in KERNELS:
        memory = engine_tensors(name, blocks, layers, heads, tokens, dim, getattr(torch, dtype))
        written_by_token(name, memory, stored, content)
        engine = Engine(
            {f"l.{index}": tensor for index, tensor in enumerate(memory)}, described, per_chunk * tokens, kernel
        )
        assert engine.store([stored], 2).result(30)
        expected = content.contiguous().view(torch.uint8).reshape(2, layers, count * tokens, -1)
        assert torch.equal(engine.objects(2), expected)
        before = [tensor.clone() for tensor in memory]
        assert engine.load([loaded], 2, skip).result(30)
        # The same order again says what must lie where; nothing else may have changed.
        written_by_token(name, before, loaded[skip // tokens :], content[:, :, skip:])
        for tensor, wanted in zip(memory, before, strict=True):
            assert torch.equal(tensor.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


class Layer:
    """A layer whose write puts keys and values by the order of one of the layouts."""

    def __init__(self, name: str) -> None:
        self.impl = self
        self.name = name

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        assert layer is self
        assert slot_mapping.tolist() == list(range(kv_cache.shape[2]))
        written_by_token(self.name, [kv_cache], [0], torch.stack([key, value]).unsqueeze(1))


def proven(declared: str, true: str) -> None:
    """Raises `BadLayout` unless the order of `declared` is how `true` writes. The block is given back as it was."""
    (tensor,) = engine_tensors(declared, 3, 1, 2, 4, 8, torch.float32)
    tensor.copy_(torch.randn(tensor.shape))
    before = tensor.clone()
    backend, isa, cache_layout = LAYOUTS[declared]
    blocks = CanonicalBlocks({"l.0": form(backend=backend, isa=isa, cache_layout=cache_layout)})
    planes = blocks.planes([GroupFacts(("l.0",), 4)], {"l.0": tensor}, 3)
    try:
        prove_planes({"l.0": Layer(true)}, {"l.0": tensor}, planes)
    finally:
        assert torch.equal(tensor, before)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_declaration_is_proven_by_the_engines_own_write(name: str) -> None:
    proven(name, name)


@pytest.mark.parametrize(("declared", "true"), [("cpu vec", "flash HND"), ("flash HND", "cpu vec")])
def test_an_engine_that_writes_otherwise_is_refused(declared: str, true: str) -> None:
    with pytest.raises(BadLayout, match="to other places"):
        proven(declared, true)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("isa", "tokens", "dim", "dtype"),
    [
        ("vec", 32, 32, "float32"),
        ("vec", 128, 64, "float32"),
        ("vec", 64, 256, "float32"),
        ("vec", 32, 64, "bfloat16"),
        ("vec", 32, 96, "float16"),
        ("vec16", 16, 80, "float32"),
        ("vec16", 128, 112, "float32"),
        ("vec16", 16, 64, "bfloat16"),
    ],
)
def test_the_cpus_order_is_the_documented_one(isa: str, tokens: int, dim: int, dtype: str) -> None:
    from vllm import _custom_ops as ops

    blocks, heads = 3, 2
    ids = [2, 0]
    content = torch.randn(2, 1, len(ids) * tokens, heads, dim).to(getattr(torch, dtype))
    expected = engine_tensors(f"cpu {isa}", blocks, 1, heads, tokens, dim, getattr(torch, dtype))
    written_by_token(f"cpu {isa}", expected, ids, content)

    (memory,) = engine_tensors(f"cpu {isa}", blocks, 1, heads, tokens, dim, getattr(torch, dtype))
    keys, values = memory.view(blocks, heads, 2 * tokens, dim).chunk(2, dim=2)
    slots = torch.cat([torch.arange(tokens) + block * tokens for block in ids])
    ops.cpu_attn_reshape_and_cache(content[0, 0], content[1, 0], keys, values, slots, isa)
    assert torch.equal(memory, expected[0])
