"""Declared layer groups: which layer falls where, what is refused, and what may share memory."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvf_layouts import PagedOptions
from kvf_layouts.declaring import PagedRule
from kvf_layouts.paged import PagedLayout
from kvf_layouts.tensors import Place, check_apart, overlap
from kvframework.api.layout import NO_BLOCK, KVLayout, LayerGroup, canonical_desc, validate_layout
from kvframework.errors import BadLayout
from kvframework.wire.transfer_blocks import touched_blocks
from tests.support.lazy import torch

pytestmark = pytest.mark.torch


NHD = ("plane", "block", "token", "head", "dim")


def layer(block: int = 4, blocks: int = 6) -> torch.Tensor:
    return torch.zeros(2, blocks, block, 2, 3)


def test_options_as_in_a_table_declare_groups_with_their_own_sizes() -> None:
    options = msgspec.convert(
        {
            "axes": list(NHD),
            "groups": [
                {"layers": ["*.swa.*"], "block_size": 8, "window": 20},
                {"layers": ["*.ssm"], "axes": ["block", "dim"], "state": True},
                {"layers": ["*.idx"], "axes": ["block", "token", "dim"], "compress_ratio": 4, "block_size": 16},
                {"layers": ["*"]},
            ],
        },
        PagedOptions,
    )
    kv = {
        "0.full": layer(),
        "1.swa.k": layer(8, 5),
        "2.ssm": torch.zeros(6, 7),
        "3.idx": torch.zeros(6, 4, 5),
        "4.full": layer(),
    }
    layout = PagedLayout(options.axes, options.groups).describe(kv, block_size=4)
    names = [group.layer_names for group in layout.groups]
    assert names == [("1.swa.k",), ("2.ssm",), ("3.idx",), ("0.full", "4.full")]
    assert [group.block_size for group in layout.groups] == [8, 4, 16, 4]
    assert [group.window for group in layout.groups] == [20, 0, 0, 0]
    assert [group.state for group in layout.groups] == [False, True, False, False]
    assert [group.slots for group in layout.groups] == [8, 1, 4, 4]
    assert layout.num_blocks == 6
    assert [layout.blocks_of(index) for index in range(4)] == [5, 6, 6, 6]
    desc = canonical_desc(layout, 20)
    assert desc.chunk_tokens == 32
    assert [group.shape for group in desc.groups] == [(2, 1, 32, 6), (1, 1, 1, 7), (1, 1, 8, 5), (2, 2, 32, 6)]
    assert [group.window for group in desc.groups] == [20, 1, 0, 0]


def test_a_layer_in_no_group_and_a_group_without_a_layer_are_refused() -> None:
    with pytest.raises(BadLayout, match="layer b is in no declared group"):
        PagedLayout(NHD, [PagedRule(("a*",))]).describe({"a": layer(), "b": layer()}, block_size=4)
    with pytest.raises(BadLayout, match=r"no layer is left for the group c\*"):
        PagedLayout(NHD, [PagedRule(("*",)), PagedRule(("c*",))]).describe({"a": layer()}, block_size=4)


def test_without_axes_the_refusal_tells_which_would_fit() -> None:
    with pytest.raises(BadLayout, match=r"are not set; layer a has \(2, 6, 4, 2, 3\)") as caught:
        PagedLayout().describe({"a": layer()}, block_size=4)
    assert '["plane", "block", "token", "head", "dim"]' in caught.value.available
    assert '"head", "token"' not in caught.value.available, "the block size is 4, there are 2 heads"
    # Two heads and a block of two tokens: the shape fits both orders, so none can be taken.
    with pytest.raises(BadLayout) as caught:
        PagedLayout().describe({"a": torch.zeros(2, 6, 2, 2, 3)}, block_size=2)
    assert '["plane", "block", "token", "head", "dim"]' in caught.value.available
    assert '["plane", "block", "head", "token", "dim"]' in caught.value.available


def test_layers_that_share_memory_need_groups_of_their_own() -> None:
    shared = layer()
    kv = {"full": shared, "swa": shared}
    with pytest.raises(BadLayout, match=r"layer swa.*shares memory with layer full") as caught:
        PagedLayout(NHD).describe(kv, block_size=4)
    assert "groups" in caught.value.hint
    layout = PagedLayout(NHD, [PagedRule(("full",)), PagedRule(("swa",), window=8)])
    declared = layout.describe(kv, block_size=4)
    views = layout.block_views(declared, kv)
    assert views[0][0][0].data_ptr() == views[1][0][0].data_ptr()


def test_an_expanded_tensor_is_refused() -> None:
    with pytest.raises(BadLayout, match="elements of the tensor share memory, strides"):
        PagedLayout(NHD).describe({"a": torch.zeros(2, 6, 4, 1, 3).expand(2, 6, 4, 2, 3)}, block_size=4)


def test_other_strides_than_declared_are_refused_at_a_submit() -> None:
    layout = PagedLayout(NHD)
    kv = {"a": layer()}
    declared = layout.describe(kv, block_size=4)
    moved = {"a": layer().transpose(2, 3).contiguous().transpose(2, 3)}
    with pytest.raises(BadLayout, match="strides"):
        layout.block_views(declared, moved)
    with pytest.raises(BadLayout, match="layer b was not declared"):
        layout.block_views(declared, {"b": layer()})
    two = layout.describe({"a": layer(), "b": layer()}, block_size=4)
    with pytest.raises(BadLayout, match="layers b, a"):
        layout.block_views(two, {"b": layer(), "a": layer()})


@pytest.mark.parametrize(
    ("rule", "fact"),
    [
        (PagedRule(axes=("block", "token", "dim"), state=True), "axes"),
        (PagedRule(compress_ratio=3), "multiple of compress_ratio"),
        (PagedRule(axes=("layer", "block", "dim")), "axes"),
        (PagedRule(axes=("block", "dim"), state=True, window=4), r"window \(4 tokens\)"),
    ],
)
def test_rules_that_contradict_themselves_are_refused(rule: PagedRule, fact: str) -> None:
    with pytest.raises(BadLayout, match=fact):
        PagedLayout(NHD, [rule]).describe({"a": torch.zeros(6, 3)}, block_size=4)


@pytest.mark.parametrize(
    "group",
    [
        LayerGroup(1, 16, 2, 8, "uint8", packing="p"),
        LayerGroup(1, 16, 1, 8, "float32", packing="p"),
        LayerGroup(1, 16, 1, 8, "uint8", packing="p", compress_ratio=2),
        LayerGroup(1, 16, 1, 8, "uint8", packing="p" * 200),
        LayerGroup(1, 16, 1, 8, "uint8", num_blocks=-1),
        LayerGroup(1, 16, 1, 8, "uint8", axes=("token", "dim"), strides=(-8, 1)),
        LayerGroup(1, 16, 1, 8, "uint8", state=True, window=1),
    ],
)
def test_a_server_refuses_declarations_that_cannot_be(group: LayerGroup) -> None:
    with pytest.raises(BadLayout):
        validate_layout(KVLayout("paged", (group,)))


@pytest.mark.parametrize("tokens", [-16, 8, 24, 1 << 25])
def test_a_chunk_of_the_engines_own_is_whole_blocks(tokens: int) -> None:
    with pytest.raises(BadLayout, match="chunk_tokens"):
        validate_layout(KVLayout("paged", (LayerGroup(1, 16, 2, 8, "float32"),), chunk_tokens=tokens))


def test_an_engines_own_chunk_goes_before_the_servers() -> None:
    layout = KVLayout("paged", (LayerGroup(1, 16, 2, 8, "float32"),), chunk_tokens=32)
    assert canonical_desc(layout, 256).chunk_tokens == 32
    assert canonical_desc(layout, 256).groups[0].shape == (2, 1, 32, 16)
    assert canonical_desc(msgspec.structs.replace(layout, chunk_tokens=0), 256).chunk_tokens == 256


def test_touched_blocks_by_example() -> None:
    ids = list(range(10, 22))  # three chunks of 16 tokens, blocks of 4
    full = LayerGroup(1, 4, 1, 1, "uint8")
    assert touched_blocks(full, 16, ids, storing=True) == (ids, 4, 0, 21)
    window = LayerGroup(1, 4, 1, 1, "uint8", window=18)
    assert touched_blocks(window, 16, ids, storing=True) == (ids, 4, 0, 21)
    assert touched_blocks(window, 16, [NO_BLOCK] * 5 + ids[5:], storing=True).first == 8
    assert touched_blocks(window, 16, ids, storing=False) == ([NO_BLOCK] * 7 + ids[7:], 4, 7, 21), (
        "tokens 30 to 48: block 7 holds 28 to 31"
    )
    state = LayerGroup(1, 4, 1, 1, "uint8", state=True)
    assert touched_blocks(state, 16, ids, storing=True) == ([13, 17, 21], 1, 0, 21)
    assert touched_blocks(state, 16, [NO_BLOCK] * 11 + [21], storing=True) == ([NO_BLOCK, NO_BLOCK, 21], 1, 2, 21)
    assert touched_blocks(state, 16, ids, storing=False) == ([NO_BLOCK, NO_BLOCK, 21], 1, 2, 21)


# Whether tensors share elements, against counting them.


@st.composite
def places(draw: st.DrawFn, itemsize: int) -> Place:
    rank = draw(st.integers(0, 3))
    sizes = draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank))
    strides = draw(st.lists(st.integers(0, 12), min_size=rank, max_size=rank))
    return Place(draw(st.integers(0, 20)) * itemsize, tuple(sizes), tuple(s * itemsize for s in strides), itemsize)


def addresses(place: Place) -> list[int]:
    return [
        place.address + sum(at * stride for at, stride in zip(index, place.strides, strict=True))
        for index in itertools.product(*map(range, place.sizes))
    ]


@settings(max_examples=300)
@given(st.sampled_from([1, 2, 4]).flatmap(lambda size: st.tuples(places(size), places(size))))
def test_overlap_is_a_shared_element(two: tuple[Place, Place]) -> None:
    one, other = two
    assert overlap(one, other) == bool(set(addresses(one)) & set(addresses(other)))


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=3))
def test_a_tensor_that_repeats_an_element_is_refused(axes: list[tuple[int, int]]) -> None:
    memory = torch.zeros(128)
    tensor = memory.as_strided([size for size, _ in axes], [stride for _, stride in axes])
    place = Place(0, tuple(tensor.shape), tuple(tensor.stride()), 1)
    if len(set(addresses(place))) == len(addresses(place)):
        check_apart({"a": tensor})
    else:
        with pytest.raises(BadLayout, match="elements of the tensor share memory, strides"):
            check_apart({"a": tensor})


def test_interleaved_layers_of_a_large_engine_are_quick_to_check() -> None:
    memory = torch.empty(2000, 64, 2, 16, 8, device="meta")
    layers = {f"l{index}": layer for index, layer in enumerate(memory.unbind(1))}
    assert not any(
        overlap(_place(one), _place(other)) for one, other in itertools.combinations(list(layers.values())[:12], 2)
    )
    shifted = _place(layers["l0"])._replace(address=4)
    assert overlap(_place(layers["l0"]), shifted)


def _place(tensor: torch.Tensor) -> Place:
    return Place(tensor.storage_offset() * 4, tuple(tensor.shape), tuple(s * 4 for s in tensor.stride()), 4)
