"""Owns the grouping of layers into layer groups, and the block view of one plane's tensor. Pure, engine side.

A layer falls into parts: planes of equal shape and dtype make one part, unequal keys and values make two. Parts with
the same signature form a layer group, in order of first appearance. Only tensor methods are called, so that nothing
here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvframework.api import LayerGroup, LayerTensors
from kvframework.errors import BadLayout

if TYPE_CHECKING:
    import torch


class Signature(NamedTuple):
    """What layers of one group have in common. `role` keeps unequal keys and values of different layers apart."""

    planes: int
    heads: int
    head_dim: int
    dtype: str
    role: str = "all planes"

    def fits(self, group: LayerGroup) -> bool:
        return (self.planes, self.heads, self.head_dim, self.dtype) == (
            group.planes, group.heads, group.head_dim, group.dtype,
        )  # fmt: skip


@dataclass
class TensorGroup:
    """Layers of one signature: their names and, per layer, the tensors of each plane."""

    signature: Signature
    names: list[str] = field(default_factory=list)
    layers: list[Sequence[torch.Tensor]] = field(default_factory=list)


def dtype_name(tensor: torch.Tensor) -> str:
    """torch's name of the dtype without `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


def plane_tensors(name: str, tensors: LayerTensors) -> Sequence[torch.Tensor]:
    """What one layer holds as a sequence: of one tensor, or of a tensor per plane. Raises `BadLayout`."""
    if not isinstance(tensors, (tuple, list)):
        return (tensors,)  # type: ignore[return-value]
    if len(tensors) not in (1, 2):
        raise BadLayout(f"{len(tensors)} tensors", where=f"layer {name}", available="one, or a pair (keys, values)")
    return tensors


def parts_of(planes: Sequence[torch.Tensor], axes: Sequence[str]) -> list[tuple[Signature, Sequence[torch.Tensor]]]:
    """One part if all planes agree in heads, head size and dtype, else one part for each plane."""

    def signature(tensor: torch.Tensor, count: int, role: str) -> Signature:
        heads = tensor.shape[axes.index("head")] if "head" in axes else 1
        return Signature(count, heads, tensor.shape[axes.index("dim")], dtype_name(tensor), role)

    together = {signature(tensor, len(planes), "all planes") for tensor in planes}
    if len(together) == 1:
        return [(together.pop(), planes)]
    return [(signature(tensor, 1, role), (tensor,)) for tensor, role in zip(planes, ("keys", "values"), strict=True)]


def group_parts(parts: Iterable[tuple[str, Signature, Sequence[torch.Tensor]]]) -> list[TensorGroup]:
    """Collects (layer name, signature, planes) into groups, in order of first appearance."""
    groups: dict[Signature, TensorGroup] = {}
    for name, signature, planes in parts:
        group = groups.setdefault(signature, TensorGroup(signature))
        group.names.append(name)
        group.layers.append(planes)
    return list(groups.values())


def check_declared(declared: Sequence[LayerGroup], found: Sequence[TensorGroup]) -> None:
    """Raises `BadLayout` unless the tensors form the groups that were declared."""
    if len(declared) != len(found):
        raise BadLayout(f"the tensors form {len(found)} layer groups", available=f"{len(declared)} as declared")
    for index, (want, have) in enumerate(zip(declared, found, strict=True)):
        if len(have.names) != want.num_layers or not have.signature.fits(want):
            raise BadLayout(
                f"{len(have.names)} layers with {have.signature}",
                where=f"layout.groups[{index}]",
                available=f"{want.num_layers} layers, planes={want.planes}, heads={want.heads}, "
                f"head_dim={want.head_dim}, dtype={want.dtype}",
                hint="register again when the shapes have changed",
            )


def same_size(sizes: Mapping[str, int], what: str) -> int:
    """The one value that all layers have. Raises `BadLayout` naming two layers that differ."""
    first_name, first = next(iter(sizes.items()))
    for name, size in sizes.items():
        if size != first:
            raise BadLayout(f"{what} is {size}", where=f"layer {name}", available=f"{first} as in layer {first_name}")
    return first


def block_view(tensor: torch.Tensor, axes: Sequence[str], slots: int) -> torch.Tensor:
    """A view `[blocks, slots, heads, dim]` of one plane; `axes` names the tensor's axes, without a plane.

    Without a block axis the token axis is split, and tokens behind the last whole block are left out.
    """
    names = list(axes)
    if "block" not in names:
        at = names.index("token")
        blocks = tensor.shape[at] // slots
        whole = tensor.narrow(at, 0, blocks * slots)
        tensor = whole.unflatten(at, (blocks, slots))  # type: ignore[no-untyped-call]
        names.insert(at, "block")
    if "head" not in names:
        tensor = tensor.unsqueeze(-1)
        names.append("head")
    return tensor.permute([names.index(axis) for axis in ("block", "token", "head", "dim")])
