"""Small models with recurrent layers beside attention, one of each family, with random weights by seed. Made once into
a directory; nothing is downloaded.

Needs torch and transformers; run as `python -m tests.vllm.hybrid_models DIR FAMILY`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.lazy import torch, transformers
from tests.vllm.model import COMMON, save

# Weights so large that a state shows in the next token.
_LARGE = {"hidden_size": 256, "initializer_range": 0.1, "pad_token_id": 0, "tie_word_embeddings": False}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_GDN_LAYERS = ["linear_attention"] * 3 + ["full_attention"]


@dataclass(frozen=True)
class Family:
    """A model by its classes in transformers. `chunk` is the block size that vLLM gives to all its layers on the CPU,
    `chunks` how many a prompt has; `engine` is what vLLM needs there. `alike_without`: how many of the tokens stay the
    same without the states."""

    config: str
    model: str
    chunk: int
    chunks: int
    fields: dict[str, Any]
    engine: dict[str, Any]
    alike_without: int = 0


# vLLM on the CPU: gated delta nets only in bf16; Mamba-2 fails in a step of more than one block.
_BF16 = {"dtype": "bfloat16"}
_SMALL_STEPS = {"max_num_batched_tokens": 128}

FAMILIES = {
    "qwen3-next": Family(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        640,
        2,
        {
            **_ATTENTION,
            **_DELTA,
            "num_hidden_layers": 4,
            "layer_types": _GDN_LAYERS,
            "intermediate_size": 512,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
        _BF16,
    ),
    "qwen3.5": Family(
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        640,
        2,
        {**_ATTENTION, **_DELTA, "num_hidden_layers": 4, "layer_types": _GDN_LAYERS, "intermediate_size": 512},
        _BF16,
    ),
    "granite-4": Family(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        256,
        2,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "mamba", "mamba", "attention"],
            "intermediate_size": 256,
            "shared_intermediate_size": 512,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_expand": 2,
            "mamba_chunk_size": 64,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.125,
        },
        _SMALL_STEPS,
    ),
    "nemotron-h": Family(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        256,
        2,
        {
            **_ATTENTION,
            "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mamba", "mlp"],
            "intermediate_size": 512,
            "ssm_state_size": 64,
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "n_groups": 1,
            "chunk_size": 64,
        },
        _SMALL_STEPS,
    ),
    "falcon-h1": Family(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        256,
        2,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "intermediate_size": 512,
            "mamba_d_ssm": 512,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_chunk_size": 64,
        },
        _SMALL_STEPS,
    ),
    "lfm2": Family(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        128,
        3,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "intermediate_size": 512,
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 256,
            "block_dim": 256,
        },
        {},
    ),
}


def config_of(name: str, **changes: Any) -> Any:
    family = FAMILIES[name]
    return getattr(transformers, family.config)(**{**COMMON, **_LARGE, **family.fields, **changes})


def make(directory: Path, name: str) -> Path:
    """The directory of a family's model. Made only if it is not there."""
    if (directory / "done").exists():
        return directory
    family = FAMILIES[name]
    torch.manual_seed(1234)
    return save(directory, getattr(transformers, family.model)(config_of(name)).float())


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2])
