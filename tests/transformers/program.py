"""An engine process: `python -m tests.transformers.program ENDPOINT CHUNK TOKENS` computes the prompt of every
family, stores it, and writes the answers as JSON."""

from __future__ import annotations

import json
import sys

import transformers
from kvf_transformers import TransformersKV
from tests.transformers.hybrid_models import HYBRIDS, SMALL, made, prompt

FAMILIES = {"llama": lambda: transformers.LlamaConfig(**SMALL), **HYBRIDS}


def main() -> None:
    endpoint, chunk, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    answers = {}
    for family, config in FAMILIES.items():
        with TransformersKV(made(config()), endpoint=endpoint, model_name=family, deadline_scale=20.0) as kv:
            answer = kv.generate(prompt(tokens), 12)
            assert answer.restored.hit_tokens == 0
            assert answer.saved.tokens == tokens // chunk * chunk
            answers[family] = answer.tokens
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
