"""Models with random weights by seed, made once into a directory: the Llama of the tests of vLLM, and a hybrid. Nothing
is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.lazy import torch
from tests.vllm import model as llama
from tests.vllm.model import VOCABULARY

HYBRID = "qwen3-next"


def make(directory: Path, size: str, *, seed: int = 1234) -> Path:
    """A Llama of a size, or the hybrid: three layers of Gated DeltaNet and one of attention. Made only if it is not
    there."""
    from tests.sglang.standins import vision

    vision.install()
    if size != HYBRID:
        return llama.make(directory, size)
    if (directory / "done").exists():
        return directory
    from transformers import AutoModelForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(_qwen3_next()).float()
    with torch.no_grad():
        for name, weights in made.named_parameters():
            # As they are initialised a state forgets all within a token, and wrong ones would do no harm.
            if name.endswith("A_log"):
                weights.fill_(-4.0)
            elif name.endswith("dt_bias"):
                weights.fill_(-2.0)
    made.save_pretrained(directory)
    (directory / "done").touch()
    return directory


def _qwen3_next() -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        full_attention_interval=4,  # the same in SGLang's words
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        max_position_embeddings=8192,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
