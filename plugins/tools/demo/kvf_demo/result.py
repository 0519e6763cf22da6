"""The measurements of `kvframework demo`, its `--json` documents, and its pass conditions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

EXIT_OK, EXIT_WRONG = 0, 1


class EngineRun(msgspec.Struct):
    """One engine process, filled from its events. `ended`: the model's last token is its end of an answer. `*_s` of
    bytes are the seconds of copying alone; `asked_s` ends with the server's answer and the copy."""

    model: str = ""
    parameters: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    restored_bytes: int = 0
    restored_s: float = 0.0
    asked_s: float = 0.0
    ttft_s: float = 0.0
    stored_tokens: int = 0
    stored_bytes: int = 0
    stored_s: float = 0.0
    tokens: list[int] = []
    text: str = ""
    ended: bool = False

    def take(self, event: Mapping[str, Any]) -> None:
        """Read one event of `kvf_transformers.demo_engine`; unknown events are ignored."""
        kind = event["event"]
        if kind == "ready":
            self.model, self.parameters = event["model"], event["parameters"]
            self.prompt_tokens = event["prompt_tokens"]
        elif kind == "restored":
            self.hit_tokens, self.restored_bytes = event["hit_tokens"], event["nbytes"]
            self.restored_s = event["copy_seconds"]
        elif kind == "first_token":
            self.ttft_s = event["seconds"]
        elif kind == "saved":
            self.stored_tokens, self.stored_bytes = event["tokens"], event["nbytes"]
            self.stored_s = event["copy_seconds"]
        elif kind == "done":
            self.tokens, self.text, self.ended = event["tokens"], event["text"], event["ended"]


class Recovered(msgspec.Struct):
    """`l1.recovered` of the status of a server that came after a killed one. `hit_s`: from the kill to the hit."""

    objects: int
    bytes: int
    seconds: float
    why_cold: str = ""
    hit_s: float = 0.0


class DemoResult(msgspec.Struct):
    """Two engine runs. `cold` ran with an empty cache, so its tokens are those of a run without a cache. `recovered` is
    of `--kill`; without a `question` the model goes on with the text."""

    cold: EngineRun
    warm: EngineRun
    l2: str = ""
    recovered: Recovered | None = None
    question: str = ""

    @property
    def ttft_ratio(self) -> float:
        return self.cold.ttft_s / max(self.warm.ttft_s, 1e-9)

    @property
    def tokens_equal(self) -> bool:
        return bool(self.warm.tokens) and self.cold.tokens == self.warm.tokens

    @property
    def exit_status(self) -> int:
        """0 only if there was a hit and the tokens are equal."""
        return EXIT_OK if self.tokens_equal and self.warm.hit_tokens else EXIT_WRONG

    def document(self) -> dict[str, Any]:
        return {
            **msgspec.to_builtins(self),
            "ttft_ratio": round(self.ttft_ratio, 2),
            "tokens_equal": self.tokens_equal,
            "ok": self.exit_status == EXIT_OK,
        }
