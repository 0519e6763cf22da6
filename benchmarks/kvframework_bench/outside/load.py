"""The sizes of the outside workloads, the trace that the tools replay, and the tokenizer of the bench's model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import msgspec

from kvframework_bench.serving.load import Ask, LoadShape
from kvframework_bench.serving.model import LONGEST, VOCABULARY

_SPECIAL = ("<s>", "</s>", "<unk>")
# Printable ASCII, CJK ideographs and Hangul: each is one character in any normal form.
_RANGES = (range(0x09, 0x0B), range(0x20, 0x7F), range(0x4E00, 0xA000), range(0xAC00, 0xD7A4))
_CHAT = "{% for each in messages %}{{ each['role'] + ': ' + each['content'] + '\n' }}{% endfor %}assistant: "


class OutsideSizes(msgspec.Struct, frozen=True):
    """`shape` is what is taken of the trace. `prompts` of each of the other workloads in `seconds`, which begin with
    one of `prefixes` shared beginnings of `prefix_tokens`, and have `answer_tokens`."""

    shape: LoadShape
    prompts: int
    seconds: float
    prefixes: int = 6
    prefix_tokens: int = 2048
    suffix_tokens: int = 128
    answer_tokens: int = 16
    kv_cache_bytes: int = 24 << 20
    capacity_bytes: int = 1 << 30
    engine_bytes: int = 1 << 30

    @property
    def longest(self) -> int:
        """The tokens that a prompt and its answer may have: a chat grows to less than twice its beginning."""
        return max(self.shape.longest + self.shape.longest_answer, 2 * self.prefix_tokens)


FULL = OutsideSizes(LoadShape(requests=30, seconds=12), prompts=24, seconds=12)
QUICK = OutsideSizes(
    LoadShape(requests=6, seconds=2, longest=1024), prompts=4, seconds=2, prefixes=2, prefix_tokens=512
)


def trace_lines(asks: Sequence[Ask]) -> Iterator[bytes]:
    """Yield the requests in Mooncake's form: equal chunks have equal ids."""
    for ask in asks:
        yield msgspec.json.encode(
            {
                "timestamp": round(1000 * ask.at),
                "input_length": ask.prompt_tokens,
                "output_length": ask.answer_tokens,
                "hash_ids": [piece.chunk for piece in ask.pieces],
            }
        )


def write_tokenizer(model: Path) -> None:
    """Write a tokenizer beside a model of the bench, in which each character is one token: what a tool decodes and
    encodes again has the same tokens. Raises `OSError`."""
    characters = [chr(each) for each in chain(*_RANGES)][: VOCABULARY - len(_SPECIAL)]
    vocabulary = {text: number for number, text in enumerate((*_SPECIAL, *characters))}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": text, **special} for number, text in enumerate(_SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"[\s\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": LONGEST,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT,
    }
    for name, document in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        (model / name).write_text(json.dumps(document))
