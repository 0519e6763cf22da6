"""The layout kit's tests of the declaration: what `describe` says of an engine's tensors."""

from __future__ import annotations

import msgspec
import pytest

from kvf_dev.testing.layout.kit import BLOCKS, LAYERS, LayoutKit, LayoutSubject, declare, tensors_of
from kvframework.api.layout import KVLayout, Layout, validate_layout
from kvframework.errors import KVFrameworkError


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
