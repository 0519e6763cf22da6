"""Models with random weights by seed and a local tokenizer, made once into a directory. Nothing is downloaded.

Needs torch and transformers; run as `python -m tests.vllm.model DIR SIZE`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.lazy import torch

# layers, hidden size, attention heads, KV heads, head size
SIZES = {"tiny": (4, 256, 8, 4, 32), "small": (4, 512, 8, 4, 64), "mid": (8, 1024, 16, 4, 64)}
VOCABULARY = 32000
WINDOW = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "initializer_range": 0.05,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def make(directory: Path, size: str, *, seed: int = 1234) -> Path:
    """A Llama; for "window" a small Gemma 3 some of whose layers have sliding windows, for "windows" a Mistral all of
    whose layers do, for "mla" a DeepSeek-V2. Made only if it is not there."""
    if (directory / "done").exists():
        return directory
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    others = {"window": _gemma, "windows": _mistral, "mla": _deepseek_v2}
    config = others[size]() if size in others else _llama(*SIZES[size])
    return save(directory, AutoModelForCausalLM.from_config(config).float())


def cached(size: str, *, name: str = "", seed: int = 1234) -> Path:
    """A model in the folder that `KVF_VLLM_MODELS` names, or in that of temporary files."""
    folder = os.environ.get("KVF_VLLM_MODELS") or Path(tempfile.gettempdir()) / "kvf-vllm-models"
    return make(Path(folder) / (name or size), size, seed=seed)


def save(directory: Path, model: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    _tokenizer(directory)
    (directory / "done").write_text(json.dumps({"parameters": sum(weight.numel() for weight in model.parameters())}))
    return directory


def make_adapter(directory: Path, model: Path, *, seed: int, rank: int = 8, alpha: int = 64) -> Path:
    """A LoRA adapter of a Llama's attention, or of layers with the same names, with weights by seed, in PEFT's files.
    Whatever is there is overwritten in place."""
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    heads = config.get("head_dim") or hidden // config["num_attention_heads"]
    sizes = {"q": config["num_attention_heads"] * heads, "k": config["num_key_value_heads"] * heads}
    source, weights = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in {**sizes, "v": sizes["k"]}.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            weights[f"{place}.lora_A.weight"] = torch.randn(rank, hidden, generator=source) * 0.2
            weights[f"{place}.lora_B.weight"] = torch.randn(size, rank, generator=source) * 0.2
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps({**described, "base_model_name_or_path": str(model)}))
    return directory


def prompt(tokens: int, *, seed: int = 0) -> list[int]:
    """Token ids that differ with the seed from the first one on."""
    import random

    source = random.Random(seed)
    return [source.randrange(300, VOCABULARY) for _ in range(tokens)]


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        **COMMON,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=False,
    )


def _gemma() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **COMMON,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
        pad_token_id=0,
        query_pre_attn_scalar=64,
    )


def _mistral() -> Any:
    from transformers import MistralConfig

    return MistralConfig(**{**_llama(*SIZES["tiny"]).to_dict(), "model_type": "mistral", "sliding_window": WINDOW})


def _deepseek_v2() -> Any:
    """Latent attention of the sizes that vLLM's kernel for CPUs has, and experts behind a dense layer."""
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **COMMON,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        first_k_dense_replace=1,
    )


def _tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, **{character: index + 2 for index, character in enumerate(alphabet)}}
    # Every id that a random model may produce has a text of its own.
    for index in range(len(vocabulary), VOCABULARY):
        vocabulary[f"<t{index}>"] = index
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(directory)


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2])
