"""The model of the serving bench: a small Llama with random weights by seed, made once into a folder.

Run as `python -m kvframework_bench.serving.model FOLDER`; needs torch and transformers. It has no tokenizer: prompts
and answers are token ids. Nothing is downloaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from kvframework_bench.errors import BenchUnavailable

VOCABULARY = 32000
LONGEST = 8192
_LAYERS, _HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM = 4, 256, 8, 4, 32
SUMMARY = f"a Llama of {_LAYERS} layers, hidden size {_HIDDEN}, float32, random weights"


class Config(msgspec.Struct, frozen=True):
    """What a model's `config.json` says that the bench has to know."""

    vocab_size: int
    max_position_embeddings: int


def read_config(model: Path) -> Config:
    """Return the configuration of the model in a folder. Raises `BenchUnavailable` if it is none."""
    expected = "a folder with the `config.json` of a decoder, as transformers writes it"
    try:
        return msgspec.json.decode((model / "config.json").read_bytes(), type=Config)
    except OSError as error:
        raise BenchUnavailable(
            f"no model: {error.strerror}", where=f"--model {model}", available=expected, hint="leave --model out"
        ) from error
    except msgspec.DecodeError as error:
        raise BenchUnavailable(
            f"its config.json: {error}", where=f"--model {model}", available=expected, hint="leave --model out"
        ) from error


def make(folder: Path) -> None:
    """Write the model. Overwrites what is there."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(1234)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=_HIDDEN,
        intermediate_size=_HIDDEN * 11 // 4,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        max_position_embeddings=LONGEST,
        # So that logits differ by more than the order of additions changes them.
        initializer_range=0.05,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
