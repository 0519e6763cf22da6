"""Where a hit is cut never changes what an engine says: in 32 bits nothing does, and in 16 bits a hit from the server
changes no more than one in the engine's own cache."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.vllm.cuts import CHUNKS, TOKENS, cuts
from tests.vllm.model import make
from tests.vllm.rows import CHUNK, Bench

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hit_that_is_cut_anywhere_changes_no_token(tmp_path: Path, dtype: str) -> None:
    cache = Path(os.environ.get("KVF_VLLM_MODELS", Path(tempfile.gettempdir()) / "kvf-vllm-models"))
    bench = Bench(make(cache / "tiny", "tiny"), tmp_path, [], 32, engine={"dtype": dtype})
    (cut,) = cuts(bench, [7])
    assert [answer.cached for answer in cut.loaded] == [CHUNK * chunks for chunks in range(CHUNKS + 1)]
    assert [answer.computed for answer in cut.loaded] == [TOKENS - CHUNK * chunks for chunks in range(CHUNKS + 1)]
    # The control: the engine's own cache, without a connector.
    assert [answer.cached for answer in cut.own] == [answer.cached for answer in cut.loaded]
    assert [answer.tokens for answer in cut.loaded] == [answer.tokens for answer in cut.own]
    if dtype == "float32":
        assert all(answer.tokens == cut.cold.tokens for answer in cut.loaded)
