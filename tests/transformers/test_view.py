"""The canary of the transformers integration: its own view of a cache, against the layout that is declared."""

from __future__ import annotations

import pytest

from kvf_layouts.dynamic_cache import DynamicCacheLayout
from tests.support.lazy import torch

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    global CacheView
    from kvf_transformers.session import CacheView


def test_every_group_layer_and_plane_is_what_the_declaration_means() -> None:
    """Also where keys and values differ in size, and layers in shape."""
    sizes = [(8, 8), (8, 6), (4, 4)]
    pairs = {f"layers.{i}": (torch.randn(1, 2, 16, k), torch.randn(1, 2, 16, v)) for i, (k, v) in enumerate(sizes)}
    plugin = DynamicCacheLayout()
    layout = plugin.describe(pairs, block_size=16)
    view = CacheView(pairs)
    view.declared(layout)
    assert view.spare_blocks == (0, 0, 0, 0)
    for group, planes in enumerate(plugin.block_views(layout, pairs)):
        for plane, layers in enumerate(planes):
            for layer, expected in enumerate(layers):
                assert torch.equal(view.read(group, layer, plane, 0), expected[0])
                values = torch.randn_like(expected[0])
                view.write(group, layer, plane, 0, values)
                assert torch.equal(expected[0], values)


def test_a_state_is_one_block_of_one_slot() -> None:
    tensors = {"layers.0": (torch.randn(1, 2, 16, 4),) * 2, "states.1": torch.randn(1, 12)}
    plugin = DynamicCacheLayout(["states.*"])
    layout = plugin.describe(tensors, block_size=16)
    view = CacheView(tensors)
    view.declared(layout)
    expected = plugin.block_views(layout, tensors)[1][0][0][0]
    assert torch.equal(view.read(1, 0, 0, 0), expected)
    view.write(1, 0, 0, 0, torch.ones_like(expected))
    assert tensors["states.1"].eq(1).all()
