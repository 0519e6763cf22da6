"""The check that tensors of one layer group share no memory: a store of such layers could be undone by its own load.
Pure arithmetic over addresses, sizes and strides; engine side, at registration.

Layers may be views of one tensor, one after the other or interleaved: the check compares single elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvframework.errors import BadLayout

if TYPE_CHECKING:
    import torch

# Enough for any strides that nest; beyond it only the canary can detect sharing.
_BUDGET = 20_000


class Place(NamedTuple):
    """A tensor's memory in bytes: its first element's address, the axes' sizes and strides, one element's size."""

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def span(self) -> int:
        return sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True)) + self.itemsize


def place_of(tensor: torch.Tensor) -> Place:
    itemsize = tensor.element_size()
    return Place(tensor.data_ptr(), tuple(tensor.shape), tuple(s * itemsize for s in tensor.stride()), itemsize)


def check_apart(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises `BadLayout` naming the first two of these tensors that share an element, or one whose elements overlap."""
    places = sorted(
        ((place_of(tensor), name) for name, tensor in tensors.items() if tensor.numel()), key=lambda each: each[0]
    )
    for index, (place, name) in enumerate(places):
        if _repeats(place):
            raise BadLayout(
                f"elements of one tensor share memory, strides {place.strides} bytes",
                where=f"layer {name}",
                hint="pass the tensor that was allocated, no expanded view",
            )
        for other, other_name in places[index + 1 :]:
            if other.address >= place.address + place.span:
                break
            if overlap(place, other):
                raise BadLayout(
                    f"shares memory with layer {name}",
                    where=f"layer {other_name}",
                    available="layers of one group have memory of their own",
                    hint="declare `groups` where layers share memory under block ids of their own; leave out a layer "
                    "that uses the KV of another",
                )


def overlap(one: Place, other: Place) -> bool:
    """True if an element of `one` overlaps an element of `other`."""
    axes = [(stride, 0, size - 1) for size, stride in zip(one.sizes, one.strides, strict=True)]
    axes += [(stride, 1 - size, 0) for size, stride in zip(other.sizes, other.strides, strict=True)]
    return _reachable(axes, other.address - one.address, max(one.itemsize, other.itemsize))


def _repeats(place: Place) -> bool:
    """True if two elements of one tensor overlap: a step along some axes leads back to the same memory."""
    axes = sorted(((stride, 1 - size, size - 1) for size, stride in zip(place.sizes, place.strides, strict=True)))
    for index, (stride, _, high) in enumerate(axes):
        if high >= 1 and _reachable([*axes[:index], (stride, 1, high)], 0, place.itemsize):
            return True
    return False


def _reachable(axes: Sequence[tuple[int, int, int]], target: int, tolerance: int) -> bool:
    """True if integers within each axis' (stride, low, high) sum to within `tolerance` of `target`, exclusive."""
    merged: dict[int, tuple[int, int]] = {}
    for stride, low, high in axes:
        before = merged.get(stride, (0, 0))
        merged[stride] = (before[0] + low, before[1] + high)
    steps = sorted(((stride, *span) for stride, span in merged.items() if stride), reverse=True)
    budget = _BUDGET

    def search(index: int, rest: int) -> bool:
        nonlocal budget
        budget -= 1
        if index == len(steps):
            return abs(rest) < tolerance
        if budget < 0:
            return False
        stride, low, high = steps[index]
        least = sum(s * lo for s, lo, _ in steps[index + 1 :]) - tolerance + 1
        most = sum(s * hi for s, _, hi in steps[index + 1 :]) + tolerance - 1
        first, last = max(low, -((most - rest) // stride)), min(high, (rest - least) // stride)
        return any(search(index + 1, rest - count * stride) for count in range(first, last + 1))

    return search(0, target)
