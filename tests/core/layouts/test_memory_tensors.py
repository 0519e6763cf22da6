"""Layouts see memory at an address as they see torch's tensors of the same memory, in a process that has no torch."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvf_dev.testing.transport.engine import CASES, MemoryModel
from kvf_layouts.declaring import OpaqueRule, PagedRule
from kvf_layouts.opaque import OpaqueLayout
from kvf_layouts.paged import PagedLayout
from kvframework.api.layout import MemoryTensor, dtype_name
from kvframework.errors import BadDtype
from tests.support.lazy import torch
from tests.support.processes import ran

BLOCKS, FIRST = 16, 1 << 20


def seen(name: str, *, by_torch: bool) -> list[object]:
    """Describe the engine of a case; return the declaration, and each view with its distance from the first tensor."""
    groups, caches, at = CASES[name], dict[str, Any](), FIRST
    model = MemoryModel(groups, [BLOCKS] * len(groups), 1)
    memory = torch.zeros(1 << 20, dtype=torch.uint8) if by_torch else None
    for (index, layer, plane), shape in model.shapes.items():
        tensor = MemoryTensor(at, shape, groups[index].dtype)
        at += tensor.nbytes
        if memory is not None:
            piece = memory[tensor.address - FIRST : at - FIRST]
            tensor = piece.view(getattr(torch, tensor.dtype)).view(shape)
        key = f"g{index}.{layer}"
        caches[key] = tensor if plane < 0 or groups[index].planes == 1 else (*caches.get(key, ()), tensor)
    tables = [group.table(f"g{index}.*", index) for index, group in enumerate(groups)]
    rules = msgspec.convert(tables, list[OpaqueRule] if groups[0].opaque else list[PagedRule])
    layout = OpaqueLayout("test/1", rules=rules) if groups[0].opaque else PagedLayout(rules=rules)
    declared = layout.describe(caches, block_size=groups[0].block_size)
    origin = memory.data_ptr() if memory is not None else FIRST
    views = [view for planes in layout.block_views(declared, caches) for plane in planes for view in plane]
    places = [(each.data_ptr() - origin, tuple(each.shape), each.stride(), dtype_name(each)) for each in views]
    return [repr(declared), places]


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(CASES))
def test_it_is_seen_as_a_tensor_of_torch(name: str) -> None:
    assert seen(name, by_torch=False) == seen(name, by_torch=True)


def test_a_process_without_torch_describes_the_same() -> None:
    program = f"""
import sys; sys.modules["torch"] = None
from {__name__} import CASES, seen
print({{name: seen(name, by_torch=False) for name in CASES}})"""
    done = ran(sys.executable, "-c", program, cwd=Path(__file__).parents[3])
    assert ast.literal_eval(done.stdout) == {name: seen(name, by_torch=False) for name in CASES}


def test_a_dtype_that_no_layout_declares_is_refused() -> None:
    with pytest.raises(BadDtype, match="unknown dtype 'half'"):
        MemoryTensor(FIRST, (2, 3), "half")
