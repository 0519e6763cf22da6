"""The demo over a long text: the pieces that it is computed in, and its own end."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvf_demo.child import uninterrupted
from kvf_demo.processes import DemoFailed, EngineProcess


def test_an_engine_whose_time_is_over_is_told_apart_from_one_that_failed(tmp_path: Path) -> None:
    sleeping = ["-n1", "-r1", "import time; time.sleep(600)"]
    with uninterrupted():
        engine = EngineProcess("engine A", "timeit", sleeping, tmp_path, timeout_s=0.2)
    with engine, pytest.raises(DemoFailed, match="engine-A was not done after 0 s, the demo's limit") as caught:
        list(engine.events())
    assert "--tokens" in caught.value.hint


@pytest.mark.transformers
def test_a_prompt_in_pieces_is_computed_as_in_one() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from kvf_transformers.demo_engine import _prefill
    from kvf_transformers.demo_model import random_llama
    from kvf_transformers.forward import Forward
    from kvf_transformers.results import Restored

    _, model, _ = random_llama("tiny")
    events: list[tuple[str, int]] = []

    class Cold:
        def prefill(self, tokens: list[int], restored: Restored) -> tuple[object, object, Restored]:
            logits = Forward(model).compute(tokens[restored.hit_tokens :], restored.cache)
            return logits, restored.cache, restored

    def emit(event: str, tokens: int) -> None:
        events.append((event, tokens))

    from transformers import DynamicCache

    prompt = [number % 250 for number in range(100)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvf_transformers.demo_engine._PIECE_TOKENS", 40)
        cut, _ = _prefill(emit, Cold(), prompt, Restored(DynamicCache(), 0, 0, 0.0, 0.0))  # type: ignore[arg-type]
    whole = Forward(model).compute(prompt, DynamicCache())
    assert events == [("computed", 40), ("computed", 80), ("computed", 100)]
    assert torch.allclose(cut, whole, atol=1e-4)
