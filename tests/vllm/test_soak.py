"""Two vLLM engines behind one server: conversations at the same time, requests broken off, an engine and the server
killed. No wrong token, and nothing is kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.support.engine_soak.run import NotRepeatableError
from tests.support.held_server import HeldServer
from tests.support.server_process import ServerProcess
from tests.vllm import soak

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(("model", "server"), [("tiny", ServerProcess), ("lfm2", HeldServer)])
@pytest.mark.engine_feature("vLLM", "soak")
def test_conversations_with_two_engines(tmp_path: Path, model: str, server: type[ServerProcess]) -> None:
    cache = Path(os.environ.get("KVF_VLLM_MODELS", Path(tempfile.gettempdir()) / "kvf-vllm-models"))
    seconds = float(os.environ.get("KVF_VLLM_SOAK_S", "150"))
    try:
        seen = soak.run(soak.model_of(cache, model), server(capacity="20MiB"), tmp_path, seconds)
    except NotRepeatableError as error:
        pytest.skip(f"vLLM without a connector: {error}")
    print(seen)
    assert seen["answers"] >= soak.TALK.conversations * soak.TALK.turns
    assert seen["broken off"]
    assert seen["connector"]["kvframework:hit_tokens_total"]
    assert bool(seen["recovered"]["objects"]) == (server is HeldServer)
    # Of the engine that lives on; vLLM's CPU worker grows by itself, with or without a connector.
    before, after = (each[1] for each in seen["MiB of the engines' processes"][1::2])
    grown = {name: after[name] - before[name] for name in before if "Worker" not in name}
    assert grown
    assert all(mib < 30 for mib in grown.values()), seen
