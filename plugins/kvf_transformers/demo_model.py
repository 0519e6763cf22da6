"""The demo's model: a Llama with random weights by seed and a byte-level tokenizer. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

SEED = 1234
# layers, hidden size, intermediate size, attention heads, KV heads
SIZES = {"full": (6, 1280, 3456, 20, 4), "tiny": (2, 128, 256, 4, 2)}


class ByteTokenizer:
    """A tokenizer: a beginning-of-sequence token, then the text's UTF-8 bytes."""

    bos = 256
    vocab_size = 257

    def encode(self, text: str) -> list[int]:
        return [self.bos, *text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; bytes that are not UTF-8 (a random model's output rarely is) become replacement
        characters."""
        return bytes(token for token in tokens if token < self.bos).decode(errors="replace")


class DemoModel(NamedTuple):
    name: str
    model: Any
    tokenizer: Any


def llama_config(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, **more: Any) -> LlamaConfig:
    """Return the configuration of a Llama for the tokens of `ByteTokenizer`, whose answers have no end of their own."""
    return LlamaConfig(
        vocab_size=ByteTokenizer.vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=1 << 17,
        bos_token_id=ByteTokenizer.bos,
        eos_token_id=None,
        **more,
    )


def random_llama(size: str) -> DemoModel:
    """Return a model with the same weights in every process. The wide initializer makes greedy tokens depend on the
    prompt."""
    hidden = SIZES[size][1]
    config = llama_config(*SIZES[size], initializer_range=1.8 / hidden**0.5)
    torch.manual_seed(SEED)
    return DemoModel(f"kvframework-demo-llama-{size}-{SEED}", LlamaForCausalLM(config).float().eval(), ByteTokenizer())


def local_model(directory: str) -> DemoModel:
    """Return a model and tokenizer of the user's own, from files only, in fp32 so that tokens can be compared."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    return DemoModel(directory, model, AutoTokenizer.from_pretrained(directory, local_files_only=True))
