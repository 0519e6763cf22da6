"""A Llama with random weights that can be blended as a trained one, for the bench without a trained model."""

from __future__ import annotations

from typing import Any

import torch

from kvf_transformers.demo_model import SEED, ByteTokenizer, DemoModel, llama_config
from transformers import LlamaForCausalLM

# layers, hidden size, intermediate size, attention heads, KV heads
_SIZE = (4, 128, 256, 4, 4)
# Distance in tokens beyond which the heads of a KV head no longer tell near from far; the weight of nearness in scores;
# the part of the residual stream that attention writes, relative to that of the tokens themselves.
_REACHES = (32, 64, 128, 256)
_NEARNESS = 16.0
_CONTEXT = 2.0


def local_llama() -> DemoModel:
    """A Llama with random weights whose attention falls with distance, the same in every process.

    Plain random weights attend to all tokens alike, near or far. Trained models attend mostly to near tokens, which is
    why few tokens of a document depend on the text before it; blending relies on that. So the model has this property
    built in by the rotary positions themselves: all embeddings share one direction, which W_q and W_k map to one
    constant vector per head. Its rotated copies agree the less the further they are apart, up to the head's reach.
    """
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(llama_config(*_SIZE)).float().eval()
    with torch.no_grad():
        _fill(model)
    return DemoModel(f"kvframework-bench-local-llama-{SEED}", model, ByteTokenizer())


def _fill(model: LlamaForCausalLM) -> None:
    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    model.model.embed_tokens.weight.normal_()
    model.model.embed_tokens.weight[:, 0] = hidden**0.5
    # Mean squares of the residual stream: its shared direction keeps 1, and the rest grows from 1 to 2.
    for index, layer in enumerate(model.model.layers):
        total = 2 + index / layers
        shared, rest = (hidden / total) ** 0.5, ((total - 1) / total * hidden) ** 0.5
        attention, mlp = layer.self_attn, layer.mlp
        for weight in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            weight.weight.normal_(0, 1 / rest)
            weight.weight[:, 0] = 0
        for weight, gain in ((attention.o_proj, _CONTEXT), (mlp.down_proj, 1.0)):
            weight.weight.normal_(0, gain * (2 * layers * weight.in_features) ** -0.5)
            weight.weight[0] = 0
        _attend_to_the_near(attention, model.model.rotary_emb.inv_freq, shared)
    model.lm_head.weight.normal_(0, 2 / hidden**0.5)


def _attend_to_the_near(attention: Any, frequencies: torch.Tensor, shared: float) -> None:
    dim, group = attention.head_dim, attention.num_key_value_groups
    for kv_head in range(attention.config.num_key_value_heads):
        turning = frequencies >= 1 / _REACHES[kv_head % len(_REACHES)]
        constant = torch.zeros(dim)
        constant[: dim // 2][turning] = (_NEARNESS * dim**0.5 / turning.sum()) ** 0.5 / shared
        attention.k_proj.weight[kv_head * dim : (kv_head + 1) * dim, 0] = constant
        attention.q_proj.weight[kv_head * group * dim : (kv_head + 1) * group * dim, 0] = constant.repeat(group)
