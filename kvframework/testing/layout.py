"""The conformance kit for layouts: tests that every `Layout` must pass. Runs under pytest, needs torch.

    import pytest
    from kvframework.testing import LayoutConformance
    from kvframework.testing.layout import LayoutSubject

    class TestMyLayout(LayoutConformance):
        @pytest.fixture
        def subject(self):
            caches = {...}  # layer name -> tensors, as the engine holds them
            return LayoutSubject(MyLayout(...), MyLayout(), caches, block_size=16, view=MyEngineView(caches))

The view is the engine's own access to its memory (`EngineView`); the kit compares the layout's views with it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import pytest
import torch

from kvframework.api.canary import EngineView
from kvframework.api.keys import compute_namespace
from kvframework.api.layout import KVLayout, LayerTensors, Layout, canonical_desc, chunk_tokens_for, validate_layout
from kvframework.errors import BadLayout
from kvframework.testing.kit import Kit

__all__ = ["LayoutConformance", "LayoutSubject"]

_CHUNK = 48


@dataclass(frozen=True)
class LayoutSubject:
    """The layout under test: `layout` as the engine makes it, `bare` as a server does, without the engine's options.
    The tensors are small and have at least two layers and two blocks; `view` reads and writes any block of them.
    """

    layout: Layout
    bare: Layout
    kv_caches: Mapping[str, LayerTensors]
    block_size: int
    view: EngineView


class LayoutConformance(Kit):
    """Base class of an author's test class, which gives a `subject` fixture: a new subject for every test."""

    @pytest.fixture
    def subject(self) -> LayoutSubject:
        raise NotImplementedError("give a `subject` fixture")

    @pytest.fixture
    def declared(self, subject: LayoutSubject) -> KVLayout:
        declared = subject.layout.describe(subject.kv_caches, block_size=subject.block_size)
        subject.view.declared(declared)
        return declared

    # the declaration

    def test_the_declaration_is_valid_and_names_the_layout(self, subject: LayoutSubject, declared: KVLayout) -> None:
        validate_layout(declared)
        assert declared.format == subject.layout.name == subject.bare.name
        assert subject.layout.describe(subject.kv_caches, block_size=subject.block_size) == declared, "every time"

    def test_every_layer_is_in_one_group(self, subject: LayoutSubject, declared: KVLayout) -> None:
        names = [name for group in declared.groups for name in group.layer_names]
        assert names, "layers are declared by their names"
        # One tensor may hold several layers, and unequal keys and values of one layer may be in two groups.
        known = [
            max((each for each in subject.kv_caches if name.startswith(each)), key=len, default="") for name in names
        ]
        assert set(known) == set(subject.kv_caches)
        for group in declared.groups:
            assert len(group.layer_names) == group.num_layers == len(set(group.layer_names))

    def test_the_declaration_survives_the_wire(self, declared: KVLayout) -> None:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(declared), type=KVLayout) == declared

    def test_a_server_without_the_options_sees_the_same_objects(
        self, subject: LayoutSubject, declared: KVLayout
    ) -> None:
        desc = subject.layout.object_desc(declared, _CHUNK)
        assert subject.bare.object_desc(declared, _CHUNK) == desc
        assert desc.chunk_tokens == chunk_tokens_for([group.block_size for group in declared.groups], _CHUNK)
        if all(group.form == "canonical" or group.form.startswith("opaque:") for group in desc.groups):
            assert desc == canonical_desc(declared, _CHUNK), "objects of these forms have the shapes of the core"

    def test_the_server_half_needs_no_torch(self, subject: LayoutSubject, declared: KVLayout) -> None:
        """`object_desc` works in a process that cannot import torch."""
        kind = type(subject.bare)
        program = (
            "import sys; sys.modules['torch'] = None\n"
            "import importlib, msgspec\n"
            "from kvframework.api.layout import KVLayout\n"
            f"layout = getattr(importlib.import_module({kind.__module__!r}), {kind.__qualname__!r})()\n"
            f"packed = bytes.fromhex({msgspec.msgpack.encode(declared).hex()!r})\n"
            "declared = msgspec.msgpack.decode(packed, type=KVLayout)\n"
            f"print(layout.object_desc(declared, {_CHUNK}).nbytes)\n"
        )
        run = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        assert int(run.stdout) == subject.layout.object_desc(declared, _CHUNK).nbytes

    def test_the_namespace_depends_on_the_objects_alone(self, subject: LayoutSubject, declared: KVLayout) -> None:
        def namespace(layout: KVLayout) -> bytes:
            desc = subject.layout.object_desc(layout, _CHUNK)
            return compute_namespace(model="m", desc=desc, hasher_fingerprint="h", world_size=1)

        more_blocks = msgspec.structs.replace(declared, num_blocks=declared.num_blocks + 1)
        assert namespace(more_blocks) == namespace(declared)
        first = declared.groups[0]
        deeper = (msgspec.structs.replace(first, num_layers=first.num_layers + 1, layer_names=()), *declared.groups[1:])
        assert namespace(msgspec.structs.replace(declared, groups=deeper)) != namespace(declared)

    # the views

    def test_views_have_the_declared_shapes(self, subject: LayoutSubject, declared: KVLayout) -> None:
        views = subject.layout.block_views(declared, subject.kv_caches)
        assert len(views) == len(declared.groups)
        for index, (planes, group) in enumerate(zip(views, declared.groups, strict=True)):
            assert [len(layers) for layers in planes] == [group.num_layers] * group.planes
            for view in (view for layers in planes for view in layers):
                assert view.shape[1:] == (group.slots, group.heads, group.head_dim)
                assert view.shape[0] == (declared.blocks_of(index) or view.shape[0]) >= 2
                assert str(view.dtype) == f"torch.{group.dtype}"

    def test_views_are_the_engines_memory(self, subject: LayoutSubject, declared: KVLayout) -> None:
        """A write by the engine is visible through the views, bit for bit, and the reverse."""
        views = subject.layout.block_views(declared, subject.kv_caches)
        for number, (index, layer, plane, block) in enumerate(_places(views)):
            view = views[index][plane][layer][block]
            pattern = _pattern(view, 2 * number)
            subject.view.write(index, layer, plane, block, pattern)
            assert _same(view, pattern), f"group {index}, layer {layer}, plane {plane}, block {block}: engine to layout"
            pattern = _pattern(view, 2 * number + 1)
            view.copy_(pattern)
            found = subject.view.read(index, layer, plane, block)
            assert _same(found, pattern), (
                f"group {index}, layer {layer}, plane {plane}, block {block}: layout to engine"
            )

    def test_no_two_places_share_memory(self, subject: LayoutSubject, declared: KVLayout) -> None:
        """With a different pattern in every place, no write overwrites another place."""
        views = subject.layout.block_views(declared, subject.kv_caches)
        for index in range(len(views)):
            places = [place for place in _places(views) if place[0] == index]
            for number, (_, layer, plane, block) in enumerate(places):
                view = views[index][plane][layer][block]
                view.copy_(_pattern(view, number))
            for number, (_, layer, plane, block) in enumerate(places):
                view = views[index][plane][layer][block]
                assert _same(view, _pattern(view, number)), f"layer {layer}, plane {plane}, block {block}"

    def test_views_copy_nothing_and_change_nothing(self, subject: LayoutSubject, declared: KVLayout) -> None:
        before = [tensor.clone() for tensor in _tensors(subject.kv_caches)]
        storages = {tensor.untyped_storage().data_ptr() for tensor in _tensors(subject.kv_caches)}
        views = subject.layout.block_views(declared, subject.kv_caches)
        for view in (view for group in views for plane in group for view in plane):
            assert view.untyped_storage().data_ptr() in storages
        for tensor, was in zip(_tensors(subject.kv_caches), before, strict=True):
            assert _same(tensor, was)

    # refusals

    def test_other_tensors_than_declared_are_refused(self, subject: LayoutSubject, declared: KVLayout) -> None:
        caches = dict(subject.kv_caches)
        last = list(caches)[-1]
        fewer = {name: tensors for name, tensors in caches.items() if name != last}
        for wrong in ([fewer] if fewer else []) + [
            {name: _each(tensors, lambda tensor: tensor.to(torch.float64)) for name, tensors in caches.items()},
            {**caches, "one.more.layer": caches[last]},
        ]:
            with pytest.raises(BadLayout):
                subject.layout.block_views(declared, wrong)

    def test_what_cannot_be_described_is_refused(self, subject: LayoutSubject) -> None:
        for caches, block_size in (({}, subject.block_size), (subject.kv_caches, 0)):
            with pytest.raises(BadLayout):
                subject.layout.describe(caches, block_size=block_size)


def _places(views: list[list[list[torch.Tensor]]]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (group, layer, plane, block) of every place."""
    for index, planes in enumerate(views):
        for plane, layers in enumerate(planes):
            for layer, view in enumerate(layers):
                for block in range(view.shape[0]):
                    yield index, layer, plane, block


def _pattern(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return finite values in the shape of a block, a different pattern for each seed."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*like.shape, like.element_size()), dtype=torch.uint8, generator=generator)
    if like.dtype.is_floating_point:
        raw[..., -1] &= 0xBF
    return raw.view(like.dtype).squeeze(-1)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _tensors(caches: Mapping[str, LayerTensors]) -> list[torch.Tensor]:
    return [
        tensor
        for tensors in caches.values()
        for tensor in (tensors if isinstance(tensors, (tuple, list)) else (tensors,))
    ]


def _each(tensors: LayerTensors, change: Callable[[torch.Tensor], torch.Tensor]) -> LayerTensors:
    return tuple(map(change, tensors)) if isinstance(tensors, (tuple, list)) else change(tensors)  # type: ignore[arg-type]
