"""What the layout kit is tried on: engines of known axes, and their own views of their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvf_dev.testing.layout import LayoutSubject, MakeSubject, Slab
from kvframework.api.layout import EngineView, KVLayout

BLOCK = 4
AXES = {
    "nhd": ("plane", "block", "token", "head", "dim"),
    "hnd": ("block", "plane", "head", "token", "dim"),
    "pairs": ("block", "head", "token", "dim"),
    "flat": ("token", "head", "dim"),
    "one_tensor": ("block", "layer", "plane", "token", "head", "dim"),
}


def tensor(
    memory: Slab, axes: Sequence[str], layers: int, blocks: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    tokens = BLOCK if "block" in axes else BLOCK * blocks
    sizes = {"layer": layers, "plane": 2, "block": blocks, "token": tokens, "head": 2, "dim": 3}
    return memory(*(sizes[axis] for axis in axes), dtype=dtype)


def paged(axes: Sequence[str], dtype: torch.dtype = torch.float32) -> MakeSubject:
    """An engine whose layers all have these axes."""

    def make(memory: Slab, layers: int, blocks: int) -> LayoutSubject:
        def one() -> torch.Tensor:
            return tensor(memory, axes, layers, blocks, dtype)

        caches: dict[str, object] = {"all": one()} if "layer" in axes else {}
        for at in range(0 if "layer" in axes else layers):
            caches[f"layers.{at}"] = one() if "plane" in axes else (one(), one())
        view = AxesView(caches, [axes], [BLOCK], [()])
        return LayoutSubject(caches, BLOCK, view, {"axes": [*axes]})  # type: ignore[arg-type]

    return make


class AxesView(EngineView):
    """Reads and writes by named axes; `groups` says, per layer group, which (cache, tensor, layer index) a layer is."""

    def __init__(
        self,
        caches: Mapping[str, object],
        axes: Sequence[Sequence[str]],
        slots: Sequence[int],
        groups: Sequence[object],
    ) -> None:
        self._caches, self._axes, self._slots, self._names = caches, axes, slots, groups
        self.spare_blocks = [0] * len(axes)

    def declared(self, layout: KVLayout) -> None:
        self._names = [group.layer_names for group in layout.groups]

    def read(self, group: int, layer: int, plane: int, block: int) -> torch.Tensor:
        return self._place(group, layer, plane, block).clone()

    def write(self, group: int, layer: int, plane: int, block: int, values: torch.Tensor) -> None:
        self._place(group, layer, plane, block).copy_(values)

    def _place(self, group: int, layer: int, plane: int, block: int) -> torch.Tensor:
        names, axes = list(self._axes[group]), self._axes[group]
        name = self._names[group][layer]
        if "layer" in axes:
            name, _, number = name.rpartition(".")
        held = self._caches[name]
        tensor = held[plane] if isinstance(held, tuple) else held
        if "layer" in axes:
            tensor = tensor.select(names.index("layer"), int(number))
            names.remove("layer")
        if "plane" in axes:
            tensor = tensor.select(names.index("plane"), plane)
            names.remove("plane")
        if "block" in axes:
            tensor = tensor.select(names.index("block"), block)
            names.remove("block")
        else:
            at = names.index("token")
            tensor = tensor.narrow(at, block * self._slots[group], self._slots[group])
        for axis in ("token", "head"):
            if axis not in names:
                tensor = tensor.unsqueeze(0)
                names.insert(0, axis)
        return tensor.permute([names.index(axis) for axis in ("token", "head", "dim")])
