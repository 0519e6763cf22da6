"""The layouts `paged` and `dynamic_cache`: declarations, refusals, and views that are the engine's memory."""

from __future__ import annotations

import sys

import pytest

from kvf_layouts import kvf_layouts as hook
from kvf_layouts.dynamic_cache import DynamicCacheLayout
from kvf_layouts.paged import PagedLayout
from kvframework.api.layout import chunk_tokens_for
from kvframework.config.load import load_config
from kvframework.errors import BadDtype, BadLayout
from tests.support.lazy import torch
from tests.support.processes import ran

pytestmark = pytest.mark.torch


BLOCK, HEADS, DIM = 4, 3, 5
AXES = ("plane", "block", "token", "head", "dim")
PAIR = [("block", "token", "head", "dim"), ("block", "head", "token", "dim"), ("token", "head", "dim")]


def canonical(layout, declared, kv_caches):
    """[group] -> [planes, layers, blocks, slots, heads, dim], by reading the views."""
    views = layout.block_views(declared, kv_caches)
    return [torch.stack([torch.stack(list(plane)) for plane in group]) for group in views]


def content(layers=2, blocks=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(layers, 2, blocks, BLOCK, HEADS, DIM, generator=generator)


def test_dynamic_cache_sees_whole_blocks_of_its_pairs():
    expected = content(blocks=3)
    as_cache = expected.flatten(2, 3).transpose(2, 3)  # [layers, planes, heads, tokens, dim]
    longer = torch.cat([as_cache, torch.full((2, 2, HEADS, 2, DIM), 9.0)], dim=3)
    kv_caches = {f"l{i}": (layer[0][None], layer[1][None]) for i, layer in enumerate(longer)}
    layout = DynamicCacheLayout()
    declared = layout.describe(kv_caches, block_size=BLOCK)
    assert declared.num_blocks == 0
    assert declared.groups[0].strides == ()
    assert torch.equal(canonical(layout, declared, kv_caches)[0], expected.transpose(0, 1))


def test_a_cache_of_no_tokens_can_be_described():
    empty = torch.empty(1, HEADS, 0, DIM)
    layout = DynamicCacheLayout()
    declared = layout.describe({"a": (empty, empty)}, block_size=BLOCK)
    assert canonical(layout, declared, {"a": (empty, empty)})[0].shape == (2, 1, 0, BLOCK, HEADS, DIM)


def test_layers_of_other_shape_or_dtype_form_groups_in_order_of_appearance():
    axes = ("block", "token", "head", "dim")

    def zeros(dim, dtype=torch.float32):
        return torch.zeros(6, BLOCK, HEADS, dim, dtype=dtype)

    kv_caches = {
        "a": (zeros(DIM), zeros(DIM)),
        "b": (zeros(8), zeros(8)),
        "c": (zeros(DIM), zeros(DIM)),
        "d": (zeros(DIM, torch.bfloat16), zeros(DIM, torch.bfloat16)),
        "e": (zeros(DIM), zeros(8)),
    }
    layout = PagedLayout(axes)
    declared = layout.describe(kv_caches, block_size=BLOCK)
    assert [group.layer_names for group in declared.groups] == [("a", "c"), ("b",), ("d",), ("e",), ("e",)]
    assert [group.dtype for group in declared.groups] == ["float32", "float32", "bfloat16", "float32", "float32"]
    views = layout.block_views(declared, kv_caches)
    assert [len(group) for group in views] == [2, 2, 2, 1, 1]
    assert [group[0][0].shape[3] for group in views] == [DIM, 8, DIM, DIM, 8]


def test_unequal_keys_and_values_of_a_dynamic_cache_form_two_groups():
    kv_caches = {
        "a": (torch.zeros(1, 1, 8, 6), torch.ones(1, 1, 8, 4)),
        "b": (torch.zeros(1, 1, 8, 4), torch.ones(1, 1, 8, 6)),
    }
    layout = DynamicCacheLayout()
    declared = layout.describe(kv_caches, block_size=BLOCK)
    assert [(g.planes, g.head_dim, g.layer_names) for g in declared.groups] == [
        (1, 6, ("a",)),
        (1, 4, ("a",)),
        (1, 4, ("b",)),
        (1, 6, ("b",)),
    ]
    sums = [float(group[0][0].sum()) for group in layout.block_views(declared, kv_caches)]
    assert sums == [0.0, 32.0, 0.0, 48.0]


# Axes, shapes of one tensor or several, and what the refusal says.
SIZES = (BLOCK, HEADS, DIM)
REFUSED = {
    "no axes": ((), [(2, 6, *SIZES)], "are not set"),
    "too few axes": (AXES, [(6, *SIZES)], "4 axes"),
    "block size": (AXES, [(2, 6, 8, HEADS, DIM)], "'token'"),
    "planes": (AXES, [(3, 6, *SIZES)], "'plane'"),
    "a pair though there is a plane axis": (AXES, [(2, 6, *SIZES)] * 2, "pair"),
    "three tensors": (PAIR[0], [(6, *SIZES)] * 3, "3 tensors"),
    "blocks of K and V": (PAIR[0], [(6, *SIZES), (5, *SIZES)], "number of blocks"),
}


@pytest.mark.parametrize(("axes", "shapes", "fact"), REFUSED.values(), ids=REFUSED)
def test_paged_refuses_tensors_that_do_not_fit_the_declaration(axes, shapes, fact):
    tensors = tuple(torch.zeros(shape) for shape in shapes)
    tensors = tensors[0] if len(tensors) == 1 else tensors
    with pytest.raises(BadLayout, match=fact) as caught:
        PagedLayout(axes).describe({"model.layers.0": tensors}, block_size=BLOCK)
    assert "layers.0" in str(caught.value)
    assert caught.value.available


@pytest.mark.parametrize("axes", [("block", "token"), ("block", "token", "dim", "dim"), ("block", "tokens", "dim")])
def test_axes_that_contradict_themselves_are_refused(axes):
    with pytest.raises(BadLayout, match="axes"):
        PagedLayout(axes)


def test_layers_with_different_block_counts_are_refused():
    kv_caches = {"a": torch.zeros(2, 6, BLOCK, HEADS, DIM), "b": torch.zeros(2, 7, BLOCK, HEADS, DIM)}
    with pytest.raises(BadLayout, match="number of blocks is 7"):
        PagedLayout(AXES).describe(kv_caches, block_size=BLOCK)


def test_states_of_a_dynamic_cache_are_groups_behind_its_pairs():
    """By size and dtype; a block is one state, that behind its last token."""
    caches = {
        "layers.1": (torch.randn(1, 2, 3 * BLOCK, 6), torch.randn(1, 2, 3 * BLOCK, 6)),
        "states.0.conv": torch.randn(3, 10),
        "states.0.recurrent": torch.randn(3, 24),
        "states.2.conv": torch.randn(3, 10),
    }
    plugin = DynamicCacheLayout(["states.*"])
    layout = plugin.describe(caches, block_size=BLOCK)
    assert [(group.state, group.layer_names, group.slots, group.hidden) for group in layout.groups] == [
        (False, ("layers.1",), BLOCK, 12),
        (True, ("states.0.conv", "states.2.conv"), 1, 10),
        (True, ("states.0.recurrent",), 1, 24),
    ]
    views = plugin.block_views(layout, caches)
    assert views[1][0][1].shape == (3, 1, 1, 10)
    assert views[1][0][1].data_ptr() == caches["states.2.conv"].data_ptr()
    # The chunk's object holds the last of its states.
    assert [group.shape for group in plugin.object_desc(layout, 3 * BLOCK).groups] == [
        (2, 1, 3 * BLOCK, 12),
        (1, 2, 1, 10),
        (1, 1, 1, 24),
    ]


def test_a_dynamic_cache_of_states_alone_and_wrong_names():
    state = {"states.0": torch.zeros(1, 8)}
    assert DynamicCacheLayout(["states.*"]).describe(state, block_size=BLOCK).groups[0].state
    with pytest.raises(BadLayout, match="no layer is named mamba"):
        DynamicCacheLayout(["mamba.*"]).describe(state, block_size=BLOCK)
    with pytest.raises(BadLayout, match=r"\[blocks, elements\]"):
        DynamicCacheLayout(["*"]).describe({"a": torch.zeros(1, 2, 3)}, block_size=BLOCK)
    with pytest.raises(BadLayout, match="pair"):
        DynamicCacheLayout().describe(state, block_size=BLOCK)


@pytest.mark.parametrize(
    ("keys", "values", "fact"),
    [
        ((2, HEADS, 8, DIM), (2, HEADS, 8, DIM), "2 tensors of shape"),
        ((HEADS, 8, DIM), (HEADS, 8, DIM), "2 tensors of shape"),
        ((1, HEADS, 8, DIM), (1, HEADS, 7, DIM), "number of tokens"),
    ],
    ids=["batch of two", "no batch axis", "tokens differ"],
)
def test_dynamic_cache_refuses_what_it_cannot_hold(keys, values, fact):
    with pytest.raises(BadLayout, match=fact):
        DynamicCacheLayout().describe({"a": (torch.zeros(keys), torch.zeros(values))}, block_size=BLOCK)


def test_no_layers_and_unknown_dtypes_are_refused():
    for layout in (PagedLayout(AXES), DynamicCacheLayout()):
        with pytest.raises(BadLayout, match="no layers"):
            layout.describe({}, block_size=BLOCK)
    with pytest.raises(BadDtype):
        DynamicCacheLayout().describe({"a": (torch.zeros(1, 1, 4, 2, dtype=torch.int32),) * 2}, block_size=BLOCK)


def test_the_objects_of_a_declaration():
    pair = (torch.zeros(1, HEADS, 8, DIM),) * 2
    layout = DynamicCacheLayout()
    desc = layout.object_desc(layout.describe({"a": pair, "b": pair}, block_size=BLOCK), 10)
    assert desc.chunk_tokens == chunk_tokens_for([BLOCK], 10) == 12
    assert desc.groups[0].shape == (2, 2, 12, HEADS * DIM)


def test_the_default_configuration_has_all_layouts():
    assert {table.use for table in load_config(environ={}).layout} == {provider.name for provider in hook()}


def test_a_server_imports_layouts_and_transport_without_torch():
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import kvf_layouts, kvf_cpu_gather\n"
        "from kvframework.api.layout import KVLayout, LayerGroup\n"
        "provider = kvf_layouts.kvf_layouts()[0]\n"
        "layout = provider.create(provider.options())\n"
        "print(layout.object_desc(KVLayout('paged', (LayerGroup(2, 16, 4, 8, 'bfloat16'),)), 256).groups[0].shape)\n"
        "transport = kvf_cpu_gather.kvf_transports()[0]\n"
        "assert transport.probe() is None\n"
        "try: transport.create(transport.options(), None)\n"
        "except Exception as error: print(error)\n"
    )
    done = ran(sys.executable, "-c", script)
    assert "(2, 2, 256, 32)" in done.stdout
    assert "plugin.unavailable" in done.stdout
    assert "pip install" in done.stdout
