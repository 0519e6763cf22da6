"""Tiny random models of every rotary kind, made from their configurations, and what is said of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvf_blend.rotary import Rotary

ENDS: dict[str, Any] = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2}
SMALL: dict[str, Any] = {
    **ENDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "pad_token_id": None,
}
GPTJ_SMALL: dict[str, Any] = {**ENDS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 2048, "rotary_dim": 8}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
MLA: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    **EXPERTS,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def whole(style: str = "half", theta: float = 10000.0, **more: Any) -> Rotary:
    return Rotary(style, theta, head_dim=16, rotary_dim=16, **more)


def part(dim: int, style: str = "half", theta: float = 10000.0) -> Rotary:
    return Rotary(style, theta, head_dim=16, rotary_dim=dim)


def latent(t: Any, style: str, **more: Any) -> Rotary:
    """transformers keeps the latent of MLA as the keys of its cache, what is rotated as the values; and kept whole keys
    of every head in earlier releases."""
    if not hasattr(t.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention, "expand_kv"):
        return Rotary(style, 10000.0, head_dim=24, rotary_dim=8, offset=16, **more)
    return Rotary(style, 10000.0, head_dim=8, rotary_dim=8, plane="values", **more)


SAID_YARN: dict[str, Any] = {
    "scaling": "yarn",
    "factor": 8.0,
    "original_max_position": 1024,
    "beta_fast": 16.0,
    "beta_slow": 1.0,
}

# The model's configuration and what is said of it, made by the module `transformers`: no collection imports it.
FAMILIES: dict[str, Callable[[Any], tuple[Any, Rotary]]] = {
    "llama": lambda t: (t.LlamaConfig(**SMALL), whole()),
    "llama, linear": lambda t: (t.LlamaConfig(**SMALL, rope_parameters=LINEAR), whole(scaling="linear", factor=4.0)),
    "llama, llama3": lambda t: (
        t.LlamaConfig(**SMALL, rope_parameters=LLAMA3),
        whole(
            theta=500000.0,
            scaling="llama3",
            factor=8.0,
            original_max_position=1024,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
    ),
    "llama, yarn": lambda t: (t.LlamaConfig(**SMALL, rope_parameters=YARN), whole(**SAID_YARN)),
    "llama, yarn by its lengths": lambda t: (
        t.LlamaConfig(**SMALL, rope_parameters={**YARN, "factor": None}),
        whole(**SAID_YARN),
    ),
    "llama, yarn by nothing": lambda t: (t.LlamaConfig(**SMALL, rope_parameters={**YARN, "factor": 1.0}), whole()),
    "mistral": lambda t: (t.MistralConfig(**SMALL), whole()),
    "mixtral": lambda t: (t.MixtralConfig(**SMALL, num_local_experts=4, **EXPERTS), whole(theta=1000000.0)),
    "qwen2": lambda t: (t.Qwen2Config(**SMALL), whole()),
    "qwen3": lambda t: (t.Qwen3Config(**SMALL, head_dim=16), whole()),
    "qwen3 moe": lambda t: (
        t.Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=4, moe_intermediate_size=32, **EXPERTS),
        whole(),
    ),
    "gemma": lambda t: (t.GemmaConfig(**SMALL, head_dim=16), whole()),
    "gemma2": lambda t: (t.Gemma2Config(**SMALL, head_dim=16), whole()),
    "olmo2": lambda t: (t.Olmo2Config(**SMALL), whole()),
    "phi3": lambda t: (t.Phi3Config(**SMALL), whole()),
    "falcon": lambda t: (t.FalconConfig(**SMALL), whole()),
    "gpt_oss, yarn": lambda t: (
        t.GptOssConfig(**SMALL, head_dim=16, num_local_experts=4, **EXPERTS),
        whole(
            theta=150000.0,
            scaling="yarn",
            factor=32.0,
            original_max_position=4096,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
        ),
    ),
    "gpt_neox, a part": lambda t: (t.GPTNeoXConfig(**SMALL), part(4)),
    "phi, a part": lambda t: (t.PhiConfig(**SMALL), part(8)),
    "stablelm, a part": lambda t: (t.StableLmConfig(**SMALL), part(4)),
    "gptj, a part": lambda t: (t.GPTJConfig(**GPTJ_SMALL), part(8, "interleaved")),
    "codegen, a part": lambda t: (t.CodeGenConfig(**GPTJ_SMALL), part(8, "interleaved")),
    "glm, a part": lambda t: (t.GlmConfig(**SMALL, head_dim=16), part(8, "interleaved")),
    "glm4, a part": lambda t: (t.Glm4Config(**SMALL, head_dim=16), part(8, "interleaved")),
    "cohere": lambda t: (t.CohereConfig(**SMALL), whole("interleaved", theta=500000.0)),
    "cohere2": lambda t: (t.Cohere2Config(**SMALL), whole("interleaved")),
    "deepseek_v2": lambda t: (t.DeepseekV2Config(**MLA), latent(t, "interleaved")),
    "deepseek_v2, yarn": lambda t: (
        t.DeepseekV2Config(**MLA, rope_parameters=YARN),
        latent(t, "interleaved", **SAID_YARN),
    ),
    "deepseek_v3": lambda t: (t.DeepseekV3Config(**MLA), latent(t, "half")),
    "deepseek_v3, yarn": lambda t: (t.DeepseekV3Config(**MLA, rope_parameters=YARN), latent(t, "half", **SAID_YARN)),
}
