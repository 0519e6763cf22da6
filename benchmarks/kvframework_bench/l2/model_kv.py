"""`python -m kvframework_bench.l2.model_kv TEXT FILE` writes the KV that a trained model has of a text, for
`kvframework bench l2 --part codec --kv FILE`: numbers in bfloat16.

The model is computed in fp32, and its numbers are rounded. Chunk by chunk, layer by layer, keys before values, each
`[256 tokens, heads, dim]`: the content of one object after the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvf_demo.models import chosen_model
from kvframework.errors import KVFrameworkError

if TYPE_CHECKING:
    import torch

CHUNK_TOKENS = 256


def main() -> None:
    """Run the program. Exit status 2 without the model or its packages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="smollm2", help="a model of kvframework demo --model, except random")
    parser.add_argument("--tokens", type=int, default=1536, help="longest text in tokens")
    arguments = parser.parse_args()
    try:
        path = chosen_model(arguments.model).path
    except KVFrameworkError as error:
        parser.error(str(error))
    if path is None:
        parser.error("the model random has random weights, whose KV shows nothing about codecs")
    pairs = _computed(str(path), arguments.text.read_text(encoding="utf-8"), arguments.tokens)
    with arguments.file.open("wb") as file:
        for part in chunks(pairs):
            file.write(part)


def chunks(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[bytes]:
    """Yield the bytes of each whole chunk of a cache, whose layers are keys and values `[1, heads, tokens, dim]`."""
    import torch

    for start in range(0, pairs[0][0].shape[2] // CHUNK_TOKENS * CHUNK_TOKENS, CHUNK_TOKENS):
        planes = [plane[0, :, start : start + CHUNK_TOKENS].transpose(0, 1) for pair in pairs for plane in pair]
        packed = torch.cat([plane.to(torch.bfloat16).reshape(-1) for plane in planes])
        yield packed.view(torch.uint8).numpy().tobytes()


def _computed(path: str, text: str, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    import torch

    from kvf_transformers.demo_model import local_model, prompt_tokens

    _, model, tokenizer = local_model(path)
    ids = prompt_tokens(tokenizer, text, "", cut_to=tokens)
    with torch.no_grad():
        cache = model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1).past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers]


if __name__ == "__main__":
    main()
