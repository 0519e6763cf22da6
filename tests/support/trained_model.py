"""SmolLM2-135M-Instruct, from its package: the file, and the same weights as a folder that every engine loads. Nothing
is downloaded; where the package is missing, tests are skipped with the command that installs it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvf_demo.command import SHIPPED_TEXT
from kvf_demo.models import chosen_model
from kvf_demo.processes import DemoFailed

NAME = "smollm2"
QUESTION = "What do the signers mutually pledge to each other?"


def trained_file() -> Path:
    """The model's GGUF file."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"no {name}")
    try:
        path = chosen_model(NAME).path
    except DemoFailed as error:
        pytest.skip(f"{error.fact}; {error.hint}")
    assert path is not None
    return path


def trained_folder(cache: Path) -> Path:
    """The model in fp32 as transformers writes one, made once below `cache`: 538 MB. transformers itself writes none
    that was loaded from a GGUF file."""
    file, folder = trained_file(), cache / NAME
    if (folder / "done").exists():
        return folder
    from safetensors.torch import save_file

    from kvf_transformers.demo_model import local_model

    _, model, tokenizer = local_model(str(file))
    folder.mkdir(parents=True, exist_ok=True)
    tied = model.config.tie_word_embeddings
    weights = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    described = model.config.to_dict()
    described.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps({**described, "architectures": [type(model).__name__]}))
    (folder / "generation_config.json").write_text(model.generation_config.to_json_string())
    tokenizer.save_pretrained(folder)
    (folder / "done").touch()
    return folder


def asked(folder: Path) -> tuple[list[int], Callable[[Sequence[int]], str]]:
    """The tokens of the demo's question about its text, and what makes text of an answer's."""
    from kvf_transformers.demo_model import prompt_tokens
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def words(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return prompt_tokens(tokenizer, SHIPPED_TEXT.read_text(encoding="utf-8"), QUESTION), words


def words_of(tokenizer: Any, tokens: int, prompts: int) -> list[list[int]]:
    """So many prompts of `tokens` tokens of the demo's text, each from another word on."""
    from kvf_transformers.demo_model import encode

    ids = encode(tokenizer, SHIPPED_TEXT.read_text(encoding="utf-8"))
    step = (len(ids) - tokens) // prompts
    assert step > 0
    return [ids[at * step : at * step + tokens] for at in range(prompts)]
