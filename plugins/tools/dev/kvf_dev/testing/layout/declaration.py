"""The layout kit's tests of the declaration: what `describe` says of an engine's tensors, and what it refuses: tensors
that are not those of the declaration, and what cannot be described."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import pytest
import torch

from kvf_dev.testing.layout.kit import (
    BLOCKS,
    LAYERS,
    LayoutKit,
    LayoutSubject,
    Views,
    declare,
    each,
    same_memory,
    tensors_of,
)
from kvframework.api.layout import KVLayout, LayerTensors, Layout, validate_layout
from kvframework.errors import BadLayout, KVFrameworkError


class DeclarationTests(LayoutKit):
    """Names, layers, sizes."""

    def test_it_has_the_plugins_name(self, layout: Layout, bare: Layout, declared: KVLayout) -> None:
        self.must_be_named(layout.name)
        assert bare.name == layout.name, f"a server's layout is named {bare.name!r}, the engine's {layout.name!r}"
        assert declared.format == layout.name, f"`format` is {declared.format!r}, and the layout's name {layout.name!r}"

    def test_the_declaration_is_valid(self, layout: Layout, subject: LayoutSubject, declared: KVLayout) -> None:
        try:
            validate_layout(declared)
        except KVFrameworkError as error:
            pytest.fail(f"the declaration contradicts itself: {error}")
        assert declare(layout, subject) == declared, "describe() answers something else the second time"

    def test_every_layer_is_in_one_group(self, subject: LayoutSubject, declared: KVLayout) -> None:
        names = [name for group in declared.groups for name in group.layer_names]
        assert len(names) >= LAYERS, f"{len(names)} layers are declared; the kit asked `make_subject` for {LAYERS}"
        assert len(set(names)) == len(names), f"a layer is declared twice: {sorted(names)}"
        order = list(subject.kv_caches)
        # One tensor may hold several layers, and unequal keys and values of one layer may be in two groups.
        entries = {name: max((each for each in order if _is_of(name, each)), key=len, default="") for name in names}
        assert "" not in entries.values(), f"layers are declared by their names in kv_caches, and not as {names[:4]}"
        missing = set(order) - set(entries.values())
        assert not missing, f"layers are not declared: {sorted(missing)}"
        for index, group in enumerate(declared.groups):
            assert len(group.layer_names) == group.num_layers, (
                f"group {index} has num_layers={group.num_layers} and names {len(group.layer_names)} layers"
            )
            places = [(order.index(entries[name]), _number(name)) for name in group.layer_names]
            assert places == sorted(places), (
                f"group {index} is not in the order of kv_caches, the engine's order of layers: {group.layer_names}"
            )

    def test_the_sizes_are_the_engines(self, subject: LayoutSubject, declared: KVLayout) -> None:
        for index, group in enumerate(declared.groups):
            expected = subject.blocks[index] if subject.blocks else BLOCKS
            assert declared.blocks_of(index) in (0, expected), (
                f"group {index} is declared with {declared.blocks_of(index)} blocks, and the engine has {expected}"
            )
            read = subject.view.read(index, group.num_layers - 1, group.planes - 1, expected - 1)
            assert tuple(read.shape) == (group.slots, group.heads, group.head_dim), (
                f"group {index}: the engine reads blocks of [slots, heads, head_dim] = {list(read.shape)}; declared are"
                f" {[group.slots, group.heads, group.head_dim]}"
            )
            assert str(read.dtype) == f"torch.{group.dtype}", (
                f"group {index}: the engine reads {read.dtype}, declared is {group.dtype}"
            )

    def test_declared_strides_are_those_of_the_tensors(self, subject: LayoutSubject, declared: KVLayout) -> None:
        """Transports that know only the declaration find each element by them."""
        for index, group in enumerate(declared.groups):
            held = {name: subject.kv_caches[name] for name in group.layer_names if name in subject.kv_caches}
            for tensor in tensors_of(held):
                if group.strides and tensor.dim() == len(group.axes):
                    assert tuple(tensor.stride()) == group.strides, (
                        f"group {index}: the strides of a tensor are {tuple(tensor.stride())}, declared are"
                        f" {group.strides}"
                    )

    def test_the_declaration_survives_the_wire(self, declared: KVLayout) -> None:
        back = msgspec.msgpack.decode(msgspec.msgpack.encode(declared), type=KVLayout)
        assert back == declared, "a server gets another declaration over the wire than the engine sent"


def _is_of(name: str, entry: str) -> bool:
    return name == entry or name.startswith(f"{entry}.")


def _number(name: str) -> int:
    """Return the layer's number in a tensor of several, 0 for none."""
    last = name.rpartition(".")[2]
    return int(last) if last.isdecimal() else 0


# By pairs of one width.
_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.int32),
    *(torch.int8, torch.uint8, torch.float64, torch.int64),
)


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
            if _is_no_matter(what, views, declared):
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


def _is_no_matter(what: str, views: Views, declared: KVLayout) -> bool:
    """Return whether the change leaves whole blocks of the declared form, as many as declared: what is behind the last
    one is left out. Where the declaration gives no number, transports hold it against the blocks of each transfer."""
    if "of the same width" in what:
        return all(group.packing for group in declared.groups)  # whose blocks are bytes
    return (
        " along its axis " in what
        and len(views) == len(declared.groups)
        and all(
            tuple(view.shape) == (declared.blocks_of(at) or view.shape[0], group.slots, group.heads, group.head_dim)
            for at, (planes, group) in enumerate(zip(views, declared.groups, strict=True))
            for plane in planes
            for view in plane
        )
    )


def _wrong(caches: Mapping[str, LayerTensors]) -> Iterator[tuple[str, Mapping[str, LayerTensors]]]:
    first, last = next(iter(caches)), list(caches)[-1]
    yield "no layers at all", {}
    if len(caches) > 1:
        yield "the last layer is missing", {name: tensors for name, tensors in caches.items() if name != last}
        yield "the first layer is missing", {name: tensors for name, tensors in caches.items() if name != first}
        yield "a layer has another name", {(name if name != last else "other"): held for name, held in caches.items()}
    held = caches[last]
    yield "one more layer", {**caches, "one.more.layer": caches[last]}
    yield "another dtype", {name: each(held, lambda tensor: tensor.to(torch.float64)) for name, held in caches.items()}
    if len(caches) > 1:
        yield "another dtype of the last layer", {**caches, last: each(caches[last], lambda one: one.to(torch.float64))}
    yield (
        "another dtype of the same width",
        {name: each(one, lambda tensor: tensor.view(_twin(tensor.dtype))) for name, one in caches.items()},
    )
    yield (
        "another dtype of the same width in the last layer",
        {**caches, last: each(held, lambda tensor: tensor.view(_twin(tensor.dtype)))},
    )
    for axis in range(tensors_of({last: held})[0].dim()):

        def cut(tensor: torch.Tensor, axis: int = axis) -> torch.Tensor:
            # Values may have fewer axes than x-packed keys.
            return tensor.narrow(axis, 0, tensor.shape[axis] - 1) if axis < tensor.dim() else tensor

        def grown(tensor: torch.Tensor, axis: int = axis) -> torch.Tensor:
            return torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis) if axis < tensor.dim() else tensor

        for how, change in (("shorter", cut), ("longer", grown)):
            yield f"every layer is {how} along its axis {axis}", {name: each(caches[name], change) for name in caches}
            if len(caches) > 1:
                yield f"the last layer is {how} along its axis {axis}", {**caches, last: each(held, change)}
    if isinstance(held, (tuple, list)) and len(held) > 1:
        yield "the last layer has keys and no values", {**caches, last: held[:1]}


def _twin(dtype: torch.dtype) -> torch.dtype:
    """Return another dtype whose elements are as wide."""
    return next(each for each in _DTYPES if each is not dtype and each.itemsize == dtype.itemsize)
