"""The layout kit's tests of views: the engine's memory, each place of it once."""

from __future__ import annotations

import torch

from kvf_dev.testing.layout.kit import (
    BLOCKS,
    LayoutKit,
    LayoutSubject,
    Views,
    pattern,
    places,
    same,
    same_memory,
    tensors_of,
)
from kvf_dev.testing.layout.slab import Slab
from kvframework.api.layout import KVLayout, Layout


class ViewTests(LayoutKit):
    """`block_views`."""

    def test_views_have_the_declared_shapes(self, layout: Layout, subject: LayoutSubject, declared: KVLayout) -> None:
        views = layout.block_views(declared, subject.kv_caches)
        assert len(views) == len(declared.groups), f"views of {len(views)} groups; {len(declared.groups)} are declared"
        for index, (planes, group) in enumerate(zip(views, declared.groups, strict=True)):
            found = [len(layers) for layers in planes]
            assert found == [group.num_layers] * group.planes, (
                f"group {index} has views [plane][layer] of {found} layers; declared are {group.planes} planes of"
                f" {group.num_layers}"
            )
            blocks = subject.blocks[index] if subject.blocks else BLOCKS
            for view in (view for layers in planes for view in layers):
                assert tuple(view.shape) == (blocks, group.slots, group.heads, group.head_dim), (
                    f"group {index}: a view is {list(view.shape)}; [blocks, slots, heads, head_dim] are"
                    f" {[blocks, group.slots, group.heads, group.head_dim]}"
                )
                assert str(view.dtype) == f"torch.{group.dtype}", (
                    f"group {index}: a view has {view.dtype}, declared is {group.dtype}"
                )

    def test_views_copy_nothing_and_change_nothing(self, layout: Layout, subject: LayoutSubject) -> None:
        for tensor in tensors_of(subject.kv_caches):
            tensor.copy_(pattern(tensor, 1))
        before = [tensor.clone() for tensor in tensors_of(subject.kv_caches)]
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(subject.kv_caches)}
        declared = layout.describe(subject.kv_caches, block_size=subject.block_size)
        views = layout.block_views(declared, subject.kv_caches)
        for index, layer, plane, _ in places(views):
            view = views[index][plane][layer]
            assert view.untyped_storage().data_ptr() in storages, (
                f"group {index}, layer {layer}, plane {plane}: the view is a copy, and no memory of the engine"
            )
        for tensor, was in zip(tensors_of(subject.kv_caches), before, strict=True):
            assert same(tensor, was), "describe() or block_views() writes to the engine's memory"
        again = layout.block_views(declared, subject.kv_caches)
        assert same_memory(views, again), "block_views() answers something else the second time"

    def test_views_are_the_engines_memory(
        self, layout: Layout, subject: LayoutSubject, declared: KVLayout, memory: Slab
    ) -> None:
        """A write by the engine is visible through the views, bit for bit, and the reverse."""
        views = layout.block_views(declared, subject.kv_caches)
        must_be_the_engines(views, subject)
        changed = memory.foreign_bytes_changed()
        assert not changed, f"writes through the views change {changed} bytes beside the engine's tensors"

    def test_no_two_places_share_memory(self, layout: Layout, subject: LayoutSubject, declared: KVLayout) -> None:
        """With a different pattern in every place, no write overwrites another place."""
        views = layout.block_views(declared, subject.kv_caches)
        every = list(places(views))
        for number, (index, layer, plane, block) in enumerate(every):
            view = views[index][plane][layer][block]
            view.copy_(pattern(view, number))
        for number, (index, layer, plane, block) in enumerate(every):
            view = views[index][plane][layer][block]
            assert same(view, pattern(view, number)), (
                f"group {index}, layer {layer}, plane {plane}, block {block} shares memory with another place"
            )


def must_be_the_engines(views: Views, subject: LayoutSubject) -> None:
    """Fail unless the views and the engine's own view show the same bytes in each place, written by either."""
    __tracebackhide__ = True
    for number, (index, layer, plane, block) in enumerate(places(views)):
        view = views[index][plane][layer][block]
        place = f"group {index}, layer {layer}, plane {plane}, block {block}"
        written = pattern(view, 2 * number)
        subject.view.write(index, layer, plane, block, written)
        assert same(view, written), f"{place}: what the engine writes there is not in the layout's view"
        written = pattern(view, 2 * number + 1)
        view.copy_(written)
        found: torch.Tensor = subject.view.read(index, layer, plane, block)
        assert same(found, written), f"{place}: what is written through the layout's view is not what the engine reads"
