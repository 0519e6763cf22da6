"""The first-party layouts obey the contract of every layout, and the kit finds what planted bugs do wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import pytest

torch = pytest.importorskip("torch")

import msgspec  # noqa: E402

from kvf_layouts.dynamic_cache import DynamicCacheLayout  # noqa: E402
from kvf_layouts.opaque import OpaqueLayout  # noqa: E402
from kvf_layouts.paged import PagedLayout  # noqa: E402
from kvf_layouts.rules import PagedRule  # noqa: E402
from kvframework.api.canary import EngineView  # noqa: E402
from kvframework.api.layout import KVLayout  # noqa: E402
from kvframework.testing import LayoutConformance  # noqa: E402
from kvframework.testing.layout import LayoutSubject  # noqa: E402
from tests.kits.layout_subjects import AxesView  # noqa: E402

pytestmark = pytest.mark.torch

BLOCK = 4
SIZES = {"layer": 3, "plane": 2, "block": 5, "token": BLOCK, "head": 2, "dim": 3}
AXES = {
    "nhd": ("plane", "block", "token", "head", "dim"),
    "hnd": ("block", "plane", "head", "token", "dim"),
    "pairs": ("block", "head", "token", "dim"),
    "flat": ("token", "head", "dim"),
    "one_tensor": ("block", "layer", "plane", "token", "head", "dim"),
}


def tensor(axes: tuple[str, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = [SIZES[axis] * (SIZES["block"] if axis == "token" and "block" not in axes else 1) for axis in axes]
    return torch.zeros(shape, dtype=dtype)


def caches_of(axes: tuple[str, ...], dtype: torch.dtype = torch.float32) -> dict[str, object]:
    if "layer" in axes:
        return {"all": tensor(axes, dtype)}
    one = (lambda: tensor(axes, dtype)) if "plane" in axes else (lambda: (tensor(axes, dtype), tensor(axes, dtype)))
    return {f"layers.{index}": one() for index in range(SIZES["layer"])}


def paged(
    axes: tuple[str, ...], layout: PagedLayout | None = None, dtype: torch.dtype = torch.float32
) -> LayoutSubject:
    caches = caches_of(axes, dtype)
    view = AxesView(caches, [axes], [BLOCK], [()])
    return LayoutSubject(layout or PagedLayout(axes), PagedLayout(), caches, BLOCK, view)  # type: ignore[arg-type]


class TestPaged(LayoutConformance):
    @pytest.fixture(params=AXES)
    def subject(self, request: pytest.FixtureRequest) -> LayoutSubject:
        return paged(AXES[request.param], dtype=torch.bfloat16)


class TestHybrid(LayoutConformance):
    @pytest.fixture
    def subject(self) -> LayoutSubject:
        rules = [
            PagedRule(("full.*",), 0, 0, False, AXES["nhd"]),
            PagedRule(("swa.*",), 8, 20, False, ("block", "token", "head", "dim")),
            PagedRule(("ssm",), 0, 0, True, ("block", "dim")),
        ]
        caches = {
            "full.0": tensor(AXES["nhd"]),
            "full.1": tensor(AXES["nhd"]),
            "swa.0": (torch.zeros(4, 8, 2, 3), torch.zeros(4, 8, 2, 3)),
            "ssm": torch.zeros(6, 7),
        }
        axes = [rule.axes for rule in rules]
        view = AxesView(caches, axes, [BLOCK, 8, 1], [(), (), ()])
        return LayoutSubject(PagedLayout(rules=rules), PagedLayout(), caches, BLOCK, view)  # type: ignore[arg-type]


class OpaqueView(EngineView):
    """Whole blocks as bytes."""

    spare_blocks = (0,)

    def __init__(self, caches: Mapping[str, torch.Tensor]) -> None:
        self._layers = list(caches.values())

    def read(self, group: int, layer: int, plane: int, block: int) -> torch.Tensor:
        return self._layers[layer][block].reshape(-1).view(torch.uint8).view(1, 1, -1).clone()

    def write(self, group: int, layer: int, plane: int, block: int, values: torch.Tensor) -> None:
        target = self._layers[layer][block]
        target.copy_(values.reshape(-1).view(target.dtype).view(target.shape))


class TestOpaque(LayoutConformance):
    @pytest.fixture
    def subject(self) -> LayoutSubject:
        caches = {f"layers.{index}": torch.zeros(5, 3, 8, dtype=torch.int16) for index in range(2)}
        return LayoutSubject(OpaqueLayout("p/1", 0), OpaqueLayout(), caches, BLOCK, OpaqueView(caches))


class TestDynamicCache(LayoutConformance):
    @pytest.fixture
    def subject(self) -> LayoutSubject:
        shape = (1, SIZES["head"], SIZES["block"] * BLOCK, SIZES["dim"])
        caches = {f"layers.{index}": (torch.zeros(shape), torch.zeros(shape)) for index in range(2)}
        inner = {name: tuple(each.select(0, 0) for each in pair) for name, pair in caches.items()}
        view = AxesView(inner, [("head", "token", "dim")], [BLOCK], [()])
        return LayoutSubject(DynamicCacheLayout(), DynamicCacheLayout(), caches, BLOCK, view)


# planted bugs


class SwapsPlanes(PagedLayout):
    def block_views(self, layout, kv_caches):
        return [planes[::-1] for planes in super().block_views(layout, kv_caches)]


class ReversesLayers(PagedLayout):
    def block_views(self, layout, kv_caches):
        return [[layers[::-1] for layers in planes] for planes in super().block_views(layout, kv_caches)]


class OffByOneBlock(PagedLayout):
    def block_views(self, layout, kv_caches):
        return [
            [[torch.cat([view[1:], view[:1]]) for view in layers] for layers in planes]
            for planes in super().block_views(layout, kv_caches)
        ]


class WrongStride(PagedLayout):
    """Tokens where heads are."""

    def block_views(self, layout, kv_caches):
        return [
            [[v.as_strided(v.shape, (v.stride(0), 3, BLOCK * 3, 1)) for v in layers] for layers in planes]
            for planes in super().block_views(layout, kv_caches)
        ]


class Copies(PagedLayout):
    def block_views(self, layout, kv_caches):
        return [
            [[view.clone() for view in layers] for layers in planes]
            for planes in super().block_views(layout, kv_caches)
        ]


class SharesALayer(PagedLayout):
    def block_views(self, layout, kv_caches):
        return [[[layers[0]] * len(layers) for layers in planes] for planes in super().block_views(layout, kv_caches)]


class TakesAnything(PagedLayout):
    def block_views(self, layout, kv_caches):
        known = {name: kv_caches[name] for name in layout.groups[0].layer_names if name in kv_caches}
        return super().block_views(super().describe(known, block_size=BLOCK), known)


class OwnObjects(PagedLayout):
    """The engine says other objects than the server."""

    def object_desc(self, layout: KVLayout, chunk_size: int):
        desc = super().object_desc(layout, chunk_size)
        return msgspec.structs.replace(desc, chunk_tokens=desc.chunk_tokens + BLOCK)


BUGS: list[tuple[type[PagedLayout], str]] = [
    (SwapsPlanes, "test_views_are_the_engines_memory"),
    (ReversesLayers, "test_views_are_the_engines_memory"),
    (OffByOneBlock, "test_views_are_the_engines_memory"),
    (WrongStride, "test_views_are_the_engines_memory"),
    (Copies, "test_views_copy_nothing_and_change_nothing"),
    (Copies, "test_views_are_the_engines_memory"),
    (SharesALayer, "test_no_two_places_share_memory"),
    (TakesAnything, "test_other_tensors_than_declared_are_refused"),
    (OwnObjects, "test_a_server_without_the_options_sees_the_same_objects"),
]


@pytest.mark.parametrize(("bug", "test"), BUGS, ids=lambda each: each if isinstance(each, str) else each.__name__)
def test_the_kit_finds_a_planted_bug(bug: type[PagedLayout], test: str) -> None:
    run_kit(paged(AXES["nhd"]), test)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_kit(paged(AXES["nhd"], bug(AXES["nhd"])), test)


def run_kit(subject: LayoutSubject, name: str) -> None:
    """One test of the kit by hand."""
    method: Callable[..., None] = getattr(LayoutConformance(), name)
    declared = subject.layout.describe(subject.kv_caches, block_size=subject.block_size)
    subject.view.declared(declared)
    known = {"subject": subject, "declared": declared}
    method(**{key: known[key] for key in inspect.signature(method).parameters})
