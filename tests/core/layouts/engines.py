"""Engines for layout tests: memory of known content, held in any declared layout, behind the real transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvf_cpu_gather.kernel import CopyKernel
from kvf_dev.testing.transport.engine import GroupCase
from kvf_layouts.declaring import PagedRule
from kvf_layouts.paged import PagedLayout
from tests.core.defaults.arena_link import ArenaLink
from tests.support.engines import ArenaEngine
from tests.support.lazy import torch

NAMES = ("layer", "plane", "block", "token", "head", "dim")


@dataclass(frozen=True)
class Group(GroupCase):
    """A layer group of a test, and how an engine holds its layers."""

    how: str = "own"  # "own" tensors, "offsets" in one storage, or "interleaved" in one tensor

    def content(self, blocks: int, seed: int) -> torch.Tensor:
        """Random bits `[layer, plane, block, slot, head, dim]`."""
        dtype, generator = getattr(torch, self.dtype), torch.Generator().manual_seed(seed)
        shape = (self.layers, self.planes, blocks, self.slots, self.heads, self.dim * dtype.itemsize)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)

    def rule(self, pattern: str) -> PagedRule:
        return PagedRule((pattern,), self.block_size, self.window, self.state, self.axes, self.compress_ratio)


def hold(group: Group, content: torch.Tensor, prefix: str) -> dict[str, object]:
    """Tensors of the declared axes that hold `content`, by name, each starting with `prefix`."""
    if "layer" in group.axes:
        return {prefix: _one(group, content, group.axes)}
    layers = [_one(group, layer, group.axes) for layer in content]
    if group.how != "own":
        layers = _in_one_storage(layers, interleaved=group.how == "interleaved")
    return {f"{prefix}{index}": layer for index, layer in enumerate(layers)}


def _one(group: Group, content: torch.Tensor, axes: Sequence[str]) -> object:
    """One entry of the engine's memory: a tensor, or one for each plane."""
    if "plane" not in axes:
        at = 1 if "layer" in axes else 0
        planes = [_tensor(plane, axes) for plane in content.unbind(at)]
        return planes[0] if len(planes) == 1 else tuple(planes)
    return _tensor(content, axes)


def _tensor(content: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    names = [name for name in NAMES if name in axes or name in ("block", "token", "head")]
    assert content.dim() == len(names), (content.shape, names)
    if "block" not in axes:
        content = content.flatten(names.index("block"), names.index("token"))
        names.remove("block")
    for name in ("token", "head"):
        if name not in axes:
            content = content.squeeze(names.index(name))
            names.remove(name)
    return content.permute([names.index(axis) for axis in axes]).contiguous()


def _in_one_storage(layers: list[object], *, interleaved: bool) -> list[object]:
    if any(isinstance(layer, tuple) for layer in layers):
        parts = [_in_one_storage([layer[plane] for layer in layers], interleaved=interleaved) for plane in (0, 1)]
        return list(zip(*parts, strict=True))
    if interleaved:
        return list(torch.stack(layers, dim=1).unbind(1))
    gap = 8  # elements between layers, as an allocator may leave
    flat = torch.zeros(sum(layer.numel() + gap for layer in layers), dtype=layers[0].dtype)
    found, at = [], 0
    for layer in layers:
        view = flat.as_strided(layer.shape, layer.stride(), at)
        view.copy_(layer)
        found.append(view)
        at += layer.numel() + gap
    return found


class Engine(ArenaEngine):
    def __init__(
        self,
        groups: Sequence[Group],
        contents: Sequence[torch.Tensor],
        chunk_size: int,
        link: ArenaLink | None = None,
        kernel: CopyKernel | None = None,
    ) -> None:
        self.groups = groups
        named = [(f"g{index}.", group, each) for index, (group, each) in enumerate(zip(groups, contents, strict=True))]
        kv = {name: held for prefix, group, each in named for name, held in hold(group, each, prefix).items()}
        layout = PagedLayout(rules=[group.rule(f"{prefix}*") for prefix, group, _ in named])
        super().__init__(kv, layout, block_size=groups[0].block_size, chunk=chunk_size, link=link, kernel=kernel)


def as_bytes(content: torch.Tensor) -> torch.Tensor:
    """`[layer, plane, ...]` content as `Engine.blocks` shows it."""
    return content.transpose(0, 1).contiguous().view(torch.uint8)
