"""Owns what `kvframework demo blend` measures and prints with `--json`, and when it counts as passed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvframework.cli.demo_result import EXIT_OK, EXIT_WRONG

# "Far nearer": how many times the distance of blending must fit into that of the stored KV as it is.
FAR_NEARER = 3.0
# What the demo's own models are called.
OWN_MODEL = "kvframework-demo-"


class WayResult(msgspec.Struct):
    """One way to the first token. `distance` is the relative L2 distance of its logits to those of the full
    computation, `divergence` the Kullback-Leibler divergence, in nats, of its next-token distribution from theirs.
    """

    ttft_s: float
    hit_tokens: int
    recomputed: int
    distance: float
    divergence: float
    same_token: bool


class BlendResult(msgspec.Struct):
    """`documents` are their tokens; the prompt has them in another order, and a question behind them."""

    l2: str = ""
    model: str = ""
    parameters: int = 0
    documents: list[int] = []
    prompt_tokens: int = 0
    ways: dict[str, WayResult] = {}

    def take_model(self, event: Mapping[str, Any]) -> None:
        """The first event of `kvf_blend.engine.demo_engine`."""
        self.model, self.parameters, self.documents = event["model"], event["parameters"], event["documents"]

    @property
    def times_nearer(self) -> float:
        """How many times nearer blending is to the full computation than the stored KV as it is."""
        return self.ways["naive"].distance / max(self.ways["blend"].distance, 1e-9)

    @property
    def ttft_ratio(self) -> float:
        """How many times sooner than the full computation blending has the first token."""
        return self.ways["full"].ttft_s / max(self.ways["blend"].ttft_s, 1e-9)

    @property
    def all_hit(self) -> bool:
        return self.ways["blend"].hit_tokens == sum(self.documents) > 0

    @property
    def exit_status(self) -> int:
        """0 only if all documents were hit and blending is far nearer."""
        return EXIT_OK if self.all_hit and self.times_nearer >= FAR_NEARER else EXIT_WRONG

    def document(self) -> dict[str, Any]:
        return {
            **msgspec.to_builtins(self),
            "times_nearer": round(self.times_nearer, 2),
            "ttft_ratio": round(self.ttft_ratio, 2),
            "ok": self.exit_status == EXIT_OK,
        }
