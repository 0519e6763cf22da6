"""The models of the benches with vLLM: small Llamas with random weights by seed, made once into a folder.

Run as `python -m kvframework_bench.serving.model FOLDER NAME`; needs torch and transformers. They have no tokenizer:
prompts and answers are token ids. Nothing is downloaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvframework_bench.errors import BenchUnavailable
from kvframework_bench.process import await_end, running

VOCABULARY = 32000
LONGEST = 8192


class Shape(NamedTuple):
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"a Llama of {self.layers} layers, hidden size {self.hidden}, float32, random weights"


# A prompt of 4,096 tokens has 16 MiB of KV, or 128: a copy of several steps' time, as large models have on a GPU.
SHAPES = {"small": Shape(4, 256, 8, 4, 32), "large_kv": Shape(8, 512, 8, 8, 64)}
SUMMARY = str(SHAPES["small"])


class Config(msgspec.Struct, frozen=True):
    """What a model's `config.json` says that the bench has to know."""

    vocab_size: int
    max_position_embeddings: int
    num_hidden_layers: int = 0
    num_attention_heads: int = 1
    hidden_size: int = 0
    num_key_value_heads: int | None = None
    head_dim: int | None = None

    @property
    def kv_bytes(self) -> int:
        """The KV of one token in float32."""
        heads = self.num_key_value_heads or self.num_attention_heads
        return 2 * self.num_hidden_layers * heads * (self.head_dim or self.hidden_size // self.num_attention_heads) * 4


def read_config(model: Path) -> Config:
    """Return the configuration of the model in a folder. Raises `BenchUnavailable` if it is none."""
    expected = "a folder with the `config.json` of a decoder, as transformers writes it"
    try:
        return msgspec.json.decode((model / "config.json").read_bytes(), type=Config)
    except OSError as error:
        raise BenchUnavailable(
            f"the model's config.json cannot be read: {error.strerror}",
            where=f"--model {model}",
            available=expected,
            hint="leave --model out",
        ) from error
    except msgspec.DecodeError as error:
        raise BenchUnavailable(
            f"the model's config.json is wrong: {error}",
            where=f"--model {model}",
            available=expected,
            hint="leave --model out",
        ) from error


def made_model(directory: Path, name: str) -> Path:
    """Return a new folder with a model of `SHAPES`, made by a separate process. Raises `BenchFailed`."""
    model = directory / "model"
    with running("model", [sys.executable, "-m", "kvframework_bench.serving.model", str(model), name], directory) as it:
        await_end(it)
        if not (model / "config.json").exists():
            raise it.failure("has not written the model")
    return model


def make(folder: Path, shape: Shape) -> None:
    """Write the model. Overwrites what is there."""
    import torch

    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(1234)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 11 // 4,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
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
    make(Path(sys.argv[1]), SHAPES[sys.argv[2]])
