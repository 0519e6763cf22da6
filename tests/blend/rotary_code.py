"""The rotary code of transformers' own models, asked for keys as they are stored, whole models aside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CohereConfig, DeepseekV2Config, DeepseekV3Config, GlmConfig, GPTNeoXConfig, LlamaConfig
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.glm import modeling_glm as glm
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama

FURTHEST = 131072


@dataclass(frozen=True)
class Code:
    """`style`: of the stored keys. `partial`: whether part of a head may be rotated; `scaled`: whether it knows
    scalings; `furthest`: positions that its tables have."""

    style: str
    config: Callable[..., Any]
    embedding: Callable[[Any], Any]
    apply: Callable[..., Any]
    partial: bool = False
    scaled: bool = True
    furthest: int = FURTHEST


CODES = {
    "llama": Code("half", LlamaConfig, llama.LlamaRotaryEmbedding, llama.apply_rotary_pos_emb),
    "gpt_neox": Code(
        "half", GPTNeoXConfig, gpt_neox.GPTNeoXRotaryEmbedding, gpt_neox.apply_rotary_pos_emb, partial=True
    ),
    "cohere": Code("interleaved", CohereConfig, cohere.CohereRotaryEmbedding, cohere.apply_rotary_pos_emb),
    "glm": Code("interleaved", GlmConfig, glm.GlmRotaryEmbedding, glm.apply_rotary_pos_emb, partial=True),
    "deepseek_v2": Code(
        "interleaved", DeepseekV2Config, deepseek_v2.DeepseekV2RotaryEmbedding, deepseek_v2.apply_rotary_emb
    ),
    # It reads pairs of neighbours and stores them in halves.
    "deepseek_v3": Code(
        "half", DeepseekV3Config, deepseek_v3.DeepseekV3RotaryEmbedding, deepseek_v3.apply_rotary_pos_emb_interleave
    ),
    "gptj": Code("interleaved", None, None, gptj.apply_rotary_pos_emb, partial=True, scaled=False, furthest=4096),
}


def embedding(code: Code, rope: dict[str, Any], head_dim: int, rotary_dim: int) -> Any:
    """The model's own module that makes the angles."""
    sizes = {"qk_rope_head_dim": head_dim} if "deepseek" in code.config.__name__.lower() else {}
    config = code.config(
        hidden_size=head_dim * 4, num_attention_heads=4, max_position_embeddings=FURTHEST, rope_parameters=rope, **sizes
    )
    if not sizes:
        config.head_dim = head_dim
    if code.partial:
        factor = 1.0 if rotary_dim == head_dim else (rotary_dim + 0.25) / head_dim
        # Both places: transformers 5.0 reads one or the other, as the scaling is.
        config.rope_parameters["partial_rotary_factor"] = config.partial_rotary_factor = factor
    return code.embedding(config)


def stored(code: Code, angles: Any, raw: torch.Tensor, position: int, rotary_dim: int) -> torch.Tensor:
    """`raw` keys, [heads, tokens, head_dim], as the model stores them from `position` on. `angles`: of `embedding`."""
    keys = raw[None]
    positions = torch.arange(position, position + keys.shape[2])[None]
    if code.embedding is None:
        table = gptj.create_sinusoidal_positions(position + keys.shape[2], rotary_dim)[position:].to(keys.dtype)
        sin, cos = table[None].chunk(2, dim=-1)
        turned = code.apply(keys[..., :rotary_dim].transpose(1, 2), sin, cos).transpose(1, 2)
        return torch.cat((turned, keys[..., rotary_dim:]), dim=-1)[0]
    made = angles(keys, positions)
    made = made if isinstance(made, tuple) else (made,)
    return code.apply(keys, keys, *made)[1][0]
