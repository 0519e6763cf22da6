"""Each planted bug of a layout fails the test of the kit that is there for it, with the promise that it breaks.

A bug is one line of `BUGS`: what is wrong, the test that must fail, and what it says. Each changes `PagedLayout`.
"""
# ruff: noqa: ARG005, B905, E501  the arguments are those of the contract

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from msgspec.structs import replace  # noqa: E402

from kvf_dev.testing import LayoutConformance  # noqa: E402
from kvf_dev.testing.layout import (  # noqa: E402
    BLOCKS,
    LAYERS,
    Slab,
    declare,
)
from kvf_layouts.paged import PagedLayout  # noqa: E402
from kvframework.api.layout import KVLayout, Layout, canonical_desc  # noqa: E402
from tests.dev.kits.kit_run import must_fail  # noqa: E402
from tests.dev.kits.layout_subjects import AXES, paged  # noqa: E402

pytestmark = pytest.mark.torch

Views = list[list[list[Any]]]


def views(change: Callable[[Views], Any]) -> type[PagedLayout]:
    """A layout whose views are changed as a whole."""

    class Bug(PagedLayout):
        def block_views(self, layout: KVLayout, kv_caches: Any) -> Any:
            return change(super().block_views(layout, kv_caches))

    return Bug


def each_view(change: Callable[[Any, int, int], Any]) -> type[PagedLayout]:
    """A layout of which each view is changed: `change(view, plane, layer)`."""
    return views(
        lambda groups: [
            [[change(view, plane, at) for at, view in enumerate(layers)] for plane, layers in enumerate(planes)]
            for planes in groups
        ]
    )


def declared(change: Callable[[KVLayout], KVLayout]) -> type[PagedLayout]:
    """A layout whose declaration is changed, and whose views are right."""

    class Bug(PagedLayout):
        def describe(self, kv_caches: Any, *, block_size: int) -> KVLayout:
            self.right = super().describe(kv_caches, block_size=block_size)
            return change(self.right)

        def block_views(self, layout: KVLayout, kv_caches: Any) -> Any:
            return super().block_views(getattr(self, "right", layout), kv_caches)

    return Bug


def group(**fields: Any) -> type[PagedLayout]:
    """A layout whose groups are declared with other fields: functions of the group."""

    def change(layout: KVLayout) -> KVLayout:
        groups = [replace(each, **{name: new(each) for name, new in fields.items()}) for each in layout.groups]
        return replace(layout, groups=tuple(groups))

    return declared(change)


class SortsNames(PagedLayout):
    def describe(self, kv_caches: Any, *, block_size: int) -> KVLayout:
        return super().describe(dict(sorted(kv_caches.items())), block_size=block_size)

    def block_views(self, layout: KVLayout, kv_caches: Any) -> Any:
        return super().block_views(layout, dict(sorted(kv_caches.items())))


class TakesTheOrderGiven(PagedLayout):
    def block_views(self, layout: KVLayout, kv_caches: Any) -> Any:
        names = [name for each in layout.groups for name in each.layer_names]
        return super().block_views(layout, dict(zip(names, kv_caches.values())))


class RemembersTheFirst(PagedLayout):
    first: KVLayout | None = None

    def describe(self, kv_caches: Any, *, block_size: int) -> KVLayout:
        self.first = self.first or super().describe(kv_caches, block_size=block_size)
        return self.first


class RemembersTheLast(PagedLayout):
    def describe(self, kv_caches: Any, *, block_size: int) -> KVLayout:
        self.last = dict(kv_caches)
        return super().describe(kv_caches, block_size=block_size)

    def block_views(self, layout: KVLayout, kv_caches: Any) -> Any:
        try:
            return super().block_views(layout, self.last)
        except Exception:  # noqa: BLE001
            return super().block_views(layout, kv_caches)


class RemembersBlocksOfTheClass(PagedLayout):
    blocks: ClassVar[list[int]] = []

    def describe(self, kv_caches: Any, *, block_size: int) -> KVLayout:
        found = super().describe(kv_caches, block_size=block_size)
        self.blocks.append(found.num_blocks)
        return replace(found, num_blocks=self.blocks[0])


class KeepsTensors(PagedLayout):
    kept: ClassVar[list[Any]] = []

    def block_views(self, layout: KVLayout, kv_caches: Any) -> Any:
        found = super().block_views(layout, kv_caches)
        self.kept.append(found)
        return found


class TakesAnything(PagedLayout):
    def block_views(self, layout: KVLayout, kv_caches: Any) -> Any:
        known = {name: kv_caches[name] for name in layout.groups[0].layer_names if name in kv_caches}
        return super().block_views(super().describe(known, block_size=4), known)


class RaisesItsOwn(PagedLayout):
    def block_views(self, layout: KVLayout, kv_caches: Any) -> Any:
        for name in layout.groups[0].layer_names:
            kv_caches[name]
        return super().block_views(layout, kv_caches)


class IgnoresMore(PagedLayout):
    def block_views(self, layout: KVLayout, kv_caches: Any) -> Any:
        return super().block_views(layout, {name: each for name, each in kv_caches.items() if "more" not in name})


class Casts(PagedLayout):
    def block_views(self, layout: KVLayout, kv_caches: Any) -> Any:
        dtype = getattr(torch, layout.groups[0].dtype)
        return super().block_views(layout, {name: each.to(dtype) for name, each in kv_caches.items()})


class TakesAnyNumberOfBlocks(PagedLayout):
    def block_views(self, layout: KVLayout, kv_caches: Any) -> Any:
        return super().block_views(replace(layout, num_blocks=0), kv_caches)


class KnowsTheWidthOfElements(PagedLayout):
    def block_views(self, layout: KVLayout, kv_caches: Any) -> Any:
        dtype = getattr(torch, layout.groups[0].dtype)
        known = {
            name: each.view(dtype) if each.itemsize == dtype.itemsize else each for name, each in kv_caches.items()
        }
        return super().block_views(layout, known)


class AcceptsNothing(PagedLayout):
    def describe(self, kv_caches: Any, *, block_size: int) -> KVLayout:
        if not kv_caches:
            return KVLayout(self.name, ())
        return super().describe(kv_caches, block_size=block_size)


class DividesByTheBlockSize(PagedLayout):
    def describe(self, kv_caches: Any, *, block_size: int) -> KVLayout:
        4 // block_size
        return super().describe(kv_caches, block_size=block_size)


class Clears(PagedLayout):
    def describe(self, kv_caches: Any, *, block_size: int) -> KVLayout:
        for each in kv_caches.values():
            each[..., 0].zero_()
        return super().describe(kv_caches, block_size=block_size)


class Strings(PagedLayout):
    def describe(self, kv_caches: Any, *, block_size: int) -> KVLayout:
        return str(super().describe(kv_caches, block_size=block_size))  # type: ignore[return-value]


class OtherObjectsInTheEngine(PagedLayout):
    def object_desc(self, layout: KVLayout, chunk_size: int) -> Any:
        desc = super().object_desc(layout, chunk_size)
        return replace(desc, chunk_tokens=desc.chunk_tokens + 4) if self._axes else desc


class RoundsChunksDown(PagedLayout):
    def object_desc(self, layout: KVLayout, chunk_size: int) -> Any:
        return super().object_desc(layout, max(chunk_size // 16 * 16, 1))


class OwnForm(PagedLayout):
    """A form of its own that leaves out the number of layers."""

    def object_desc(self, layout: KVLayout, chunk_size: int) -> Any:
        desc = super().object_desc(layout, chunk_size)
        groups = [replace(each, shape=(1, 1, *each.shape[2:]), form="own/1") for each in desc.groups]
        return replace(desc, groups=tuple(groups))


class ObjectsOfAllBlocks(PagedLayout):
    def object_desc(self, layout: KVLayout, chunk_size: int) -> Any:
        desc = super().object_desc(layout, chunk_size)
        groups = [replace(each, form=f"own/{layout.num_blocks}") for each in desc.groups]
        return replace(desc, groups=tuple(groups))


class ObjectsOfTheStrides(PagedLayout):
    def object_desc(self, layout: KVLayout, chunk_size: int) -> Any:
        desc = canonical_desc(layout, chunk_size)
        groups = [replace(each, form=f"own/{group.strides}") for each, group in zip(desc.groups, layout.groups)]
        return replace(desc, groups=tuple(groups))


class NeedsTorch(PagedLayout):
    def object_desc(self, layout: KVLayout, chunk_size: int) -> Any:
        import torch

        getattr(torch, layout.groups[0].dtype)
        return super().object_desc(layout, chunk_size)


class NamedOtherwise(PagedLayout):
    def __init__(self, axes: Any = ()) -> None:
        super().__init__(axes)
        self.name = "paged" if axes else "bare"


VALID = "test_the_declaration_is_valid"
NAMES = "test_it_has_the_plugins_name"
LAYER = "test_every_layer_is_in_one_group"
SIZES = "test_the_sizes_are_the_engines"
STRIDES = "test_declared_strides_are_those_of_the_tensors"
OBJECTS = "test_a_server_without_the_options_sees_the_same_objects"
NAMESPACE = "test_the_namespace_depends_on_the_objects_alone"
SHAPES = "test_views_have_the_declared_shapes"
MEMORY = "test_views_are_the_engines_memory"
COPIES = "test_making_views_changes_nothing"
REFUSED = "test_other_tensors_than_declared_are_refused"
ORDER = "test_tensors_in_another_order_are_the_same_or_refused"
INSTANCES = "test_instances_do_not_disturb_each_other"
KEPT = "test_nothing_is_kept_of_the_tensors"

# fmt: off
BUGS: dict[str, tuple[type[Layout], str, str]] = {
    # views
    "planes swapped": (views(lambda all_: [planes[::-1] for planes in all_]), MEMORY, "the bytes that the engine wrote"),
    "layers backwards": (views(lambda all_: [[layers[::-1] for layers in planes] for planes in all_]), MEMORY, "layer 0"),
    "layers of V shifted": (views(lambda all_: [[planes[0], [*planes[1][1:], planes[1][0]]] for planes in all_]), MEMORY, "plane 1"),
    "one block further": (each_view(lambda v, p, at: torch.cat([v[1:], v[:1]])), MEMORY, "block 0"),
    "no last block": (each_view(lambda v, p, at: v[:-1]), SHAPES, "[blocks, slots, heads, head_dim]"),
    "the last layer only": (each_view(lambda v, p, at: v[:-1] if at == LAYERS - 1 else v), SHAPES, "[blocks, slots, heads, head_dim]"),
    "tokens where heads are": (each_view(lambda v, p, at: v.transpose(1, 2)), SHAPES, "[blocks, slots, heads, head_dim]"),
    "strides of tokens and heads": (each_view(lambda v, p, at: v.as_strided(v.shape, (v.stride(0), 3, 12, 1), v.storage_offset())), MEMORY, "block 0"),
    "from the storage's beginning": (each_view(lambda v, p, at: v.as_strided(v.shape, v.stride(), 0)), MEMORY, "block"),
    "from the first layer's beginning": (views(lambda all_: [[[_at(planes[0][0], view) for view in layers] for layers in planes] for planes in all_]), MEMORY, "layer 1, plane 0"),
    "heads backwards": (each_view(lambda v, p, at: v[:, :, [1, 0]]), MEMORY, "the bytes that the engine wrote"),
    "heads swapped in V": (each_view(lambda v, p, at: _swapped(v) if p else v), MEMORY, "plane 1"),
    "tokens backwards": (each_view(lambda v, p, at: v.flip(1)), MEMORY, "the bytes that the engine wrote"),
    "copies": (each_view(lambda v, p, at: v.clone()), MEMORY, "the bytes that the engine wrote"),
    "a copy of layer 10": (each_view(lambda v, p, at: v.clone() if at == 10 else v), MEMORY, "layer 10"),
    "copies of what is not dense": (each_view(lambda v, p, at: v.contiguous()), MEMORY, "the bytes that the engine wrote"),
    "one layer for all": (views(lambda all_: [[[layers[0]] * len(layers) for layers in planes] for planes in all_]), MEMORY, "the bytes that the engine wrote"),
    "K for V": (views(lambda all_: [[planes[0]] * 2 for planes in all_]), MEMORY, "plane 1"),
    "layers before planes": (views(lambda all_: [list(map(list, zip(*planes))) for planes in all_]), SHAPES, "[plane][layer]"),
    "one block for all": (each_view(lambda v, p, at: v[:1].expand(v.shape)), MEMORY, "the bytes that the engine wrote"),
    "overlapping blocks": (each_view(lambda v, p, at: v.as_strided(v.shape, (v.stride(0) // 2, *v.stride()[1:]), v.storage_offset())), MEMORY, "the bytes that the engine wrote"),
    "another dtype": (each_view(lambda v, p, at: v.view(torch.int32)), SHAPES, "[plane][layer]"),
    "writes what it sees": (Clears, COPIES, "wrote to the engine's memory"),
    # declarations
    "another name": (declared(lambda told: replace(told, format="page")), NAMES, "`format` is 'page'; it must be"),
    "another name in a server": (NamedOtherwise, NAMES, "A server's layout is named 'bare'"),
    "no declaration": (Strings, VALID, "a str, not a KVLayout"),
    "no dtype of torch": (group(dtype=lambda each: "torch.float32"), VALID, "contradicts itself"),
    "one layer less": (group(num_layers=lambda each: each.num_layers - 1), VALID, "contradicts itself"),
    "no names": (group(layer_names=lambda each: ()), LAYER, "named 0 layers"),
    "numbers for names": (group(layer_names=lambda each: tuple(map(str, range(each.num_layers)))), LAYER, "must name layers as in kv_caches"),
    "a layer twice": (group(layer_names=lambda each: (each.layer_names[1], *each.layer_names[1:])), LAYER, "declares a layer twice"),
    "names sorted as strings": (SortsNames, LAYER, "in the order of kv_caches"),
    "heads and dim swapped": (group(heads=lambda each: each.head_dim, head_dim=lambda each: each.heads), SIZES, "must have the engine's block size"),
    "half the dtype": (group(dtype=lambda each: "float16"), SIZES, "must have the engine's block size"),
    "one block more": (declared(lambda told: replace(told, num_blocks=told.num_blocks + 1)), SIZES, "must have 5 blocks"),
    "slots for blocks": (declared(lambda told: replace(told, num_blocks=told.num_blocks * 4)), SIZES, "must have 5 blocks"),
    "strides in bytes": (group(strides=lambda each: tuple(4 * stride for stride in each.strides)), STRIDES, "wrong strides declared"),
    "strides backwards": (group(strides=lambda each: each.strides[::-1]), STRIDES, "wrong strides declared"),
    # objects
    "other objects in the engine": (OtherObjectsInTheEngine, f"{OBJECTS}[48]", "Engine and server must describe the same"),
    "chunks rounded down": (RoundsChunksDown, f"{OBJECTS}[1000]", "`chunk_tokens` is 992, expected 1000"),
    "a form without the layers": (OwnForm, NAMESPACE, "Another num_layers must change the namespace"),
    "a form with all blocks": (ObjectsOfAllBlocks, NAMESPACE, "The number of blocks must not change the namespace"),
    "a form with strides": (ObjectsOfTheStrides, NAMESPACE, "Strides must not change the namespace"),
    "torch in a server": (NeedsTorch, "test_the_server_side_needs_no_torch", "plugin failed in a second process"),
    # refusals
    "takes anything": (TakesAnything, REFUSED, "was accepted"),
    "takes one more": (IgnoresMore, REFUSED, "there is one more layer, was accepted; it must raise BadLayout"),
    "casts": (Casts, REFUSED, "has another dtype, was accepted; it must raise BadLayout"),
    "any number of blocks": (TakesAnyNumberOfBlocks, REFUSED, "shorter along its axis"),
    "a dtype of the same width": (KnowsTheWidthOfElements, REFUSED, "has another dtype of the same width, was accepted"),
    "an error of its own": (RaisesItsOwn, REFUSED, "raised KeyError, expected BadLayout"),
    "the order given": (TakesTheOrderGiven, ORDER, "must find layers by name"),
    "accepts nothing": (AcceptsNothing, "test_what_cannot_be_described_is_refused[no layers]", "it must raise BadLayout"),
    "divides by the block size": (DividesByTheBlockSize, "test_what_cannot_be_described_is_refused[block_size 0]", "ZeroDivisionError, expected BadLayout"),
    # instances
    "remembers the first": (RemembersTheFirst, INSTANCES, "must not depend on an instance"),
    "remembers the last": (RemembersTheLast, INSTANCES, "the bytes that the engine wrote"),
    "remembers blocks in its class": (RemembersBlocksOfTheClass, INSTANCES, "of another instance"),
    "keeps tensors": (KeepsTensors, KEPT, "that the engine has freed"),
}
# fmt: on


def _at(first: Any, view: Any) -> Any:
    return view.as_strided(view.shape, view.stride(), first.storage_offset())


def _swapped(view: Any) -> Any:
    return torch.stack([view[:, :, 1], view[:, :, 0]], dim=2)


@pytest.mark.parametrize("bug", BUGS)
def test_the_kit_finds(bug: str) -> None:
    kind, test, says = BUGS[bug]
    make_subject, memory = paged(AXES["hnd" if "not dense" in bug else "nhd"]), Slab()
    subject = make_subject(memory, LAYERS, BLOCKS)

    def make_layout(options: Mapping[str, Any]) -> Layout:
        return kind(*options.values())

    def fixtures() -> Mapping[str, Any]:
        layout = make_layout(subject.options or {})
        made = {"make_subject": make_subject, "memory": memory, "make_layout": make_layout, "subject": subject}
        return {**made, "layout": layout, "bare": make_layout({}), "declared": declare(layout, subject)}

    must_fail(LayoutConformance(), test, fixtures, says)
