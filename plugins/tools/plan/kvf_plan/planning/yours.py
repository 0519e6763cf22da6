"""The engine of a plan: of the catalogue, yours, or the one with numbers of the other. Pure."""

from __future__ import annotations

import math

import msgspec

from kvf_plan.planning.catalogue import Engine, engine
from kvframework.errors import PlanError


def engine_of(
    model: str,
    gpu: str,
    gpus: int,
    prefill: float | None,
    attention_tokens: float | None,
    bytes_per_token: int | None,
) -> Engine:
    """Return it; "" and None: not given. Raises `PlanError` if the speed or the KV of a token is unknown."""
    if prefill is not None and not 0 < prefill < math.inf:
        raise PlanError(f"{prefill} tokens a second", where="--prefill", available="a positive number")
    if attention_tokens is not None and not 0 <= attention_tokens < math.inf:
        raise PlanError(f"{attention_tokens} tokens", where="--attention", available="a number, or 0 for none")
    if model and gpu:
        known = engine(model, gpu, gpus)
    elif prefill is None or not bytes_per_token:
        unknown = ["the engine's speed"] * (prefill is None) + ["the KV of a token"] * (not bytes_per_token)
        raise PlanError(
            f"not known: {' and '.join(unknown)}",
            where="kvframework plan",
            available="--engine MODEL --gpu GPU, or --prefill TOKENS/S --bytes-per-token SIZE",
            hint="`kvframework plan --catalogue` shows what it knows",
        )
    else:
        known = Engine(
            name=model or "your engine",
            gpu=gpu,
            gpus=max(gpus, 1),
            tokens_per_s=prefill,
            attention_tokens=0.0,
            bytes_per_token=bytes_per_token,
            basis="yours",
            note="--prefill",
            source="",
        )
    if prefill is not None:
        known = msgspec.structs.replace(known, tokens_per_s=prefill, basis="yours", note="--prefill", source="")
    if attention_tokens is not None:
        known = msgspec.structs.replace(known, attention_tokens=attention_tokens)
    return msgspec.structs.replace(known, bytes_per_token=bytes_per_token) if bytes_per_token else known
