"""SmolLM2-135M-Instruct, from its package. Nothing is downloaded; where the package is missing, tests are skipped with
the command that installs it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from kvframework.cli.demo.command import SHIPPED_TEXT
from kvframework.cli.demo.models import chosen_model
from kvframework.cli.demo.processes import DemoFailed

NAME = "smollm2"


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


def words_of(tokenizer: Any, tokens: int, prompts: int) -> list[list[int]]:
    """So many prompts of `tokens` tokens of the demo's text, each from another word on."""
    from kvf_transformers.demo_model import encode

    ids = encode(tokenizer, SHIPPED_TEXT.read_text(encoding="utf-8"))
    step = (len(ids) - tokens) // prompts
    assert step > 0
    return [ids[at * step : at * step + tokens] for at in range(prompts)]
