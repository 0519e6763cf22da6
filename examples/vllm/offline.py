"""A prompt, answered by vLLM offline; in a second run, a new process loads the KV that the first one has stored.

python offline.py MODEL [--endpoint ENDPOINT] [--tokens N]
"""

from __future__ import annotations

import argparse
import json

from kvf_vllm import transfer_config
from vllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--endpoint", default="", help="the server; default: the private one of this user")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the prompt")
    parser.add_argument("--engine", type=json.loads, default={}, help="more of LLM's arguments, as JSON")
    arguments = parser.parse_args()
    llm = LLM(
        arguments.model,
        kv_transfer_config=transfer_config({"kvframework.endpoint": arguments.endpoint}),
        disable_log_stats=False,
        **arguments.engine,
    )
    prompt = {"prompt_token_ids": [1000 + index * 7 % 5000 for index in range(arguments.tokens)]}
    (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
    print(f"{output.num_cached_tokens} of {arguments.tokens} tokens were cached")
    print(f"first token after {output.metrics.first_token_latency:.3f} s")
    print(f"tokens: {list(output.outputs[0].token_ids)}")


if __name__ == "__main__":
    main()
