"""The description of an engine's memory for the server: allocations, and the place of each plane of each layer in them.

Pure but for the calls of the driver that exports. Used by the engine process to write handles and by the copier and the
server to read them; handles from the wire are checked against the declared layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvf_devices.driver import Allocation, Exported
from kvframework.api.copy_plans import PlacedView
from kvframework.api.layout import CANONICAL, NO_BLOCK, OPAQUE, BlockViews, KVLayout, LayerGroup, MemoryLayoutDesc
from kvframework.api.plugin import Message, dtype_bytes
from kvframework.errors import BadLayout, RequestError

MAX_ALLOCATIONS = 4096
MAX_DEVICE_NAME = 128
# No device has more. With this bound all sums of addresses stay within 64 bits, also with a client's false sizes.
MAX_ALLOCATION_BYTES = 1 << 48


class ExportedAllocation(Message, frozen=True, array_like=True, tag="a"):
    """An allocation, counted from 0, that holds the views which follow it."""

    allocation: Allocation


class ExportedView(Message, frozen=True, array_like=True, tag="v"):
    """One plane of one layer: its place in an allocation, its number of blocks, and the strides of block, slot, head
    and element, all in bytes. The order of views is group, plane, layer."""

    allocation: int
    offset: int
    blocks: int
    strides: tuple[int, int, int, int]


_Handle = ExportedAllocation | ExportedView


@dataclass(frozen=True)
class ExportedMemory:
    """The exported memory of one instance: its device, its allocations, its views as `[group][plane][layer]`."""

    device: str
    allocations: Sequence[Allocation]
    views: Sequence[Sequence[Sequence[ExportedView]]]

    def opened_at(self, bases: Sequence[int]) -> list[list[list[PlacedView]]]:
        """Return the views for allocations that are open at `bases`."""
        return [
            [[PlacedView(bases[view.allocation] + view.offset, view.strides) for view in plane] for plane in planes]
            for planes in self.views
        ]


def export_memory(
    views: BlockViews, layout: KVLayout, export: Callable[[int], Exported]
) -> tuple[str, tuple[bytes, ...]]:
    """Return the device and the handles of an instance. Several tensors of one allocation export it once. Raises the
    errors of `export`, and `BadLayout` for memory on several devices."""
    known: list[tuple[int, int]] = []  # address range of each allocation
    allocations: list[ExportedAllocation] = []
    placed: list[ExportedView] = []
    for group, planes in zip(layout.groups, views, strict=True):
        size = dtype_bytes(group.dtype)
        for view in (view for plane in planes for view in plane):
            address = view.data_ptr()
            at = next((index for index, (low, high) in enumerate(known) if low <= address < high), None)
            if at is None:
                exported = export(address)
                at, low = len(known), address - exported.offset
                known.append((low, low + exported.allocation.nbytes))
                allocations.append(ExportedAllocation(exported.allocation))
            strides = tuple(stride * size for stride in view.stride())
            placed.append(ExportedView(at, address - known[at][0], view.shape[0], strides))  # type: ignore[arg-type]
    devices = {each.allocation.device for each in allocations}
    if len(devices) != 1:
        raise BadLayout(
            f"the tensors are on {len(devices)} devices: {', '.join(sorted(devices))}",
            available="one device",
            hint="register one instance for each device",
        )
    return devices.pop(), tuple(msgspec.msgpack.encode(each) for each in (*allocations, *placed))


def read_handles(handles: Sequence[bytes], layout: KVLayout, desc: MemoryLayoutDesc) -> ExportedMemory:
    """Return the memory that the handles describe. Raises `RequestError` if they are malformed or do not fit the
    layout, `BadLayout` for one that a device cannot serve."""
    _check_servable(layout, desc)
    read = [_decode(handle, index) for index, handle in enumerate(handles)]
    allocations = [each.allocation for each in read if isinstance(each, ExportedAllocation)]
    flat = [each for each in read if isinstance(each, ExportedView)]
    expected = sum(group.planes * group.num_layers for group in layout.groups)
    if len(flat) != expected or not 1 <= len(allocations) <= MAX_ALLOCATIONS:
        raise RequestError(
            f"the request has {len(flat)} views of {len(allocations)} allocations",
            where="handles",
            available=f"{expected} views",
        )
    largest = max(allocation.nbytes for allocation in allocations)
    if largest > MAX_ALLOCATION_BYTES:
        raise RequestError(
            f"an allocation has {largest} bytes", where="handles", available=f"at most {MAX_ALLOCATION_BYTES}"
        )
    if len({allocation.device for allocation in allocations}) != 1:
        raise RequestError("the allocations are of several devices", where="handles", available="one device")
    device = allocations[0].device
    if not 1 <= len(device) <= MAX_DEVICE_NAME or not device.isprintable():
        raise RequestError("the device's name is not valid", where="handles", available=f"{MAX_DEVICE_NAME} letters")
    rest, views = iter(flat), []
    for index, group in enumerate(layout.groups):
        planes = [[next(rest) for _ in range(group.num_layers)] for _ in range(group.planes)]
        for view in (view for plane in planes for view in plane):
            _check_view(view, allocations, group, layout.blocks_of(index), f"layout.groups[{index}]")
        views.append(planes)
    return ExportedMemory(device, allocations, views)


def _check_servable(layout: KVLayout, desc: MemoryLayoutDesc) -> None:
    for index, each in enumerate(desc.groups):
        if each.form != CANONICAL and not each.form.startswith(OPAQUE):
            raise BadLayout(f"the objects have the form {each.form}", available=f"{CANONICAL}, {OPAQUE}...")
        if not 1 <= layout.blocks_of(index) < NO_BLOCK:
            raise BadLayout(
                f"the layer group has {layout.blocks_of(index)} blocks",
                where=f"layout.groups[{index}]",
                available="memory at a fixed address",
                hint="use cpu_gather for tensors passed at each submit",
            )


def _decode(handle: bytes, index: int) -> _Handle:
    try:
        return msgspec.msgpack.decode(handle, type=_Handle)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, ValueError) as error:
        raise RequestError(f"the handle is malformed: {error}", where=f"handles[{index}]") from None


def _check_view(
    view: ExportedView, allocations: Sequence[Allocation], group: LayerGroup, blocks: int, where: str
) -> None:
    if not 0 <= view.allocation < len(allocations) or min(view.offset, *view.strides) < 0:
        raise RequestError(f"a view lies in allocation {view.allocation} at {view.offset}", where=where)
    counts = (view.blocks, group.slots, group.heads, group.head_dim)
    last = sum((count - 1) * stride for count, stride in zip(counts, view.strides, strict=True))
    end = view.offset + last + dtype_bytes(group.dtype)
    if view.blocks < blocks or end > allocations[view.allocation].nbytes:
        raise RequestError(
            f"a view with {view.blocks} blocks ends at byte {end}",
            where=where,
            available=f"{blocks} blocks in an allocation of {allocations[view.allocation].nbytes} bytes",
        )
