"""The rotary code of transformers' own models, asked for keys as they are stored, whole models aside."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from tests.support.lazy import torch

FURTHEST = 131072


@dataclass(frozen=True)
class Code:
    """`style`: of the stored keys. `model`: its folder in transformers; `name`: what its classes begin with, none where
    angles come from a table. `partial`: whether part of a head may be rotated; `scaled`: whether it knows scalings;
    `furthest`: positions that its tables have."""

    style: str
    model: str
    name: str = ""
    apply: str = "apply_rotary_pos_emb"
    partial: bool = False
    scaled: bool = True
    furthest: int = FURTHEST

    @property
    def module(self) -> Any:
        return importlib.import_module(f"transformers.models.{self.model}.modeling_{self.model}")


CODES = {
    code.model: code
    for code in (
        Code("half", "llama", "Llama"),
        Code("half", "gpt_neox", "GPTNeoX", partial=True),
        Code("interleaved", "cohere", "Cohere"),
        Code("interleaved", "glm", "Glm", partial=True),
        Code("interleaved", "deepseek_v2", "DeepseekV2", "apply_rotary_emb"),
        # It reads pairs of neighbours and stores them in halves.
        Code("half", "deepseek_v3", "DeepseekV3", "apply_rotary_pos_emb_interleave"),
        Code("interleaved", "gptj", partial=True, scaled=False, furthest=4096),
    )
}


def embedding(code: Code, rope: dict[str, Any], head_dim: int, rotary_dim: int) -> Any:
    sizes = {"qk_rope_head_dim": head_dim} if "deepseek" in code.model else {}
    config = getattr(code.module, f"{code.name}Config")(
        hidden_size=head_dim * 4, num_attention_heads=4, max_position_embeddings=FURTHEST, rope_parameters=rope, **sizes
    )
    if not sizes:
        config.head_dim = head_dim
    if code.partial:
        factor = 1.0 if rotary_dim == head_dim else (rotary_dim + 0.25) / head_dim
        # Both places: transformers 5.0 reads one or the other, as the scaling is.
        config.rope_parameters["partial_rotary_factor"] = config.partial_rotary_factor = factor
    return getattr(code.module, f"{code.name}RotaryEmbedding")(config)


def stored(code: Code, angles: Any, raw: torch.Tensor, position: int, rotary_dim: int) -> torch.Tensor:
    """`raw` keys, [heads, tokens, head_dim], as the model stores them from `position` on. `angles`: of `embedding`."""
    keys, apply = raw[None], getattr(code.module, code.apply)
    positions = torch.arange(position, position + keys.shape[2])[None]
    if not code.name:
        table = code.module.create_sinusoidal_positions(position + keys.shape[2], rotary_dim)[position:].to(keys.dtype)
        sin, cos = table[None].chunk(2, dim=-1)
        turned = apply(keys[..., :rotary_dim].transpose(1, 2), sin, cos).transpose(1, 2)
        return torch.cat((turned, keys[..., rotary_dim:]), dim=-1)[0]
    made = angles(keys, positions)
    made = made if isinstance(made, tuple) else (made,)
    return apply(keys, keys, *made)[1][0]
