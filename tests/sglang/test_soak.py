"""Two SGLang engines behind one server: conversations at the same time, requests broken off, an engine and the server
killed. No wrong token, and nothing is kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.sglang import soak
from tests.sglang.model import make

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.engine_feature("SGLang", "soak")
def test_conversations_with_two_engines(tmp_path: Path) -> None:
    models = Path(os.environ.get("KVF_SGLANG_MODELS", Path(tempfile.gettempdir()) / "kvf-sglang-models"))
    seconds = float(os.environ.get("KVF_SGLANG_SOAK_S", "150"))
    seen = soak.run(make(models / "tiny", "tiny"), tmp_path, seconds)
    print(seen)
    assert seen["answers"] >= soak.TALK.conversations * soak.TALK.turns
    assert seen["broken off"]
    assert seen["tokens cached"]
    assert any(seen["evictions"])
    assert seen["recovered"]["objects"]
