"""Two memories that docs/plugins/layouts.md names: keys packed by x, as opaque blocks, and keys and values of different
strides, as two groups."""

import pytest

torch = pytest.importorskip("torch")

from kvf_dev.testing import LayoutConformance  # noqa: E402
from kvf_dev.testing.layout import LayoutSubject  # noqa: E402
from kvframework.api.layout import EngineView  # noqa: E402
from tests.dev.kits.layout_apart import ApartLayout  # noqa: E402

pytestmark = pytest.mark.torch

TOKENS, HEADS, DIM, X = 16, 2, 32, 8


class PackedView(EngineView):
    spare_blocks = (0,)

    def __init__(self, caches):
        self.layers = list(caches.values())

    def read(self, group, layer, plane, block):
        return self.layers[layer][plane][block].reshape(-1).view(torch.uint8).reshape(1, 1, -1).clone()

    def write(self, group, layer, plane, block, values):
        place = self.layers[layer][plane][block]
        place.copy_(values.reshape(-1).view(place.dtype).reshape(place.shape))


class TestPacked(LayoutConformance):
    use = "opaque"
    options = {"packing": f"x{X}/float16/{HEADS}x{DIM}/b{TOKENS}", "block_axis": 0}  # noqa: RUF012

    @pytest.fixture
    def make_subject(self):
        def make(memory, layers, blocks):
            def pair():
                keys = memory(blocks, HEADS, DIM // X, TOKENS, X, dtype=torch.float16)
                return keys, memory(blocks, HEADS, DIM, TOKENS, dtype=torch.float16)

            caches = {f"layer.{n}": pair() for n in range(layers)}
            return LayoutSubject(caches, block_size=TOKENS, view=PackedView(caches))

        return make


class ApartView(EngineView):
    spare_blocks = (0,)

    def __init__(self, caches):
        self.layers = list(caches.values())

    def read(self, group, layer, plane, block):
        found = self.layers[layer][group][block]
        return (found if group == 0 else found.permute(2, 0, 1)).clone()

    def write(self, group, layer, plane, block, values):
        self.layers[layer][group][block] = values if group == 0 else values.permute(1, 2, 0)


class TestApart(LayoutConformance):
    @pytest.fixture
    def make_layout(self):
        return lambda _: ApartLayout()

    @pytest.fixture
    def make_subject(self):
        def make(memory, layers, blocks):
            def pair():
                return memory(blocks, TOKENS, HEADS, DIM), memory(blocks, HEADS, DIM, TOKENS)

            caches = {f"layer.{n}": pair() for n in range(layers)}
            return LayoutSubject(caches, block_size=TOKENS, view=ApartView(caches))

        return make
