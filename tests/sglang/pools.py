"""Host pools shaped as SGLang's own, for tests without SGLang: classes of the same names with the attributes that
`kvf_sglang.pools` reads. A page's content follows from its key."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

from tests.support.lazy import torch

PAGE, PAGES, LAYERS, HEADS, DIM = 8, 12, 3, 2, 4


class HostPool:
    page_size = PAGE
    dcp_size = 1

    def indices(self, pages: list[int]) -> list[int]:
        return [page * self.page_size + slot for page in pages for slot in range(self.page_size)]


class MHATokenToKVPoolHost(HostPool):
    head_dim = v_head_dim = DIM

    def __init__(self, layout: str = "layer_first", *, dtype: str = "float32", heads: int = HEADS) -> None:
        shapes = {
            "layer_first": (2, LAYERS, PAGES * PAGE, heads, DIM),
            "page_first": (2, PAGES * PAGE, LAYERS, heads, DIM),
            "page_first_direct": (2, PAGES, LAYERS, PAGE, heads, DIM),
            "page_head": (2, PAGES, heads, PAGE, LAYERS, DIM),
        }
        self.layout = layout
        self.kv_buffer = torch.zeros(shapes.get(layout, (2, 1)), dtype=getattr(torch, dtype))

    def page(self, page: int) -> Any:
        """A view of one page as `[planes, layers, tokens, heads, dim]`."""
        buffer, tokens = self.kv_buffer, slice(page * PAGE, (page + 1) * PAGE)
        return {
            "layer_first": lambda: buffer[:, :, tokens],
            "page_first": lambda: buffer[:, tokens].transpose(1, 2),
            "page_first_direct": lambda: buffer[:, page],
            "page_head": lambda: buffer[:, page].permute(0, 3, 2, 1, 4),
        }[self.layout]()


class MLATokenToKVPoolHost(HostPool):
    def __init__(self, layout: str = "layer_first") -> None:
        shapes = {
            "layer_first": (LAYERS, PAGES * PAGE, 1, DIM),
            "page_first": (PAGES * PAGE, LAYERS, 1, DIM),
            "page_first_direct": (PAGES, LAYERS, PAGE, 1, DIM),
        }
        self.layout = layout
        self.kv_buffer = torch.zeros(shapes[layout])

    def page(self, page: int) -> Any:
        """A view of one page as `[layers, tokens, heads, dim]`."""
        buffer, tokens = self.kv_buffer, slice(page * PAGE, (page + 1) * PAGE)
        return {
            "layer_first": lambda: buffer[:, tokens],
            "page_first": lambda: buffer[tokens].transpose(0, 1),
            "page_first_direct": lambda: buffer[page],
        }[self.layout]()


class MambaPoolHost(HostPool):
    page_size = 1

    def __init__(self, layout: str = "page_first", *, width: int = 5, beside: bool = True) -> None:
        self.layout = layout
        self.temporal_buffer = torch.zeros(PAGES, LAYERS, 1, 2, width)
        self.conv_buffer = [torch.zeros(PAGES, LAYERS, 1, 6, dtype=torch.bfloat16)]
        self.slot_state_buffers = [torch.zeros(PAGES, 7, dtype=torch.int8)] if beside else []

    def parts(self, slot: int) -> list[Any]:
        return [
            self.temporal_buffer[slot],
            self.conv_buffer[0][slot],
            *(each[slot] for each in self.slot_state_buffers),
        ]


class MHATokenToKVPool(HostPool):
    """A device pool: a tensor each for keys and values of a layer. The first page is never handed out."""

    kv_cache_layout = "nhd"

    def __init__(self) -> None:
        self.k_buffer, self.v_buffer = (
            [torch.zeros((PAGES + 1) * PAGE, HEADS, DIM) for _ in range(LAYERS)] for _ in "kv"
        )

    def page(self, page: int) -> Any:
        """A copy of one page as `[planes, layers, tokens, heads, dim]`."""
        tokens = slice(page * PAGE, (page + 1) * PAGE)
        return torch.stack(
            [torch.stack([layer[tokens] for layer in plane]) for plane in (self.k_buffer, self.v_buffer)]
        )

    def fill(self, page: int, key: str) -> None:
        planes = content(self.page(page), key)
        for plane, buffers in zip(planes, (self.k_buffer, self.v_buffer), strict=True):
            for layer, buffer in zip(plane, buffers, strict=True):
                buffer[page * PAGE : (page + 1) * PAGE] = layer


class MLATokenToKVPool(HostPool):
    def __init__(self) -> None:
        self.kv_buffer = [torch.zeros((PAGES + 1) * PAGE, 1, DIM) for _ in range(LAYERS)]


class MambaPool:
    """A device pool of states: layers first."""

    def __init__(self, *, width: int = 5) -> None:
        self.mamba_cache = SimpleNamespace(
            temporal=torch.zeros(LAYERS, PAGES, 2, width),
            conv=[torch.zeros(LAYERS, PAGES, 6, dtype=torch.bfloat16)],
            replayssm_d=None,
        )

    def parts(self, slot: int) -> list[Any]:
        """Views of one state, shaped as those of the host pool."""
        return [self.mamba_cache.temporal[:, slot][:, None], self.mamba_cache.conv[0][:, slot][:, None]]


def turned(*, slots_first: bool) -> Any:
    """States of 3 by 2 whose numbers lie column by column, as SGLang keeps convolutions on CPUs with AMX."""
    first = (PAGES, LAYERS) if slots_first else (LAYERS, PAGES)
    return torch.zeros(*first, 2, 3, dtype=torch.bfloat16).transpose(-1, -2)


class Policy:
    def __init__(self, value: str) -> None:
        self.value = value


class Transfer:
    """SGLang's `PoolTransfer`, as far as it is read."""

    def __init__(self, name: str, policy: str, keys: list[str] | None = None) -> None:
        self.name, self.hit_policy, self.keys = name, Policy(policy), keys


def keys(count: int, *, seed: str = "") -> list[str]:
    found, parent = [], seed.encode()
    for index in range(count):
        parent = hashlib.sha256(parent + bytes([index])).digest()
        found.append(parent.hex())
    return found


def content(like: Any, key: str, part: int = 0) -> Any:
    generator = torch.Generator().manual_seed(int(key[:12], 16) + part)
    return torch.randint(-100, 100, like.shape, generator=generator).to(like.dtype)
