"""The order of elements that `tests.vllm.packing` writes is that of vLLM's own code."""

from __future__ import annotations

import pytest

from tests.support.lazy import torch
from tests.vllm.packing import engine_tensors, written_by_token

pytestmark = [pytest.mark.vllm, pytest.mark.torch]


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
