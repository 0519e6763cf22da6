"""One vLLM engine that answers two requests at once: the second of the order's asks, and from its third token on the
first. Of a first ask for 0 tokens the load is aborted as soon as it has begun.

Run as `python -m tests.vllm.beside_engine -` with an `Order` on stdin; answers as `tests.vllm.engine` does, the first
ask first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.vllm.engine import STEPS, Ask, counters, make_engine, ordered


def main() -> None:
    order, tell = ordered()
    llm = make_engine(order)
    tokens = _answers(llm.llm_engine, order.asks)
    found = {"cached": 0, "computed": -1, "ttft": 0.0, "wall": 0.0, "counters": counters()}
    for name in ("first", "second"):
        tell(event="answer", tokens=tokens.get(name, []), **found)
    llm.llm_engine.engine_core.shutdown()


def _answers(engine: Any, asks: list[Ask]) -> dict[str, list[int]]:
    from vllm import SamplingParams

    def add(name: str, ask: Ask) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max(ask.tokens, 1), ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": ask.prompt}, params)

    first, second = asks
    begun = Path(os.environ[STEPS] + ".loading")
    tokens: dict[str, list[int]] = {}
    is_added = is_aborted = False
    add("second", second)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        if not is_added and len(tokens.get("second", [])) >= 3:
            add("first", first)
            is_added = True
        if not first.tokens and not is_aborted and begun.exists():
            engine.abort_request(["first"])
            is_aborted = True
    # The step after the last one carries its counts.
    add("last", Ask(second.prompt[:4], tokens=1))
    while engine.has_unfinished_requests():
        engine.step()
    return tokens


if __name__ == "__main__":
    main()
