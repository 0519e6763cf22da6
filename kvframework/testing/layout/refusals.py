"""The layout kit's tests of refusals: tensors that are not those of the declaration, and what cannot be described."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch

from kvframework.api.layout import KVLayout, LayerTensors, Layout
from kvframework.errors import BadLayout
from kvframework.testing.layout.kit import LayoutKit, LayoutSubject, Views, each, same_memory, tensors_of


class RefusalTests(LayoutKit):
    """`BadLayout`, and no other error."""

    def test_other_tensors_than_declared_are_refused(
        self, layout: Layout, subject: LayoutSubject, declared: KVLayout
    ) -> None:
        for what, caches in _wrong(subject.kv_caches):
            try:
                views = layout.block_views(declared, caches)
            except BadLayout:
                continue
            except Exception as error:  # noqa: BLE001  any other is the bug
                pytest.fail(f"{what}: block_views raises {type(error).__name__} instead of BadLayout: {error}")
            if "shorter" in what and _has_fewer_blocks(views, declared):
                continue
            pytest.fail(f"{what}: block_views raises no BadLayout")

    def test_tensors_in_another_order_are_the_same_or_refused(
        self, layout: Layout, subject: LayoutSubject, declared: KVLayout
    ) -> None:
        """Layers have names: the order of a mapping must not move KV to another layer."""
        expected = layout.block_views(declared, subject.kv_caches)
        try:
            found = layout.block_views(declared, dict(list(subject.kv_caches.items())[::-1]))
        except BadLayout:
            return
        assert same_memory(found, expected), "with kv_caches in another order the views are of other layers"

    @pytest.mark.parametrize("what", ["no layers", "block_size 0", "block_size -1"])
    def test_what_cannot_be_described_is_refused(self, layout: Layout, subject: LayoutSubject, what: str) -> None:
        caches = {} if what == "no layers" else subject.kv_caches
        block_size = {"block_size 0": 0, "block_size -1": -1}.get(what, subject.block_size)
        try:
            layout.describe(caches, block_size=block_size)
        except BadLayout:
            return
        except Exception as error:  # noqa: BLE001  any other is the bug
            pytest.fail(f"{what}: describe raises {type(error).__name__} instead of BadLayout: {error}")
        pytest.fail(f"{what}: describe raises no BadLayout")


def _has_fewer_blocks(views: Views, declared: KVLayout) -> bool:
    """Return whether the views are of whole blocks, fewer than before: no transfer of those that are there is wrong."""
    for planes, group in zip(views, declared.groups, strict=True):
        if any(view.shape[1:] != (group.slots, group.heads, group.head_dim) for plane in planes for view in plane):
            return False
    return len({view.shape[0] for planes in views for plane in planes for view in plane}) > 1


def _wrong(caches: Mapping[str, LayerTensors]) -> Iterator[tuple[str, Mapping[str, LayerTensors]]]:
    first, last = next(iter(caches)), list(caches)[-1]
    yield "no layers at all", {}
    if len(caches) > 1:
        yield "the last layer is missing", {name: tensors for name, tensors in caches.items() if name != last}
        yield "the first layer is missing", {name: tensors for name, tensors in caches.items() if name != first}
        yield "a layer has another name", {(name if name != last else "other"): held for name, held in caches.items()}
    yield "one more layer", {**caches, "one.more.layer": caches[last]}
    yield "another dtype", {name: each(held, lambda tensor: tensor.to(torch.float64)) for name, held in caches.items()}
    if len(caches) > 1:
        yield "another dtype of the last layer", {**caches, last: each(caches[last], lambda one: one.to(torch.float64))}
    held = caches[last]
    for axis in range(tensors_of({last: held})[0].dim()):

        def cut(tensor: torch.Tensor, axis: int = axis) -> torch.Tensor:
            # Values may have fewer axes than x-packed keys.
            return tensor.narrow(axis, 0, tensor.shape[axis] - 1) if axis < tensor.dim() else tensor

        if len(caches) > 1:
            yield f"the last layer is shorter along its axis {axis}", {**caches, last: each(held, cut)}
    if isinstance(held, (tuple, list)) and len(held) > 1:
        yield "the last layer has keys and no values", {**caches, last: held[:1]}
