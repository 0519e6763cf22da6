"""Two engines behind one server, conversations at the same time, requests broken off: no wrong token, no leak."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.vllm import soak

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("model", ["tiny", "lfm2"])
@pytest.mark.engine_feature("vLLM", "soak")
def test_conversations_with_two_engines(tmp_path: Path, model: str) -> None:
    cache = Path(os.environ.get("KVF_VLLM_MODELS", Path(tempfile.gettempdir()) / "kvf-vllm-models"))
    seconds = float(os.environ.get("KVF_VLLM_SOAK_S", "120"))
    seen = soak.run(soak.model_of(cache, model), tmp_path, seconds)
    assert seen["answers"] >= soak.CONVERSATIONS * soak.TURNS
    assert seen["broken off"]
    connector = seen["connector"]
    assert connector["kvframework:hit_tokens_total"]
    assert not connector["kvframework:errors_total"]
    first, _, last = seen["MiB of the engines' processes after each third"]
    for before, after in zip(first, last, strict=True):
        # vLLM's CPU worker grows by itself, with or without a connector.
        grown = {name: after[name] - before[name] for name in before if "Worker" not in name}
        assert grown
        assert all(mib < 30 for mib in grown.values()), seen
