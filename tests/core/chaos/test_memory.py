"""Detection of wrong bytes by an engine of the harness, wherever they lie."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.core.chaos.memory import BLOCKS, PER_CHUNK, PagedMemory, content  # noqa: E402

pytestmark = pytest.mark.torch

DIGESTS = [bytes([number]) * 32 for number in range(3)]
BLOCK_IDS = [5, 2, 7, *range(20, 20 + 3 * PER_CHUNK - 3)]


@pytest.fixture
def memory() -> PagedMemory:
    filled = PagedMemory()
    filled.compute(b"namespace", DIGESTS, BLOCK_IDS)
    assert filled.wrong_bytes(b"namespace", DIGESTS, BLOCK_IDS) == ""
    return filled


def test_one_bit_is_seen_anywhere(memory: PagedMemory) -> None:
    for block in (5, 2, 7, 30, 0, BLOCKS - 1):
        flipped = memory._bits[1, 0, block, 3, 1, 2].clone()
        memory._bits[1, 0, block, 3, 1, 2] ^= 1 << 20
        assert memory.changed()
        assert "1 of" in memory.wrong_bytes(b"namespace", DIGESTS, BLOCK_IDS)
        memory._bits[1, 0, block, 3, 1, 2] = flipped
        assert not memory.changed()
    assert memory.wrong_bytes(b"namespace", DIGESTS, BLOCK_IDS) == ""


def test_another_namespace_another_chunk_and_another_order_are_wrong(memory: PagedMemory) -> None:
    assert memory.wrong_bytes(b"another", DIGESTS, BLOCK_IDS)
    assert memory.wrong_bytes(b"namespace", DIGESTS[::-1], BLOCK_IDS)
    assert memory.wrong_bytes(b"namespace", DIGESTS, [2, 5, *BLOCK_IDS[2:]])


def test_what_a_load_leaves_out_must_be_untouched(memory: PagedMemory) -> None:
    assert memory.wrong_bytes(b"namespace", DIGESTS, BLOCK_IDS, 20)
    poison = int(memory._bits[0, 0, 0, 0, 0, 0])
    memory._bits[:, :, 5] = poison
    memory._bits[:, :, 2, :4] = poison
    assert memory.wrong_bytes(b"namespace", DIGESTS, BLOCK_IDS, 20) == ""


def test_blocks_that_a_load_does_not_name_are_seen(memory: PagedMemory) -> None:
    assert memory.stray_bytes(BLOCK_IDS) == ""
    assert memory.stray_bytes(BLOCK_IDS[1:])


def test_content_has_no_period() -> None:
    words = content(b"namespace", DIGESTS[0]).flatten()
    assert len(set(words.tolist())) > 0.99 * len(words)
