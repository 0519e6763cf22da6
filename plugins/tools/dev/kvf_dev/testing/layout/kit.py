"""The settings and fixtures that the author of a layout gives to the kit, and what its tests share. The engine's memory
is tensors cut from slabs, none at the beginning, with foreign bytes between."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from kvf_dev.testing.making import NamedKit
from kvframework.api.layout import EngineView, KVLayout, LayerTensors, Layout, LayoutProvider

_SLAB_BYTES = 1 << 20
_GAP_BYTES = 192
_FOREIGN = 0x5A


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
        """Return how many bytes beside the tensors were written."""
        rest = [slab.clone() for slab in self._slabs]
        for slab, start, nbytes in self._own:
            rest[slab][start : start + nbytes] = _FOREIGN
        return sum(int((each != _FOREIGN).sum()) for each in rest)


# As strings, layer 10 comes before layer 2.
LAYERS, BLOCKS = 12, 5
Views = Sequence[Sequence[Sequence[torch.Tensor]]]


@dataclass(frozen=True)
class LayoutSubject:
    """One instance of an engine: its tensors, by layer name, and its own access to them.

    The tensors are small. `options` are those of the layout in this engine, if they differ from the class's `options`.
    `blocks` is the number of blocks of each layer group, if that is not for all of them the number that the kit asked
    for.
    """

    kv_caches: Mapping[str, LayerTensors]
    block_size: int
    view: EngineView
    options: Mapping[str, object] | None = None
    blocks: Sequence[int] = field(default=())


MakeSubject = Callable[[Slab, int, int], LayoutSubject]
MakeLayout = Callable[[Mapping[str, object]], Layout]


class LayoutKit(NamedKit):
    """Settings and fixtures of the kit. An author must give a fixture `make_subject`, and `use` or a fixture
    `make_layout`."""

    _descriptor = LayoutProvider

    @pytest.fixture
    def make_subject(self) -> MakeSubject:
        """Return a function of (memory, layers, blocks) that makes an instance of the engine: at least so many layers,
        so many blocks of each, and all tensors cut from `memory(*shape, dtype=...)`."""
        pytest.fail("give a fixture `make_subject`: the engine's tensors and its own view of them")

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
        """The layout as the engine makes it."""
        return self.of_engine(make_layout, subject)

    @pytest.fixture
    def bare(self, make_layout: MakeLayout) -> Layout:
        """The layout as a server makes it, without the engine's options."""
        return make_layout({})

    @pytest.fixture
    def declared(self, layout: Layout, subject: LayoutSubject) -> KVLayout:
        return declare(layout, subject)

    def of_engine(self, make_layout: MakeLayout, subject: LayoutSubject) -> Layout:
        return make_layout(self.options if subject.options is None else subject.options)


def declare(layout: Layout, subject: LayoutSubject) -> KVLayout:
    """Return the declaration of an instance; its view learns of it."""
    declared = layout.describe(subject.kv_caches, block_size=subject.block_size)
    assert isinstance(declared, KVLayout), f"describe() returns a KVLayout, not a {type(declared).__name__}"
    subject.view.declared(declared)
    return declared


def places(views: Views) -> Iterator[tuple[int, int, int, int]]:
    """Yield (group, layer, plane, block) of every place."""
    for index, planes in enumerate(views):
        for plane, layers in enumerate(planes):
            for layer, view in enumerate(layers):
                for block in range(view.shape[0]):
                    yield index, layer, plane, block


def pattern(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return finite values in the shape of a block, a different pattern for each seed."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*like.shape, like.element_size()), dtype=torch.uint8, generator=generator)
    if like.dtype.is_floating_point:
        raw[..., -1] &= 0xBF
    return raw.view(like.dtype).squeeze(-1)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether shape, dtype and all bytes are equal."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def same_memory(one: Views, other: Views) -> bool:
    """Return whether both are views of the same places."""
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


def _place(view: torch.Tensor) -> tuple[object, ...]:
    return view.data_ptr(), view.shape, view.stride(), view.dtype
