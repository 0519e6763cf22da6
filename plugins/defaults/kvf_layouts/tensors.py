"""What a layout needs to know of tensors: their declared axes, and that they share no memory. Pure, engine side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvframework.api.layout import AXES, TensorLike
from kvframework.errors import BadLayout

# Declared axes: their checks, and the block views of a tensor that has them. Pure, engine side.

EXAMPLES = (
    ("plane", "block", "token", "head", "dim"),
    ("block", "plane", "token", "head", "dim"),
    ("plane", "block", "head", "token", "dim"),
    ("block", "plane", "head", "token", "dim"),
    ("block", "layer", "plane", "token", "head", "dim"),
    ("layer", "plane", "block", "token", "head", "dim"),
    ("block", "token", "head", "dim"),
    ("block", "head", "token", "dim"),
    ("block", "token", "dim"),
)


def check_axes(axes: Sequence[str], *, state: bool = False) -> None:
    """Raise `BadLayout` for contradictory axes. A state has blocks and no tokens."""
    unknown = [axis for axis in axes if axis not in AXES]
    needed = ("block", "dim") if state else ("token", "dim")
    missing = [axis for axis in needed if axis not in axes]
    if unknown or missing or len(set(axes)) != len(axes) or (state and "token" in axes):
        raise BadLayout(
            f"axes are {list(axes)}",
            where="layout.paged.axes",
            available=_texts(EXAMPLES),
            hint=f"each of {', '.join(AXES)} at most once; {' and '.join(needed)} always"
            + (", no token: this is a state" if state else ""),
        )


def undeclared(name: str, shapes: Sequence[Sequence[int]], block_size: int) -> BadLayout:
    """The error for tensors without a declaration, with the axes that would fit. Several declarations may fit one
    shape, so none is chosen."""
    shape = shapes[0]
    fitting = [axes for axes in EXAMPLES if len(axes) == len(shape) and _fits(axes, shape, block_size)]
    listed = " and ".join(str(tuple(shape)) for shape in shapes)
    return BadLayout(
        f"the axes of the tensors are not set; layer {name} has {listed}",
        where="layout.paged.axes",
        available=_texts(fitting or EXAMPLES),
        hint="set the layout's option `axes` in the attention backend's order; axes are never guessed from sizes",
    )


def check_sizes(name: str, tensor: TensorLike, axes: Sequence[str], slots: int) -> None:
    """Raise `BadLayout` naming layer, axis, expected and found size."""
    if len(tensor.shape) != len(axes):
        raise BadLayout(
            f"shape {tuple(tensor.shape)} has {len(tensor.shape)} axes",
            where=f"layer {name}",
            available=f"{len(axes)}: {', '.join(axes)}",
        )
    expected = {"plane": (2, "2 (keys and values)")}
    if "block" in axes:
        expected["token"] = (slots, f"{slots} (the slots of a block)")
    for axis, (size, text) in expected.items():
        if axis in axes and tensor.shape[axes.index(axis)] != size:
            raise BadLayout(
                f"axis {axis!r} (number {axes.index(axis)} of shape {tuple(tensor.shape)}) "
                f"is {tensor.shape[axes.index(axis)]}",
                where=f"layer {name}",
                available=text,
                hint=f"the declared axes are {', '.join(axes)}",
            )


def unbind(tensors: Sequence[TensorLike], axes: Sequence[str]) -> list[Sequence[TensorLike]]:
    """`[layer][plane]` of one entry of the engine's memory: its layer and plane axes split into views."""
    inner = [axis for axis in axes if axis != "layer"]
    layers = [_split(tensor, axes.index("layer")) if "layer" in axes else [tensor] for tensor in tensors]
    if "plane" in axes:
        return [_split(layer, inner.index("plane")) for layer in layers[0]]
    return [list(planes) for planes in zip(*layers, strict=True)]


def _split(tensor: TensorLike, axis: int) -> list[TensorLike]:
    return [tensor.select(axis, at) for at in range(tensor.shape[axis])]


def block_view(tensor: TensorLike, axes: Sequence[str], slots: int) -> TensorLike:
    """A view `[blocks, slots, heads, dim]` of one plane; `axes` names the tensor's axes, without layer and plane.

    Without a block axis the token axis is split, and tokens behind the last whole block are left out.
    """
    sizes, strides = (dict(zip(axes, each, strict=True)) for each in (tensor.shape, tensor.stride()))
    if "block" not in sizes:
        sizes |= {"block": sizes["token"] // slots, "token": slots}
        strides["block"] = slots * strides["token"]
    order = ("block", "token", "head", "dim")
    return tensor.as_strided([sizes.get(axis, 1) for axis in order], [strides.get(axis, 1) for axis in order])


def _fits(axes: Sequence[str], shape: Sequence[int], block_size: int) -> bool:
    sizes = dict(zip(axes, shape, strict=True))
    return sizes.get("plane", 2) == 2 and sizes["token"] == block_size


def _texts(many: Sequence[Sequence[str]]) -> str:
    return "; ".join("[" + ", ".join(f'"{axis}"' for axis in axes) + "]" for axes in many)


# The check that tensors of one layer group share no memory: a store of such layers could be undone by its own load.
# Pure arithmetic over addresses, sizes and strides; engine side, at registration.
#
# Layers may be views of one tensor, one after the other or interleaved: the check compares single elements.

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


def place_of(tensor: TensorLike) -> Place:
    itemsize = tensor.element_size()
    return Place(tensor.data_ptr(), tuple(tensor.shape), tuple(s * itemsize for s in tensor.stride()), itemsize)


def check_apart(tensors: Mapping[str, TensorLike]) -> None:
    """Raise `BadLayout` naming the first two of these tensors that share an element, or one whose elements overlap."""
    held = [(place_of(tensor), name) for name, tensor in tensors.items() if 0 not in tensor.shape]
    places = sorted(held, key=lambda each: each[0])
    for index, (place, name) in enumerate(places):
        if _repeats(place):
            raise BadLayout(
                f"elements of the tensor share memory, strides {place.strides} bytes",
                where=f"layer {name}",
                hint="pass the allocated tensor, not an expanded view",
            )
        for other, other_name in places[index + 1 :]:
            if other.address >= place.address + place.span:
                break
            if overlap(place, other):
                raise BadLayout(
                    f"the layer shares memory with layer {name}",
                    where=f"layer {other_name}",
                    available="the layers of one group have separate memory",
                    hint="declare `groups` if layers share memory under separate block ids; leave out a layer "
                    "that uses another layer's KV",
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
