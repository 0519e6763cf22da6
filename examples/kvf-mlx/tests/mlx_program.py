"""An engine process for the tests: `python mlx_program.py ENDPOINT CHUNK` writes its answers for each family as JSON.

They are: without the cache, with it, with what was restored changed before it is used, and how much is restored of
another prompt.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import mlx.core as mx
from kvf_mlx import SharedPromptCache
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import lfm2, llama
from mlx_lm.models.cache import KVCache

from kvframework.client import KvIdentity

FAMILIES = ("llama", "llama-bf16", "lfm2")
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97}


def made(family: str) -> Any:
    if family.startswith("llama"):
        arguments = llama.ModelArgs(
            model_type="llama", num_hidden_layers=2, intermediate_size=96, rms_norm_eps=1e-5, **SIZES
        )
        model: Any = llama.Model(arguments)
    else:
        model = lfm2.Model(
            lfm2.ModelArgs(
                model_type="lfm2",
                num_hidden_layers=3,
                layer_types=["conv", "full_attention", "conv"],
                max_position_embeddings=4096,
                norm_eps=1e-5,
                conv_bias=False,
                conv_L_cache=3,
                block_dim=64,
                block_multiple_of=32,
                block_ffn_dim_multiplier=1.0,
                block_auto_adjust_ff_dim=False,
                block_ff_dim=96,
                **SIZES,
            )
        )
    mx.random.seed(0)

    def drawn(weight: mx.array) -> mx.array:
        if weight.ndim < 2:
            return mx.ones_like(weight)
        return mx.random.normal(weight.shape) * 1.8 / weight.shape[-1] ** 0.5

    model.update(tree_map(drawn, model.parameters()))
    if family.endswith("bf16"):
        model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def spoil(caches: list[Any]) -> None:
    for cache in caches:
        if type(cache) is KVCache and len({type(each) for each in caches}) == 1:
            cache.keys, cache.values = -cache.keys, -cache.values
        elif type(cache) is not KVCache:
            for number, state in enumerate(cache.cache):
                cache[number] = mx.zeros_like(state)


def answer(model: Any, tokens: list[int], caches: Any = None) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(tokens), model, max_tokens=12, prompt_cache=caches)]


def main() -> None:
    endpoint, chunk = sys.argv[1], int(sys.argv[2])
    found = {}
    for family in FAMILIES:
        model = made(family)
        # One token after the hit: a state that is missing shows before it is forgotten.
        tokens = [(at * at * 7 + 11 * at) % 95 + 2 for at in range(3 * chunk + 1)]
        plain = answer(model, tokens)
        identity = KvIdentity("test", family)
        shared = SharedPromptCache(model, identity, endpoint=endpoint, connect_timeout_s=30.0, deadline_scale=20.0)
        caches, rest = shared.fetch_nearest_cache("key", tokens)
        restored, spoiled = len(tokens) - len(rest), None
        if restored:
            changed, _ = shared.fetch_nearest_cache("key", tokens)
            spoil(changed)
            spoiled = answer(model, rest, changed)
        else:
            caches, rest = shared.prefill("key", tokens)
        other = [*tokens[: 2 * chunk], 1, 1]
        part = 0
        if restored:  # this process itself holds nothing
            part = len(other) - len(shared.fetch_nearest_cache("key", other)[1])
        found[family] = {
            "plain": plain,
            "cached": answer(model, rest, caches),
            "restored": restored,
            "spoiled": spoiled,
            "part": part,
        }
        shared.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
