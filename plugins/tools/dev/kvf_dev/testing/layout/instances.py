"""The layout kit's tests of several instances: one layout object serves all of a process, and keeps nothing of them."""

from __future__ import annotations

import gc

import pytest

from kvf_dev.testing.layout.kit import (
    BLOCKS,
    LAYERS,
    LayoutKit,
    LayoutSubject,
    MakeLayout,
    MakeSubject,
    declare,
    same_memory,
)
from kvf_dev.testing.layout.slab import Slab
from kvf_dev.testing.layout.views import must_be_the_engines
from kvframework.api.layout import Layout
from kvframework.errors import BadLayout


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

    def test_instances_with_more_blocks_share_objects(
        self, make_subject: MakeSubject, make_layout: MakeLayout, layout: Layout, subject: LayoutSubject
    ) -> None:
        other = make_subject(Slab(), LAYERS, BLOCKS + 2)
        of_other = self.of_engine(make_layout, other)
        one = layout.object_desc(declare(layout, subject), 48)
        assert of_other.object_desc(declare(of_other, other), 48) == one, "more blocks make other objects"

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

    def test_threads_do_not_disturb_each_other(
        self, make_subject: MakeSubject, layout: Layout, subject: LayoutSubject
    ) -> None:
        subjects = [subject, make_subject(Slab(), LAYERS + 1, BLOCKS + 2)]
        declared = [declare(layout, each) for each in subjects]
        views = [layout.block_views(told, each.kv_caches) for told, each in zip(declared, subjects, strict=True)]

        def work(at: int) -> None:
            for _ in range(20):
                told = layout.describe(subjects[at].kv_caches, block_size=subjects[at].block_size)
                assert told == declared[at], "threads disturb each other in describe()"
                found = layout.block_views(told, subjects[at].kv_caches)
                assert same_memory(found, views[at]), "threads disturb each other in block_views()"

        self.in_threads(*(lambda at=at: work(at) for at in (0, 1, 0, 1)))
