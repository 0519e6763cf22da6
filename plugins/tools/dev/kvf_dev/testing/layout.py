"""The conformance kit for layouts: tests that every `Layout` must pass, see docs/plugins/layouts.md.

The view of a `LayoutSubject` is the engine's own access to its memory (`EngineView`); the kit compares the layout's
views with it. Runs under pytest, needs torch.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, cast

import msgspec
import pytest
import torch

from kvf_dev.testing.kit import NamedKit, must_refuse
from kvframework.api.keys import compute_namespace
from kvframework.api.layout import (
    BlockViews,
    EngineView,
    KVLayout,
    LayerTensors,
    Layout,
    LayoutProvider,
    MemoryLayoutDesc,
    TensorLike,
    canonical_desc,
    chunk_tokens_for,
    validate_layout,
)
from kvframework.errors import BadLayout, KVFrameworkError

__all__ = ["LayoutConformance", "LayoutSubject", "MakeLayout", "MakeSubject", "Slab"]

_SLAB_BYTES = 1 << 20
_GAP_BYTES = 192
_FOREIGN = 0x5A
MakeLayout = Callable[[Mapping[str, object]], Layout]
# By pairs of one width.
_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.int32),
    *(torch.int8, torch.uint8, torch.float64, torch.int64),
)
CHUNKS = (1, 48, 256, 1000)
_IN_A_SERVER = """
import msgspec
from kvframework.api.layout import KVLayout
declared = msgspec.msgpack.decode({declared!r}, type=KVLayout)
sys.stdout.buffer.write(msgspec.msgpack.encode(made.object_desc(declared, 48)))
"""
# As strings, layer 10 comes before layer 2.
LAYERS, BLOCKS = 12, 5


class _Buffer(bytearray):
    """Memory that can be watched."""


class Slab:
    """Call it with a shape for a contiguous tensor, as an engine calls its allocator."""

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []
        # Alive as long as a tensor, or a view of one, is.
        self.buffers: list[weakref.ref[bytearray]] = []
        self._used = 0
        self._own: list[tuple[int, int, int]] = []

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if not self._slabs or self._used + nbytes + 2 * _GAP_BYTES > self._slabs[-1].numel():
            buffer = _Buffer(bytes([_FOREIGN]) * max(_SLAB_BYTES, nbytes + 3 * _GAP_BYTES))
            self._slabs.append(torch.frombuffer(buffer, dtype=torch.uint8))
            self.buffers.append(weakref.ref(buffer))
            self._used = 0
        start = self._used + _GAP_BYTES
        self._used = -(-(start + nbytes) // 64) * 64
        self._own.append((len(self._slabs) - 1, start, nbytes))
        return self._slabs[-1][start : start + nbytes].view(dtype).view(shape)

    def foreign_bytes_changed(self) -> int:
        """Return how many bytes outside the tensors differ from what `Slab` wrote there."""
        rest = [slab.clone() for slab in self._slabs]
        for slab, start, nbytes in self._own:
            rest[slab][start : start + nbytes] = _FOREIGN
        return sum(int((each != _FOREIGN).sum()) for each in rest)


@dataclass(frozen=True)
class LayoutSubject:
    """One instance of an engine: its small tensors by layer name, and its own access to them.

    `options` are those of the layout in this engine, if they differ from the class's. `blocks` is the number of blocks
    of each layer group, if that is not for all of them the number that the kit asked for.
    """

    kv_caches: Mapping[str, LayerTensors]
    block_size: int
    view: EngineView
    options: Mapping[str, object] | None = None
    blocks: Sequence[int] = field(default=())


MakeSubject = Callable[[Slab, int, int], LayoutSubject]


def declare(layout: Layout, subject: LayoutSubject) -> KVLayout:
    declared = layout.describe(subject.kv_caches, block_size=subject.block_size)
    assert isinstance(declared, KVLayout), f"`describe` returned a {type(declared).__name__}, not a KVLayout"
    subject.view.declared(declared)
    return declared


class Place(NamedTuple):
    group: int
    layer: int
    plane: int
    block: int

    def __str__(self) -> str:
        return f"group {self.group}, layer {self.layer}, plane {self.plane}, block {self.block}"


def places(views: BlockViews) -> Iterator[tuple[Place, torch.Tensor]]:
    for index, planes in enumerate(views):
        for plane, layers in enumerate(planes):
            for layer, view in enumerate(layers):
                for block in range(view.shape[0]):
                    yield Place(index, layer, plane, block), cast("torch.Tensor", view)[block]


def pattern(like: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*like.shape, like.element_size()), dtype=torch.uint8, generator=generator)
    if like.dtype.is_floating_point:
        raw[..., -1] &= 0xBF
    return raw.view(like.dtype).squeeze(-1)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def same_memory(one: BlockViews, other: BlockViews) -> bool:
    return [[[_place(view) for view in layers] for layers in planes] for planes in one] == [
        [[_place(view) for view in layers] for layers in planes] for planes in other
    ]


def tensors_of(caches: Mapping[str, LayerTensors]) -> list[torch.Tensor]:
    return [
        tensor
        for tensors in caches.values()
        for tensor in (tensors if isinstance(tensors, (tuple, list)) else (tensors,))
    ]


def each(tensors: LayerTensors, change: Callable[[torch.Tensor], torch.Tensor]) -> LayerTensors:
    return tuple(map(change, tensors)) if isinstance(tensors, (tuple, list)) else change(tensors)  # type: ignore[arg-type]


def _place(view: TensorLike) -> tuple[object, ...]:
    return view.data_ptr(), view.shape, view.stride(), view.dtype


def _is_of(name: str, entry: str) -> bool:
    return name == entry or name.startswith(f"{entry}.")


def _number(name: str) -> int:
    last = name.rpartition(".")[2]
    return int(last) if last.isdecimal() else 0


def _is_no_matter(what: str, views: BlockViews, declared: KVLayout) -> bool:
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
    first, *_, last = list(caches) * 2
    yield "there are no layers", {}
    yield "the last layer is missing", {name: held for name, held in caches.items() if name != last}
    yield "the first layer is missing", {name: held for name, held in caches.items() if name != first}
    yield "a layer has another name", {(name if name != last else "other"): held for name, held in caches.items()}
    yield "there is one more layer", {**caches, "one.more.layer": caches[last]}
    if isinstance(held := caches[last], (tuple, list)) and len(held) > 1:
        yield "the last layer has keys and no values", {**caches, last: held[:1]}
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "has another dtype": lambda tensor: tensor.to(torch.float64),
        "has another dtype of the same width": lambda tensor: tensor.view(_twin(tensor.dtype)),
    }
    for axis in range(tensors_of({last: caches[last]})[0].dim()):
        changes[f"is shorter along its axis {axis}"] = partial(_resized, axis=axis, more=-1)
        changes[f"is longer along its axis {axis}"] = partial(_resized, axis=axis, more=1)
    for what, change in changes.items():
        yield f"every layer {what}", {name: each(held, change) for name, held in caches.items()}
        yield f"the last layer {what}", {**caches, last: each(caches[last], change)}


def _resized(tensor: torch.Tensor, axis: int, more: int) -> torch.Tensor:
    if axis >= tensor.dim():  # values may have fewer axes than x-packed keys
        return tensor
    if more < 0:
        return tensor.narrow(axis, 0, tensor.shape[axis] + more)
    return torch.cat([tensor, tensor.narrow(axis, 0, more)], axis)


def _twin(dtype: torch.dtype) -> torch.dtype:
    return next(each for each in _DTYPES if each is not dtype and each.itemsize == dtype.itemsize)


def must_be_the_engines(views: BlockViews, subject: LayoutSubject) -> None:
    __tracebackhide__ = True
    for number, (place, view) in enumerate(places(views)):
        written = pattern(view, 2 * number)
        subject.view.write(*place, written)
        assert same(view, written), f"{place}: the layout's view does not show the bytes that the engine wrote"
        written = pattern(view, 2 * number + 1)
        view.copy_(written)
        found: torch.Tensor = subject.view.read(*place)
        assert same(found, written), f"{place}: the engine does not read the bytes written through the layout's view"


class LayoutConformance(NamedKit):
    """Base class of an author's test class: gives a fixture `make_subject`, and `use` or a fixture `make_layout`."""

    _descriptor = LayoutProvider

    @pytest.fixture
    def make_subject(self) -> MakeSubject:
        """Return a function (memory, layers, blocks) that makes an instance of the engine: at least so many layers, so
        many blocks of each, and all tensors cut from `memory(*shape, dtype=...)`."""
        pytest.fail("Define a fixture `make_subject`: the engine's tensors and its own view of them")

    @pytest.fixture
    def make_layout(self) -> MakeLayout:
        """Return a function of the options that makes the layout: an engine gives its options, a server none."""
        self.by_name()  # a wrong name or option is an error here, and not in each test
        return lambda options: self.by_name(options)()

    @pytest.fixture
    def memory(self) -> Slab:
        return Slab()

    @pytest.fixture
    def subject(self, make_subject: MakeSubject, memory: Slab) -> LayoutSubject:
        return make_subject(memory, LAYERS, BLOCKS)

    @pytest.fixture
    def layout(self, make_layout: MakeLayout, subject: LayoutSubject) -> Layout:
        return self.of_engine(make_layout, subject)

    @pytest.fixture
    def bare(self, make_layout: MakeLayout) -> Layout:
        return make_layout({})

    @pytest.fixture
    def declared(self, layout: Layout, subject: LayoutSubject) -> KVLayout:
        return declare(layout, subject)

    def of_engine(self, make_layout: MakeLayout, subject: LayoutSubject) -> Layout:
        return make_layout(self.options if subject.options is None else subject.options)

    def test_it_has_the_plugins_name(self, layout: Layout, bare: Layout, declared: KVLayout) -> None:
        self.must_be_named(layout.name)
        assert bare.name == layout.name, f"A server's layout is named {bare.name!r}, the engine's {layout.name!r}"
        assert declared.format == layout.name, f"`format` is {declared.format!r}; it must be {layout.name!r}"

    def test_the_declaration_is_valid(self, layout: Layout, subject: LayoutSubject, declared: KVLayout) -> None:
        try:
            validate_layout(declared)
        except KVFrameworkError as error:
            pytest.fail(f"`describe` returned a declaration that contradicts itself: {error}")
        assert declare(layout, subject) == declared, "`describe` must return the same declaration at each call"

    def test_every_layer_is_in_one_group(self, subject: LayoutSubject, declared: KVLayout) -> None:
        names = [name for group in declared.groups for name in group.layer_names]
        assert len(names) >= LAYERS, f"`describe` named {len(names)} layers; `make_subject` was to make {LAYERS}"
        assert len(set(names)) == len(names), f"`describe` declares a layer twice: {sorted(names)}"
        order = list(subject.kv_caches)
        # One tensor may hold several layers, and unequal keys and values of one layer may be in two groups.
        entries = {name: max((each for each in order if _is_of(name, each)), key=len, default="") for name in names}
        assert "" not in entries.values(), f"`describe` must name layers as in kv_caches, but named {names[:4]}"
        missing = set(order) - set(entries.values())
        assert not missing, f"`describe` left out layers: {sorted(missing)}"
        for index, group in enumerate(declared.groups):
            places = [(order.index(entries[name]), _number(name)) for name in group.layer_names]
            assert places == sorted(places), f"Group {index} must list layers in the order of kv_caches"

    def test_the_sizes_are_the_engines(self, subject: LayoutSubject, declared: KVLayout) -> None:
        for index, group in enumerate(declared.groups):
            expected = subject.blocks[index] if subject.blocks else BLOCKS
            assert declared.blocks_of(index) in (0, expected), f"Group {index} must have {expected} blocks"
            read = subject.view.read(index, group.num_layers - 1, group.planes - 1, expected - 1)
            form = ((group.slots, group.heads, group.head_dim), f"torch.{group.dtype}")
            assert (tuple(read.shape), str(read.dtype)) == form, f"Group {index} must have the engine's block size"

    def test_declared_strides_are_those_of_the_tensors(self, subject: LayoutSubject, declared: KVLayout) -> None:
        """Transports that know only the declaration find each element by them."""
        for index, group in enumerate(declared.groups):
            held = {name: subject.kv_caches[name] for name in group.layer_names if name in subject.kv_caches}
            for tensor in tensors_of(held):
                if group.strides and tensor.dim() == len(group.axes):
                    assert tuple(tensor.stride()) == group.strides, f"Group {index}: wrong strides declared"

    def test_views_have_the_declared_shapes(self, layout: Layout, subject: LayoutSubject, declared: KVLayout) -> None:
        views = layout.block_views(declared, subject.kv_caches)
        assert len(views) == len(declared.groups), f"`block_views` has {len(views)} groups, not {len(declared.groups)}"
        for index, (planes, group) in enumerate(zip(views, declared.groups, strict=True)):
            blocks = subject.blocks[index] if subject.blocks else BLOCKS
            form = ((blocks, group.slots, group.heads, group.head_dim), f"torch.{group.dtype}")
            found = [[(tuple(view.shape), str(view.dtype)) for view in layers] for layers in planes]
            why = f"Group {index}: `block_views` must return [plane][layer], each [blocks, slots, heads, head_dim]"
            assert found == [[form] * group.num_layers] * group.planes, why

    def test_making_views_changes_nothing(self, layout: Layout, subject: LayoutSubject) -> None:
        for tensor in tensors_of(subject.kv_caches):
            tensor.copy_(pattern(tensor, 1))
        before = [tensor.clone() for tensor in tensors_of(subject.kv_caches)]
        declared = layout.describe(subject.kv_caches, block_size=subject.block_size)
        views = layout.block_views(declared, subject.kv_caches)
        for tensor, was in zip(tensors_of(subject.kv_caches), before, strict=True):
            assert same(tensor, was), "`describe` or `block_views` wrote to the engine's memory"
        again = layout.block_views(declared, subject.kv_caches)
        assert same_memory(views, again), "`block_views` must return views of the same memory at each call"

    def test_views_are_the_engines_memory(
        self, layout: Layout, subject: LayoutSubject, declared: KVLayout, memory: Slab
    ) -> None:
        views = layout.block_views(declared, subject.kv_caches)
        must_be_the_engines(views, subject)
        changed = memory.foreign_bytes_changed()
        assert not changed, f"Writes through the views changed {changed} bytes outside the engine's tensors"

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_a_server_without_the_options_sees_the_same_objects(
        self, layout: Layout, bare: Layout, declared: KVLayout, chunk: int
    ) -> None:
        desc = layout.object_desc(declared, chunk)
        assert bare.object_desc(declared, chunk) == desc, "Engine and server must describe the same"
        tokens = chunk_tokens_for([group.block_size for group in declared.groups], declared.chunk_tokens or chunk)
        assert desc.chunk_tokens == tokens, f"`chunk_tokens` is {desc.chunk_tokens}, expected {tokens}"
        if all(group.form == "canonical" or group.form.startswith("opaque:") for group in desc.groups):
            assert desc == canonical_desc(declared, chunk), "The objects' shapes must be those that the core computes"

    def test_the_server_side_needs_no_torch(self, layout: Layout, bare: Layout, declared: KVLayout) -> None:
        program = _IN_A_SERVER.format(declared=msgspec.msgpack.encode(declared))
        found = msgspec.msgpack.decode(self.elsewhere(bare, program, without="torch"), type=MemoryLayoutDesc)
        assert found == layout.object_desc(declared, 48), "A server without torch must describe the same objects"

    def test_the_namespace_depends_on_the_objects_alone(self, bare: Layout, declared: KVLayout) -> None:
        replace = msgspec.structs.replace
        first, *others = declared.groups

        def namespace(group: object = first, **more: object) -> bytes:
            desc = bare.object_desc(replace(declared, groups=(group, *others), **more), 48)
            return compute_namespace(model="m", desc=desc, hasher_fingerprint="h", world_size=1)

        own = namespace()
        assert namespace() == own, "`object_desc` must return the same description at each call"
        more = namespace(num_blocks=declared.num_blocks + 1)
        assert more == own, "The number of blocks must not change the namespace, or engines share nothing"
        assert namespace(replace(first, strides=())) == own, "Strides must not change the namespace or sharing ends"
        for name, value in {
            "num_layers": first.num_layers + 1,
            "head_dim": first.head_dim + 8,
            "planes": 3 - first.planes,
            "window": 0 if first.window else 64,
        }.items():
            if name == "window" and first.state:
                continue
            other = namespace(replace(first, **{name: value, "layer_names": ()}))
            assert other != own, f"Another {name} must change the namespace, or engines load wrong KV"

    def test_other_tensors_than_declared_are_refused(
        self, layout: Layout, subject: LayoutSubject, declared: KVLayout
    ) -> None:
        for what, caches in _wrong(subject.kv_caches):
            must_refuse(
                f"`block_views`, where {what},",
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
        assert same_memory(found, expected), "`block_views` must find layers by name, not by the order of kv_caches"

    @pytest.mark.parametrize("what", ["no layers", "block_size 0", "block_size -1"])
    def test_what_cannot_be_described_is_refused(self, layout: Layout, subject: LayoutSubject, what: str) -> None:
        caches = {} if what == "no layers" else subject.kv_caches
        block_size = {"block_size 0": 0, "block_size -1": -1}.get(what, subject.block_size)
        must_refuse(f"`describe` with {what}", lambda: layout.describe(caches, block_size=block_size), BadLayout)

    def test_instances_do_not_disturb_each_other(
        self, make_subject: MakeSubject, make_layout: MakeLayout, layout: Layout, subject: LayoutSubject
    ) -> None:
        """All are described before the views of any are made: one like the first, and one of other sizes."""
        like, other = make_subject(Slab(), LAYERS, BLOCKS), make_subject(Slab(), LAYERS + 1, BLOCKS + 2)
        blocks = {id(subject): BLOCKS, id(like): BLOCKS, id(other): BLOCKS + 2}
        subjects = (subject, other, like)
        alone = [declare(self.of_engine(make_layout, each), each) for each in subjects]
        declared = [declare(layout, each) for each in subjects]
        assert declared == alone, "`describe` must not depend on an instance described before"
        for instance, found in zip(subjects, declared, strict=True):
            expected = instance.blocks or [blocks[id(instance)]] * len(found.groups)
            of_others = any(found.blocks_of(at) not in (0, count) for at, count in enumerate(expected))
            assert not of_others, "`block_views` used the number of blocks of another instance"
            must_be_the_engines(layout.block_views(found, instance.kv_caches), instance)

    def test_nothing_is_kept_of_the_tensors(self, make_subject: MakeSubject, make_layout: MakeLayout) -> None:
        memory = Slab()
        subject = make_subject(memory, LAYERS, BLOCKS)
        layout = self.of_engine(make_layout, subject)
        declared = declare(layout, subject)
        layout.block_views(declared, subject.kv_caches)
        buffers = memory.buffers
        del subject, memory
        gc.collect()
        assert not any(buffer() for buffer in buffers), "The layout keeps tensors or views that the engine has freed"
