"""Loads within the step that reads them: every byte is there before it is read, or vLLM computes it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.server_process import ServerProcess
from tests.vllm.model import prompt
from tests.vllm.modelless import Cache, engine
from tests.vllm.test_offload_kinds_bytes import full

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

WITHIN = {"kvframework.load": "sync"}


def test_every_byte_is_there_when_the_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvf_vllm.offloading import worker

    tokens, copy = prompt(900, seed=50), worker.move

    def broken(runs: Any, arena: Any, *, storing: bool) -> None:
        if not storing:
            raise OSError("a copy that fails")
        copy(runs, arena, storing=storing)

    with ServerProcess(capacity="64MiB") as server, engine(Cache(full(4)), server.endpoint, WITHIN) as running:
        running.answer(1, tokens[:600])
        running.settle()
        running.core.reset_prefix_cache()
        loaded = running.answer(1, tokens[:600])
        running.settle()
        running.core.reset_prefix_cache()
        before = server.status()["l1"]["objects"]
        monkeypatch.setattr(worker, "move", broken)
        running.answer(1, tokens)
        running.settle()
        after = server.status()["l1"]["objects"]
    assert loaded.end >= 512
    assert not loaded.wrong
    # What was computed of blocks that were not there is not published.
    assert after == before
