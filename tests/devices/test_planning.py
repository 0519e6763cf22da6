"""Plans against counting element by element: every layout, any blocks, any skip, and every way to cut a plan."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvf_devices import Allocation, Exported
from kvf_devices.handles import ExportedAllocation, ExportedMemory, ExportedView, export_memory, read_handles
from kvframework.api.copy_plans import CopyPlanner, Step
from kvframework.api.layout import NO_BLOCK, KVLayout, LayerGroup, canonical_desc
from kvframework.api.plugin import dtype_bytes
from kvframework.api.transport import ArenaRange, GroupBlocks
from kvframework.errors import BadLayout, RequestError

BASES = [0x7F00_0000_0000, 0x1_0000]


@st.composite
def memories(draw: st.DrawFn) -> tuple[KVLayout, ExportedMemory]:
    """Layer groups whose planes and layers lie in any order of axes, in one of two allocations."""
    groups, views = [], []
    for _ in range(draw(st.integers(1, 2))):
        state = draw(st.booleans()) and draw(st.booleans())
        group = LayerGroup(
            draw(st.integers(1, 3)),
            draw(st.sampled_from([2, 4])),
            draw(st.integers(1, 2)),
            draw(st.integers(1, 3)),
            draw(st.sampled_from(["uint8", "float16", "float32"])),
            planes=draw(st.integers(1, 2)),
            state=state,
            num_blocks=9,
        )
        planes = []
        for _plane in range(group.planes):
            lanes = []
            for _layer in range(group.num_layers):
                order = draw(st.permutations(range(4))) if draw(st.booleans()) else [0, 1, 2, 3]
                counts = (9, group.slots, group.heads, group.head_dim)
                strides, step = [0] * 4, dtype_bytes(group.dtype)
                for axis in reversed(order):
                    strides[axis] = step
                    step *= counts[axis]
                place = draw(st.integers(0, 50)) * 4096
                lanes.append(ExportedView(draw(st.integers(0, 1)), place, 9, tuple(strides)))
            planes.append(lanes)
        groups.append(group)
        views.append(planes)
    allocations = [Allocation("d", b"a", 1 << 20), Allocation("d", b"b", 1 << 20)]
    return KVLayout("paged", tuple(groups), 9), ExportedMemory("d", allocations, views)


def expected(layout, desc, memory, ranges, block_ids, counts, skip):
    """(device address, arena offset, bytes) of every element that is moved, from the definition."""
    found = set()
    for place in ranges:
        group, views = layout.groups[place.group], memory.views[place.group]
        size, per = dtype_bytes(group.dtype), counts[place.group]
        row = desc.groups[place.group].nbytes // (group.planes * group.num_layers)
        for at in range(per):
            block = block_ids[place.group][place.chunk * per + at]
            for slot in range(group.slots):
                last_token = (
                    place.chunk * desc.chunk_tokens + at * group.block_size + (slot + 1) * group.slot_tokens - 1
                )
                if block == NO_BLOCK or (last_token < skip and not group.state):
                    continue
                for lane, view in enumerate(view for plane in views for view in plane):
                    for head in range(group.heads):
                        for dim in range(group.head_dim):
                            index = (block, slot, head, dim)
                            inner = sum(i * stride for i, stride in zip(index, view.strides, strict=True))
                            address = BASES[view.allocation] + view.offset + inner
                            element = (((at * group.slots) + slot) * group.heads + head) * group.head_dim + dim
                            found.add((address, place.offset + lane * row + element * size, size))
    return found


def elements(batches):
    """The same of planned batches, cut into elements of one byte."""
    moved = []
    for batch in batches:
        addresses, offsets, run = batch.fragments()
        assert len(addresses) == len(offsets) == batch.count
        assert batch.nbytes == run * batch.count
        for address, offset in zip(addresses, offsets, strict=True):
            moved += [(address + byte, offset + byte) for byte in range(run)]
    assert len(moved) == len(set(moved)), "nothing is moved twice"
    return set(moved)


def blocks_of(ids: list[list[int]], counts: list[int]) -> list[GroupBlocks]:
    return [GroupBlocks(each, count, 0, max(each)) for each, count in zip(ids, counts, strict=True)]


@settings(max_examples=150)
@given(made=memories(), skip=st.integers(0, 15), data=st.data())
def test_a_plan_moves_exactly_the_elements_of_the_transfer(made, skip, data) -> None:
    layout, memory = made
    desc = canonical_desc(layout, 8)
    counts = [group.object_blocks(desc.chunk_tokens) for group in layout.groups]
    ids = [
        data.draw(st.lists(st.sampled_from([*range(9), NO_BLOCK]), min_size=count * 2, max_size=count * 2, unique=True))
        if count * 2 <= 9
        else data.draw(st.permutations(range(9)))[: count * 2]
        for count in counts
    ]
    places = [(chunk, group) for chunk in range(2) for group in range(len(counts))]
    chosen = data.draw(st.lists(st.sampled_from(places), unique=True, min_size=1))
    ranges = [
        ArenaRange(chunk, group, 10_000 * number, desc.groups[group].nbytes)
        for number, (chunk, group) in enumerate(chosen)
    ]
    planner = CopyPlanner(layout.groups, desc, memory.opened_at(BASES), merged=data.draw(st.booleans()))
    batches = planner.plan(ranges, blocks_of(ids, counts), skip)
    wanted = {
        (address + byte, offset + byte)
        for address, offset, size in expected(layout, desc, memory, ranges, ids, counts, skip)
        for byte in range(size)
    }
    assert elements(batches) == wanted
    limit = data.draw(st.integers(1, 500))
    cut = [piece for batch in batches for piece in batch.split(limit)]
    assert elements(cut) == wanted
    for piece in cut:
        cells = len(piece.lane_addresses) * len(piece.place_addresses)
        assert piece.nbytes <= limit or cells == 1


@settings(max_examples=100)
@given(data=st.data())
def test_shards_of_the_same_blocks_move_exactly_wherever_they_lie(data) -> None:
    """Groups that are columns of heads, beside each other or not, whole chunks of them or some, at equal distances or
    not."""
    columns, heads = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 2))
    whole = LayerGroup(data.draw(st.integers(1, 2)), 2, columns * heads, 3, "float16", num_blocks=9)
    order = data.draw(st.permutations(range(4)))
    counts, strides, step = (9, 2, columns * heads, 3), [0] * 4, 2
    for axis in reversed(order):
        strides[axis] = step
        step *= counts[axis]
    group = msgspec.structs.replace(whole, heads=heads)
    layout = KVLayout("paged", (group,) * columns, 9)
    apart = data.draw(st.booleans())
    views = [
        [
            [
                ExportedView(
                    layer % 2 if apart else 0,
                    (plane * 2 + layer) * 4096 + column * heads * strides[2] + (column % 3 == 2) * 32 * apart,
                    9,
                    tuple(strides),
                )
                for layer in range(group.num_layers)
            ]
            for plane in range(2)
        ]
        for column in range(columns)
    ]
    memory = ExportedMemory("d", [Allocation("d", b"a", 1 << 20)] * 2, views)
    desc = canonical_desc(layout, 4)
    ids = data.draw(st.permutations(range(9)))[:4]
    places = [(chunk, column) for chunk in range(2) for column in range(columns)]
    chosen = [place for place in places if data.draw(st.integers(0, 5))] or places[:1]
    distance = st.sampled_from([10_000, 10_000, 10_000, 25_000])
    offsets = [0]
    for _ in chosen:
        offsets.append(offsets[-1] + data.draw(distance))
    if not data.draw(st.integers(0, 3)):
        offsets.reverse()
    ranges = [
        ArenaRange(chunk, column, offset, desc.groups[column].nbytes)
        for (chunk, column), offset in zip(chosen, offsets, strict=False)
    ]
    skip = data.draw(st.integers(0, 7))
    planner = CopyPlanner(layout.groups, desc, memory.opened_at(BASES), merged=False)
    batches = planner.plan(ranges, blocks_of([ids], [2]) * columns, skip, joined=data.draw(st.booleans()))
    wanted = {
        (address + byte, offset + byte)
        for address, offset, size in expected(layout, desc, memory, ranges, [ids] * columns, [2] * columns, skip)
        for byte in range(size)
    }
    assert elements(batches) == wanted


def test_shards_beside_each_other_are_one_batch() -> None:
    group = LayerGroup(2, 2, 1, 4, "float16", num_blocks=9)
    layout = KVLayout("paged", (group,) * 4, 9)
    strides = (64, 32, 8, 2)
    views = [
        [[ExportedView(0, 4096 * layer + 8 * column, 9, strides) for layer in range(2)]] * 2 for column in range(4)
    ]
    memory = ExportedMemory("d", [Allocation("d", b"a", 1 << 20)], views)
    planner = CopyPlanner(layout.groups, canonical_desc(layout, 4), memory.opened_at(BASES), merged=False)
    ranges = [ArenaRange(chunk, column, 1000 * (4 * chunk + column), 128) for chunk in range(2) for column in range(4)]
    (batch,) = planner.plan(ranges, blocks_of([[1, 2, 3, 4]], [2]) * 4, joined=True)
    assert batch.steps[0] == Step(4, 8, 1000)
    assert len(planner.plan(ranges, blocks_of([[1, 2, 3, 4]], [2]) * 4)) == 4
    others = blocks_of([[1, 2, 3, 4]] * 4, [2] * 4)
    assert len(planner.plan(ranges, others, joined=True)) == 4, "perhaps other blocks"


class Tensor:
    """As much of a tensor as `export_memory` asks for."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.shape, self._address, self._strides = shape, address, strides

    def data_ptr(self) -> int:
        return self._address

    def stride(self) -> tuple[int, ...]:
        return self._strides


LAYOUT = KVLayout("paged", (LayerGroup(3, 4, 2, 8, "float16", planes=1),), 6)
DESC = canonical_desc(LAYOUT, 8)
SHAPE, STRIDES = (6, 4, 2, 8), (64, 16, 8, 1)


def exported_of(addresses: list[int], device_of=lambda _address: "gpu-1") -> tuple[str, tuple[bytes, ...], list[int]]:
    exported: list[int] = []

    def export(address: int) -> Exported:
        exported.append(address)
        base = address - address % 100_000
        return Exported(Allocation(device_of(address), b"h%d" % base, 100_000), address - base)

    views = [[[Tensor(address, SHAPE, STRIDES) for address in addresses]]]
    return *export_memory(views, LAYOUT, export), exported


def test_several_tensors_of_one_allocation_export_it_once() -> None:
    device, handles, exported = exported_of([200_512, 201_280, 300_000])
    assert (device, exported) == ("gpu-1", [200_512, 300_000])
    memory = read_handles(handles, LAYOUT, DESC)
    assert [each.handle for each in memory.allocations] == [b"h200000", b"h300000"]
    assert [(view.allocation, view.offset) for view in memory.views[0][0]] == [(0, 512), (0, 1280), (1, 0)]
    assert memory.views[0][0][0].strides == (128, 32, 16, 2)


def test_tensors_on_two_devices_are_refused() -> None:
    with pytest.raises(BadLayout, match="2 devices"):
        exported_of([100_000, 200_000, 300_000], lambda address: f"gpu-{address // 200_000}")


def _changed(**fields: object) -> tuple[bytes, ...]:
    """The handles of three tensors, the last view changed."""
    _, handles, _ = exported_of([200_512, 201_280, 300_000])
    view = msgspec.msgpack.decode(handles[-1], type=ExportedView)
    return (*handles[:-1], msgspec.msgpack.encode(msgspec.structs.replace(view, **fields)))


def _larger(nbytes: int, **fields: object) -> tuple[bytes, ...]:
    """Likewise, and its allocation says that it has `nbytes`."""
    handles = list(_changed(**fields))
    at = max(index for index, handle in enumerate(handles) if b"h300000" in handle)
    exported = msgspec.msgpack.decode(handles[at], type=ExportedAllocation)
    handles[at] = msgspec.msgpack.encode(
        ExportedAllocation(msgspec.structs.replace(exported.allocation, nbytes=nbytes))
    )
    return tuple(handles)


@pytest.mark.parametrize(
    "handles",
    [
        (),
        (b"\xc1",),
        (b"", *_changed()),
        _changed()[:-1],
        _changed()[1:],
        _changed(allocation=2),
        _changed(allocation=-1),
        _changed(offset=-2),
        _changed(offset=100_000 - 64),
        _changed(blocks=5),
        _changed(strides=(1 << 40, 32, 16, 2)),
        _changed(strides=(128, 32, -16, 2)),
        (*_changed(), msgspec.msgpack.encode(["x", 1])),
        _larger(1 << 63, offset=(1 << 63) - 4096),
    ],
)
def test_handles_that_do_not_fit_the_layout_are_refused(handles: tuple[bytes, ...]) -> None:
    with pytest.raises(RequestError):
        read_handles(handles, LAYOUT, DESC)


def test_memory_that_has_no_fixed_place_is_refused() -> None:
    layout = msgspec.structs.replace(LAYOUT, num_blocks=0)
    with pytest.raises(BadLayout, match="0 blocks"):
        read_handles(_changed(), layout, DESC)


def test_a_plan_of_whole_blocks_in_order_is_few_long_fragments() -> None:
    planner = CopyPlanner(LAYOUT.groups, DESC, read_handles(_changed(), LAYOUT, DESC).opened_at([0, 0]))
    ranges = [ArenaRange(chunk, 0, chunk * 10_000, DESC.groups[0].nbytes) for chunk in range(2)]
    (batch,) = planner.plan(ranges, blocks_of([[2, 3, 4, 5]], [2]))
    assert (batch.steps, batch.run) == ((), 2 * 128)
    assert (len(batch.lane_addresses), len(batch.place_addresses)) == (3, 2)
