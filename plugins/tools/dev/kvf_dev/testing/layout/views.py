"""The layout kit's tests of views: the engine's memory, each place of it once; also of several instances: one layout
object serves all of a process, and keeps nothing of them."""

from __future__ import annotations

import gc

import pytest
import torch

from kvf_dev.testing.layout.kit import (
    BLOCKS,
    LAYERS,
    LayoutKit,
    LayoutSubject,
    MakeLayout,
    MakeSubject,
    Slab,
    Views,
    declare,
    pattern,
    places,
    same,
    same_memory,
    tensors_of,
)
from kvframework.api.layout import KVLayout, Layout
from kvframework.errors import BadLayout


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


class InstanceTests(LayoutKit):
    """Another instance with other tensors, and more blocks."""

    def test_instances_do_not_disturb_each_other(
        self, make_subject: MakeSubject, make_layout: MakeLayout, layout: Layout, subject: LayoutSubject
    ) -> None:
        """All are described before the views of any are made: one like the first, and one of other sizes."""
        like, other = make_subject(Slab(), LAYERS, BLOCKS), make_subject(Slab(), LAYERS + 1, BLOCKS + 2)
        blocks = {id(subject): BLOCKS, id(like): BLOCKS, id(other): BLOCKS + 2}
        subjects = (subject, other, like)
        alone = [declare(self.of_engine(make_layout, each), each) for each in subjects]
        declared = [declare(layout, each) for each in subjects]
        assert declared == alone, "an instance is described otherwise when the layout object has described another one"
        for instance, found in zip(subjects, declared, strict=True):
            expected = instance.blocks or [blocks[id(instance)]] * len(found.groups)
            assert all(found.blocks_of(at) in (0, count) for at, count in enumerate(expected)), (
                "an instance is described with the number of blocks of another one"
            )
            try:
                views = layout.block_views(found, instance.kv_caches)
            except BadLayout as error:
                pytest.fail(
                    "block_views() refuses the tensors of an instance after another was described: the declaration that"
                    f" it gets counts, not an earlier one: {error.fact[:80]}"
                )
            must_be_the_engines(views, instance)

    def test_nothing_is_kept_of_the_tensors(self, make_subject: MakeSubject, make_layout: MakeLayout) -> None:
        memory = Slab()
        subject = make_subject(memory, LAYERS, BLOCKS)
        layout = self.of_engine(make_layout, subject)
        declared = declare(layout, subject)
        layout.block_views(declared, subject.kv_caches)
        buffers = memory.buffers
        del subject, memory
        gc.collect()
        assert not any(buffer() for buffer in buffers), "the layout keeps tensors, or views, that the engine has freed"
