"""Models with random weights by seed, made once into a directory: the Llama of the tests of vLLM, and a hybrid. Nothing
is downloaded."""

from __future__ import annotations

from pathlib import Path

from tests.support.lazy import torch
from tests.vllm import model as llama
from tests.vllm.hybrid_models import config_of

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

    # The interval says the same as the layers' types, in SGLang's words.
    small = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "full_attention_interval": 4}
    config = config_of(HYBRID, **small)
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config).float()
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
