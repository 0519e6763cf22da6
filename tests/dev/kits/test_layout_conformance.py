"""The first-party layouts obey the contract of every layout, whatever the engine's axes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

torch = pytest.importorskip("torch")

from kvf_dev.testing import LayoutConformance  # noqa: E402
from kvf_dev.testing.layout import LayoutSubject, MakeSubject, Slab  # noqa: E402
from kvframework.api.layout import EngineView  # noqa: E402
from tests.dev.kits.layout_subjects import AXES, BLOCK, AxesView, paged, tensor  # noqa: E402

pytestmark = pytest.mark.torch


class TestPaged(LayoutConformance):
    use = "paged"

    @pytest.fixture(params=AXES)
    def make_subject(self, request: pytest.FixtureRequest) -> MakeSubject:
        return paged(AXES[request.param], dtype=torch.bfloat16)


class TestHybrid(LayoutConformance):
    use = "paged"

    @pytest.fixture
    def make_subject(self) -> MakeSubject:
        pair = ("block", "token", "head", "dim")
        groups = [
            {"layers": ["full.*"], "axes": [*AXES["nhd"]]},
            {"layers": ["swa.*"], "axes": [*pair], "block_size": 8, "window": 20},
            {"layers": ["ssm"], "axes": ["block", "dim"], "state": True},
        ]

        def make(memory: Slab, layers: int, blocks: int) -> LayoutSubject:
            caches = {f"full.{at}": tensor(memory, AXES["nhd"], 0, blocks) for at in range(layers - 2)}
            caches["swa.0"] = (memory(blocks - 1, 8, 2, 3), memory(blocks - 1, 8, 2, 3))
            caches["ssm"] = memory(blocks + 1, 7)
            view = AxesView(caches, [AXES["nhd"], pair, ("block", "dim")], [BLOCK, 8, 1], [(), (), ()])
            return LayoutSubject(caches, BLOCK, view, {"groups": groups}, [blocks, blocks - 1, blocks + 1])

        return make


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
    use = "opaque"
    options = {"packing": "p/1", "block_axis": 0}  # noqa: RUF012

    @pytest.fixture
    def make_subject(self) -> MakeSubject:
        def make(memory: Slab, layers: int, blocks: int) -> LayoutSubject:
            caches = {f"layers.{at}": memory(blocks, 3, 8, dtype=torch.int16) for at in range(layers)}
            return LayoutSubject(caches, BLOCK, OpaqueView(caches))

        return make


class TestDynamicCache(LayoutConformance):
    use = "dynamic_cache"

    @pytest.fixture
    def make_subject(self) -> MakeSubject:
        def make(memory: Slab, layers: int, blocks: int) -> LayoutSubject:
            shape = (1, 2, blocks * BLOCK, 3)
            caches = {f"layers.{at}": (memory(*shape), memory(*shape)) for at in range(layers)}
            inner = {name: tuple(each.select(0, 0) for each in pair) for name, pair in caches.items()}
            return LayoutSubject(caches, BLOCK, AxesView(inner, [("head", "token", "dim")], [BLOCK], [()]))

        return make
