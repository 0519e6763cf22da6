"""The layout kit's tests of the declaration, of what is refused, and of the objects that both sides see."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial

import msgspec
import pytest
import torch

from kvf_dev.testing.kit import must_refuse
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
from kvframework.api.keys import compute_namespace
from kvframework.api.layout import (
    KVLayout,
    LayerTensors,
    Layout,
    MemoryLayoutDesc,
    canonical_desc,
    chunk_tokens_for,
    validate_layout,
)
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
            must_refuse(
                f"{what}: block_views",
                partial(layout.block_views, declared, caches),
                BadLayout,
                unless=partial(_is_no_matter, what, declared=declared),
            )

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
        must_refuse(f"{what}: describe", lambda: layout.describe(caches, block_size=block_size), BadLayout)


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


CHUNKS = (1, 48, 256, 1000)
_IN_A_SERVER = """
import sys; sys.modules["torch"] = None
import msgspec
from kvframework.api.layout import KVLayout
{made}
declared = msgspec.msgpack.decode(bytes.fromhex({declared!r}), type=KVLayout)
sys.stdout.write(msgspec.msgpack.encode(layout.object_desc(declared, 48)).hex())
"""
_BY_NAME = """
from kvframework.registry import PluginRegistry
registry = PluginRegistry()
provider = registry.resolve("layout", {use!r})
layout = provider.create(registry.options(provider, {{}}, where="the kit"))
"""
_BY_CLASS = """
import importlib, operator
layout = operator.attrgetter({qualname!r})(importlib.import_module({module!r}))()
"""


class ObjectTests(LayoutKit):
    """`object_desc`, in the engine and in the server."""

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_a_server_without_the_options_sees_the_same_objects(
        self, layout: Layout, bare: Layout, declared: KVLayout, chunk: int
    ) -> None:
        desc = layout.object_desc(declared, chunk)
        assert bare.object_desc(declared, chunk) == desc, "the engine and the server describe different objects"
        tokens = chunk_tokens_for([group.block_size for group in declared.groups], declared.chunk_tokens or chunk)
        assert desc.chunk_tokens == tokens, f"chunk_tokens is {desc.chunk_tokens}, whole blocks are {tokens} tokens"
        if all(group.form == "canonical" or group.form.startswith("opaque:") for group in desc.groups):
            assert desc == canonical_desc(declared, chunk), "objects of these forms have the shapes of the core"

    def test_the_server_side_needs_no_torch(self, layout: Layout, bare: Layout, declared: KVLayout) -> None:
        """`object_desc` works in a process that cannot import torch."""
        kind = type(bare)
        made = _BY_NAME.format(use=self.use) if self.use else ""
        made = made or _BY_CLASS.format(qualname=kind.__qualname__, module=kind.__module__)
        program = _IN_A_SERVER.format(made=made, declared=msgspec.msgpack.encode(declared).hex())
        run = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert run.returncode == 0, f"a server, which has no torch, fails: {run.stderr.strip().splitlines()[-1:]}"
        found = msgspec.msgpack.decode(bytes.fromhex(run.stdout), type=MemoryLayoutDesc)
        assert found == layout.object_desc(declared, 48), "a server without torch describes other objects"

    def test_the_namespace_depends_on_the_objects_alone(self, bare: Layout, declared: KVLayout) -> None:
        replace = msgspec.structs.replace
        first, *others = declared.groups

        def namespace(group: object = first, **more: object) -> bytes:
            desc = bare.object_desc(replace(declared, groups=(group, *others), **more), 48)
            return compute_namespace(model="m", desc=desc, hasher_fingerprint="h", world_size=1)

        own = namespace()
        assert namespace() == own, "object_desc answers something else the second time"
        more = namespace(num_blocks=declared.num_blocks + 1)
        assert more == own, "engines with other numbers of blocks share no objects"
        assert namespace(replace(first, strides=())) == own, "engines with other strides share no objects"
        for field, value in {
            "num_layers": first.num_layers + 1,
            "head_dim": first.head_dim + 8,
            "planes": 3 - first.planes,
            "window": 0 if first.window else 64,
        }.items():
            if field == "window" and first.state:
                continue
            other = namespace(replace(first, **{field: value, "layer_names": ()}))
            assert other != own, f"objects with another {field} have the same namespace: engines load foreign KV"
