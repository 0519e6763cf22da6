"""The demo's models: a Llama with random weights by seed and a byte-level tokenizer, or one from local files; and how
either is asked. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvframework.errors import RequestError
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

SEED = 1234
# A turn of its own keeps a small model from going on with the text.
_READ = "I have read the text. What do you want to know?"
_TEXT, _QUESTION = "{the text}", "{the question}"
# layers, hidden size, intermediate size, attention heads, KV heads
SIZES = {"full": (6, 1280, 3456, 20, 4), "tiny": (2, 128, 256, 4, 2)}


class ByteTokenizer:
    """A tokenizer: a beginning-of-sequence token, then the text's UTF-8 bytes."""

    bos = 256
    vocab_size = 257

    def encode(self, text: str) -> list[int]:
        return [self.bos, *text.encode()]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
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


def local_model(path: str) -> DemoModel:
    """Return a model and tokenizer from files only, in fp32 so that tokens can be compared: from a folder, or a GGUF
    file, whose weights are dequantised. Raises `RequestError` for what transformers does not load."""
    files: dict[str, Any] = {"local_files_only": True}
    folder = Path(path)
    if folder.is_file():
        folder, files["gguf_file"] = folder.parent, folder.name
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **files).eval()
        return DemoModel(path, model, AutoTokenizer.from_pretrained(folder, **files))
    except Exception as error:  # each library that reads a model has errors of its own
        why = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise RequestError(
            f"transformers does not load this model: {why}",
            where=path,
            available="a folder with a decoder of transformers and its tokenizer, or a whole GGUF file of an "
            "architecture that transformers reads, such as llama, qwen3 and gemma3",
            hint="kvframework demo --model smollm2 has one",
        ) from error


class Dialogue(NamedTuple):
    """What stands before, between and behind a text and a question about it."""

    before: str = ""
    between: str = "\n\n"
    behind: str = "\n"


def dialogue_of(tokenizer: Any) -> Dialogue:
    """Return the form of a dialogue that the tokenizer's model was trained on; of a model without one, plain text."""
    if not getattr(tokenizer, "chat_template", None):
        return Dialogue()
    turns = [("user", _TEXT), ("assistant", _READ), ("user", _QUESTION)]
    messages = [{"role": role, "content": content} for role, content in turns]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    before, _, rest = whole.partition(_TEXT)
    between, _, behind = rest.partition(_QUESTION)
    return Dialogue(before, between, behind)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a piece of text, without those that begin or end a prompt."""
    if isinstance(tokenizer, ByteTokenizer):
        return list(text.encode())
    return list(tokenizer.encode(text, add_special_tokens=False))


def prompt_tokens(tokenizer: Any, text: str, question: str, *, cut_to: int = 0) -> list[int]:
    """Return the tokens of a text, cut to so many if that is not 0; with a question, those of a dialogue about it."""
    tokens = list(tokenizer.encode(text))
    if cut_to:
        tokens = tokens[:cut_to]
    if not question:
        return tokens
    if cut_to:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
    form = dialogue_of(tokenizer)
    asked = f"{form.before}{text}{form.between}{question}{form.behind}"
    return encode(tokenizer, asked) if form.before else list(tokenizer.encode(asked))


def end_tokens(model: Any) -> frozenset[int]:
    ends = model.generation_config.eos_token_id
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
