"""The content that codecs are measured on, and what they are measured against."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from kvframework_bench.l2.entropy import entropy_bound


@pytest.mark.parametrize(
    ("content", "width", "bound"),
    [
        (b"", 2, 0.0),
        (b"a" * 1000, 2, 0.0),
        (bytes(range(256)) * 4, 1, 1.0),
        # Together the two bytes have a bit each, apart none.
        (b"ab" * 1000, 1, 1 / 8),
        (b"ab" * 1000, 2, 0.0),
        # A byte of noise beside one of four values, one of them half of the time: 1.75 bits.
        (b"".join(bytes((low, high)) for low in range(256) for high in b"aaaabbcd"), 2, (8 + 1.75) / 16),
        # An element that was cut off.
        (b"abc", 2, 2 / 24),
    ],
)
def test_the_bound_is_the_entropy_of_each_byte_of_an_element(content: bytes, width: int, bound: float) -> None:
    assert math.isclose(entropy_bound(memoryview(content), width), bound, abs_tol=1e-12)


def test_noise_has_a_bound_of_one() -> None:
    assert 0.999 < entropy_bound(os.urandom(1 << 20), 2) < 1


@pytest.mark.torch
def test_chunks_follow_each_other_layer_by_layer() -> None:
    torch = pytest.importorskip("torch")
    from kvframework_bench.l2.model_kv import CHUNK_TOKENS, chunks

    heads, tokens, dim = 2, 2 * CHUNK_TOKENS + 5, 3
    pairs = [tuple(torch.randn(1, heads, tokens, dim) for _ in range(2)) for _ in range(2)]
    made = list(chunks(pairs))
    assert [len(part) for part in made] == [2 * 2 * heads * CHUNK_TOKENS * dim * 2] * 2
    second = torch.frombuffer(bytearray(made[1]), dtype=torch.bfloat16).reshape(2, 2, CHUNK_TOKENS, heads, dim)
    for layer, pair in enumerate(pairs):
        for plane, whole in enumerate(pair):
            expected = whole[0, :, CHUNK_TOKENS : 2 * CHUNK_TOKENS].transpose(0, 1).to(torch.bfloat16)
            assert torch.equal(second[layer, plane], expected)


@pytest.mark.parametrize(("model", "text"), [("random", "random weights"), ("/nowhere", "unknown model")])
def test_a_model_that_has_no_kv_is_refused(model: str, text: str) -> None:
    command = [sys.executable, "-m", "kvframework_bench.l2.model_kv", __file__, os.devnull, "--model", model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
