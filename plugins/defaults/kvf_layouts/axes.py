"""Declared axes: their checks, and the block views of a tensor that has them. Pure, engine side.

Only tensor methods are called, so that nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvframework.api.layout import AXES
from kvframework.errors import BadLayout

if TYPE_CHECKING:
    import torch

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
    """Raises `BadLayout` for contradictory axes. A state has blocks and no tokens."""
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
        f"the axes of the tensors are not declared; layer {name} has {listed}",
        where="layout.paged.axes",
        available=_texts(fitting or EXAMPLES),
        hint="give the layout's option `axes` as the attention backend uses them; they are never guessed from sizes",
    )


def check_sizes(name: str, tensor: torch.Tensor, axes: Sequence[str], slots: int) -> None:
    """Raises `BadLayout` naming layer, axis, expected and found size."""
    if tensor.dim() != len(axes):
        raise BadLayout(
            f"shape {tuple(tensor.shape)} has {tensor.dim()} axes",
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


def unbind(tensors: Sequence[torch.Tensor], axes: Sequence[str]) -> list[Sequence[torch.Tensor]]:
    """`[layer][plane]` of one entry of the engine's memory: its layer and plane axes split into views."""
    inner = [axis for axis in axes if axis != "layer"]
    layers = [tensor.unbind(axes.index("layer")) if "layer" in axes else (tensor,) for tensor in tensors]
    if "plane" in axes:
        return [layer.unbind(inner.index("plane")) for layer in layers[0]]
    return [list(planes) for planes in zip(*layers, strict=True)]


def block_view(tensor: torch.Tensor, axes: Sequence[str], slots: int) -> torch.Tensor:
    """A view `[blocks, slots, heads, dim]` of one plane; `axes` names the tensor's axes, without layer and plane.

    Without a block axis the token axis is split, and tokens behind the last whole block are left out.
    """
    names = list(axes)
    if "block" not in names:
        at = names.index("token")
        blocks = tensor.shape[at] // slots
        whole = tensor.narrow(at, 0, blocks * slots)
        tensor = whole.unflatten(at, (blocks, slots))  # type: ignore[no-untyped-call]
        names.insert(at, "block")
    for axis in ("token", "head"):
        if axis not in names:
            tensor = tensor.unsqueeze(-1)
            names.append(axis)
    return tensor.permute([names.index(axis) for axis in ("block", "token", "head", "dim")])


def _fits(axes: Sequence[str], shape: Sequence[int], block_size: int) -> bool:
    sizes = dict(zip(axes, shape, strict=True))
    return sizes.get("plane", 2) == 2 and sizes["token"] == block_size


def _texts(many: Sequence[Sequence[str]]) -> str:
    return "; ".join("[" + ", ".join(f'"{axis}"' for axis in axes) + "]" for axes in many)
