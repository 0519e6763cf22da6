"""The contents of a `MemoryTensor` in host memory, without torch."""

from __future__ import annotations

import ctypes
import gc

import pytest

from kvframework.api.layout import MemoryTensor
from kvframework.errors import BadLayout


def test_contents_are_the_memory_and_keep_its_owner() -> None:
    memory = ctypes.create_string_buffer(bytes(range(24)), 24)
    tensor = MemoryTensor(ctypes.addressof(memory), [3, 4], "float16", owner=memory)
    row = tensor.select(0, 1).contents()
    assert (row.format, row.nbytes, bytes(row)) == ("B", 8, bytes(range(8, 16)))
    row[0] = 99
    assert memory[8] == b"\x63"
    whole = tensor.contents()
    del memory, tensor
    gc.collect()
    assert bytes(whole[16:]) == bytes(range(16, 24))


def test_a_tensor_with_gaps_has_no_contents() -> None:
    with pytest.raises(BadLayout, match="not contiguous"):
        MemoryTensor(0, [3, 4], "float16").select(1, 0).contents()
