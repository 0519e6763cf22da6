"""How vLLM's attention backends write keys and values, element by element and as slow as it reads: what the declared
views are compared with. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.lazy import torch

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
