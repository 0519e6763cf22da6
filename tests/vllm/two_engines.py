"""vLLM engines in one process: two at once, and one after another, each with the connector.

Run as `python -m tests.vllm.two_engines JSON` with an `Order`; the answers are those of its one ask, as JSON on stdout.
"""

from __future__ import annotations

from tests.vllm.engine import make_engine, ordered


def main() -> None:
    order, answer = ordered()
    from prometheus_client import REGISTRY

    from vllm import SamplingParams

    def tell(llm: object) -> None:
        ask = order.asks[0]
        params = SamplingParams(temperature=0.0, max_tokens=ask.tokens, ignore_eos=True, detokenize=False)
        output = llm.generate([{"prompt_token_ids": ask.prompt}], params, use_tqdm=False)[0]  # type: ignore[attr-defined]
        loaded = REGISTRY.get_sample_value(
            "kvframework:loaded_tokens_total", {"model_name": order.model, "engine": "0"}
        )
        answer(tokens=list(output.outputs[0].token_ids), loaded=loaded)

    first = make_engine(order)
    tell(first)
    second = make_engine(order)
    tell(second)
    first.reset_prefix_cache()
    tell(first)
    first.llm_engine.engine_core.shutdown()
    third = make_engine(order)
    tell(third)
    for llm in (second, third):
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
