"""One asynchronous vLLM engine whose prompt comes in two pieces while it computes: streaming input.

Run as `python -m tests.vllm.streaming_engine -` with an `Order` on stdin, whose first ask it answers as
`tests.vllm.engine` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tests.vllm.engine import Order, counters, ordered, settings_of


def main() -> None:
    order, tell = ordered()
    tokens = asyncio.run(_answer(order))
    counted = {name: count for name, count in counters().items() if count}
    tell(event="answer", tokens=tokens, cached=0, computed=-1, ttft=0.0, wall=0.0, counters=counted)


async def _answer(order: Order) -> list[int]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.protocol import StreamingInput
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm import SamplingParams

    ask = order.asks[0]
    params = SamplingParams(temperature=0.0, max_tokens=ask.tokens, ignore_eos=True, detokenize=False)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings_of(order)))
    middle = len(ask.prompt) // 2

    async def pieces() -> AsyncIterator[Any]:
        for piece in (ask.prompt[:middle], ask.prompt[middle:]):
            yield StreamingInput(prompt={"type": "token", "prompt_token_ids": piece})

    tokens: list[int] = []
    try:
        async for output in engine.generate(pieces(), params, "streamed"):
            tokens = list(output.outputs[0].token_ids)
        # The step after the last one carries its counts.
        async for _ in engine.generate({"prompt_token_ids": ask.prompt[:4]}, params, "plain"):
            pass
    finally:
        engine.shutdown()
    return tokens


if __name__ == "__main__":
    main()
