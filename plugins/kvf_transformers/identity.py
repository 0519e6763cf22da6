"""Owns what a model is called towards the cache, so that two different models never share KV.

A name and a revision are what people call a model; weights may still differ under them (a checkpoint overwritten in
place, an adapter merged after loading). A fingerprint of configuration and sampled weights is therefore part of the
revision, unless the user has named the weights too, as engines of other kinds need it. Runs once a model, in the engine
process.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from kvframework.client import KvIdentity, named_identity
from kvframework.errors import RequestError

_SAMPLES = 64
# What may differ between two loads of the same weights.
_NOT_IDENTITY = {"_name_or_path", "transformers_version", "_commit_hash", "architectures", "use_cache"}


def identify(
    model: Any, model_name: str | None = None, revision: str | None = None, weights: str | None = None
) -> KvIdentity:
    """The model's own name and revision unless given, with the fingerprint; with `weights`, what engines of other kinds
    call it, see `named_identity`.

    Raises `RequestError` when a model has no name of its own (made from a configuration) and none was given, or when
    `weights` come without a name or with a revision.
    """
    if weights is not None:
        if revision is not None:
            raise RequestError(
                f"weights {weights!r} and revision {revision!r} name the same thing", where="weights", available="one"
            )
        quantization = getattr(model.config, "quantization_config", None) or {}
        if not isinstance(quantization, dict):
            quantization = quantization.to_dict()
        return named_identity(
            model_name or "",
            weights,
            config=model.config.to_dict(),
            dtype=str(model.dtype),
            quantization=str(quantization.get("quant_method", "")),
        )
    name = model_name or getattr(model.config, "_name_or_path", "")
    if not name:
        raise RequestError(
            f"this {type(model).__name__} has no name: it was made from a configuration",
            where="model_name",
            hint="give model_name, another one for other weights",
        )
    told = revision if revision is not None else getattr(model.config, "_commit_hash", None) or ""
    return KvIdentity(name, f"{told}+{fingerprint(model)}")


def fingerprint(model: Any) -> str:
    """32 hex digits over the configuration and up to 64 elements of each weight, evenly spread.

    Weights without memory (on the meta device) count by name and shape only. Blocks for a copy of the samples.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"kvf-transformers")
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_IDENTITY}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    with torch.no_grad():
        for name, weight in sorted(model.state_dict().items()):
            digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
            if weight.device.type != "meta" and weight.numel():
                digest.update(_sample(weight))
    return digest.hexdigest()


def _sample(weight: torch.Tensor) -> bytes:
    """Elements at evenly spread positions, by index, so that no weight is copied whole."""
    count = min(_SAMPLES, weight.numel())
    flat = [index * (weight.numel() - 1) // max(1, count - 1) for index in range(count)]
    positions = torch.unravel_index(torch.tensor(flat, device=weight.device), weight.shape)
    picked = weight.detach()[positions].contiguous().cpu()
    return bytes(picked.reshape(-1).view(torch.uint8).tolist())
