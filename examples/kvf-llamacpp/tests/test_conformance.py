"""The layout's views match llama.cpp's own address arithmetic."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from kvf_llamacpp.layout import LlamaCppLayout

from kvf_dev.testing import LayoutConformance
from kvf_dev.testing.layout import LayoutSubject, MakeSubject, Slab
from kvframework.api.layout import EngineView, KVLayout
from kvframework.errors import BadLayout

BLOCK, HEADS, DIM = 4, 2, 8
CELLS = 5 * BLOCK
REST = 3  # cells behind the last whole block


class GgmlView(EngineView):
    """Reads and writes single elements at the places where `get_k` and `get_v` of llama.cpp find them."""

    spare_blocks: Sequence[int] = ()

    def __init__(self, caches: Mapping[str, Sequence[torch.Tensor]], *, v_trans: bool) -> None:
        self._caches, self._v_trans = caches, v_trans

    def declared(self, layout: KVLayout) -> None:
        self._groups = layout.groups
        self.spare_blocks = [0] * len(layout.groups)

    def read(self, group: int, layer: int, plane: int, block: int) -> torch.Tensor:
        memory, places = self._find(group, layer, plane, block)
        return memory[places]

    def write(self, group: int, layer: int, plane: int, block: int, values: torch.Tensor) -> None:
        memory, places = self._find(group, layer, plane, block)
        memory[places] = values

    def _find(self, group: int, layer: int, plane: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All elements of a tensor in the order of their addresses, and a mask of the block's."""
        name = self._groups[group].layer_names[layer]
        role = 1 if name.endswith(".values") else plane
        tensor = self._caches[name.removesuffix(".values")][role]
        heads, dim = self._groups[group].heads, self._groups[group].head_dim
        cell = torch.arange(block * BLOCK, (block + 1) * BLOCK)[:, None, None]
        head, element = torch.arange(heads)[None, :, None], torch.arange(dim)[None, None, :]
        if role == 1 and self._v_trans:
            places = (head * dim + element) * tensor.shape[1] + cell
        else:
            places = cell * heads * dim + head * dim + element
        return tensor.view(-1), places


def layer(
    *,
    v_trans: bool,
    value_heads: int = HEADS,
    dtype: torch.dtype = torch.float16,
    cells: int = CELLS,
    memory=torch.zeros,
) -> tuple[torch.Tensor, ...]:
    hidden = value_heads * DIM
    values = memory(*((hidden, cells) if v_trans else (cells, hidden)), dtype=dtype)
    return memory(cells, HEADS * DIM, dtype=dtype), values


# The layers of a context by turns, and whether its values are transposed.
CASES = {
    "flash_attention": (False, [{}]),
    "transposed_values": (True, [{}]),
    "other_values": (True, [{"value_heads": 3}]),
    "bfloat16": (True, [{"dtype": torch.bfloat16}]),
    "latent": (False, [{}]),
    "mixed": (True, [{}, {"value_heads": 3}, {}]),
}


class TestLlamaCpp(LayoutConformance):
    use = "llamacpp"

    @pytest.fixture(params=CASES)
    def make_subject(self, request: pytest.FixtureRequest) -> MakeSubject:
        v_trans, kinds = CASES[request.param]

        def make(memory: Slab, layers: int, blocks: int) -> LayoutSubject:
            caches = {}
            for at in range(layers):
                held = layer(v_trans=v_trans, cells=blocks * BLOCK + REST, memory=memory, **kinds[at % len(kinds)])
                caches[f"l{at}"] = held[:1] if request.param == "latent" else held
            options = {"head_dim": DIM, "v_trans": v_trans}
            return LayoutSubject(caches, BLOCK, GgmlView(caches, v_trans=v_trans), options)

        return make


def test_transposed_values_and_others_are_the_same_objects() -> None:
    """A context with flash attention loads the KV that one without it has stored."""
    layouts = [LlamaCppLayout(head_dim=DIM, v_trans=v_trans) for v_trans in (False, True)]
    declared = [
        layout.describe({"l0": layer(v_trans=v_trans)}, block_size=BLOCK)
        for layout, v_trans in zip(layouts, (False, True), strict=True)
    ]
    assert layouts[0].object_desc(declared[0], 16) == layouts[1].object_desc(declared[1], 16)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (LlamaCppLayout(), "declare them"),
        (LlamaCppLayout(head_dim=DIM), "declare them"),
        (LlamaCppLayout(head_dim=7, v_trans=True), "whole heads of 7"),
        (LlamaCppLayout(head_dim=DIM, v_trans=False), "cells"),
    ],
    ids=["nothing", "no_v_trans", "other_heads", "other_v_trans"],
)
def test_what_is_not_declared_is_never_guessed(layout: LlamaCppLayout, said: str) -> None:
    with pytest.raises(BadLayout, match=said):
        layout.describe({"l0": layer(v_trans=True)}, block_size=BLOCK)


def test_several_streams_are_refused() -> None:
    with pytest.raises(BadLayout, match="one stream"):
        LlamaCppLayout(head_dim=DIM, v_trans=False).describe({"l0": torch.zeros(2, CELLS, DIM)}, block_size=BLOCK)
