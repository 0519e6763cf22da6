"""Tiny models with random weights, above all those that keep recurrent states, their prompts and sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.lazy import torch, transformers
from tests.support.server_process import ServerProcess

CHUNK = 32
VOCABULARY = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
TYPES = ["linear_attention", "full_attention", "linear_attention"]
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": TYPES,
}
MAMBA = {"mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}

HYBRIDS: dict[str, Callable[[], Any]] = {
    "qwen3-next": lambda: transformers.Qwen3NextConfig(**SMALL, **LINEAR, **MOE),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(**SMALL, **LINEAR),
    "lfm2": lambda: transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention", "conv"]),
    "falcon-h1": lambda: transformers.FalconH1Config(
        **SMALL, **MAMBA, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16
    ),
    "granite-4": lambda: transformers.GraniteMoeHybridConfig(
        **SMALL,
        **MAMBA,
        layer_types=TYPES,
        mamba_n_heads=8,
        mamba_d_head=16,
        shared_intermediate_size=32,
        num_local_experts=0,
    ),
    "zamba2": lambda: transformers.Zamba2Config(
        **SMALL,
        layers_block_type=["mamba", "hybrid", "mamba"],
        mamba_d_state=16,
        n_mamba_heads=8,
        mamba_ngroups=1,
        chunk_size=16,
        num_mem_blocks=1,
        use_mem_rope=True,
    ),
    "nemotron-h": lambda: transformers.NemotronHConfig(
        **SMALL,
        layers_block_type=["mamba", "attention", "mlp", "mamba"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=1,
        chunk_size=16,
    ),
    "olmo-hybrid": lambda: transformers.OlmoHybridConfig(**SMALL, **LINEAR),
}
# Whose forward pass loses states when several tokens follow, in the release of transformers that the constraints name.
FORGETFUL: dict[str, Callable[[], Any]] = {
    "bamba": lambda: transformers.BambaConfig(
        **SMALL, **MAMBA, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16
    ),
    "jamba": lambda: transformers.JambaConfig(
        **SMALL,
        attn_layer_period=3,
        attn_layer_offset=1,
        num_experts=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
    ),
}


def made(config: Any, seed: int = 0, dtype: str = "float32", **more: Any) -> Any:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), **more).eval()


def llama(seed: int = 0, **changes: Any) -> Any:
    return made(transformers.LlamaConfig(**{**SMALL, **changes}), seed)


def prompt(tokens: int = 3 * CHUNK + 9, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))


def plain_tokens(model: Any, ids: Any, new_tokens: int = 8, **options: Any) -> list[int]:
    """What a model generates by itself; all tokens behind the prompt, of several rows one row behind the other."""
    with torch.no_grad():
        found = model.generate(ids, max_new_tokens=new_tokens, pad_token_id=0, **{"do_sample": False, **options})
    return found[:, ids.shape[1] :].flatten().tolist()


def exact(kv: Any, model: Any, ids: Any, hits: int) -> Any:
    """The prompt hits as many tokens, and has the logits and greedy tokens that the model computes without a cache."""
    with torch.no_grad():
        expected = model(input_ids=ids).logits[:, -1]
    logits, cache, restored = kv.prefill(ids)
    assert restored.hit_tokens == hits
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)
    assert list(kv.decode(logits, cache, 4)) == plain_tokens(model, ids, 4)
    return cache


def attach(model: Any, server: ServerProcess, name: str, **options: Any) -> Any:
    from kvf_transformers import TransformersKV

    return TransformersKV(model, endpoint=server.endpoint, model_name=name, deadline_scale=20.0, **options)
