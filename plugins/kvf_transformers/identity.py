"""Owns what a model is called towards the cache, so that two different models never share KV.

A name and a revision are what people call a model; weights may still differ under them (a checkpoint overwritten in
place, an adapter merged after loading). A fingerprint of configuration and sampled weights is therefore always part of
the revision. Runs once a model, in the engine process.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

import torch

from kvframework.errors import RequestError

_SAMPLES = 64
# What may differ between two loads of the same weights.
_NOT_IDENTITY = {"_name_or_path", "transformers_version", "_commit_hash", "architectures", "use_cache"}


class ModelIdentity(NamedTuple):
    name: str
    revision: str


def identify(model: Any, model_name: str | None = None, revision: str | None = None) -> ModelIdentity:
    """The model's own name and revision unless given, with the fingerprint.

    Raises `RequestError` when a model has no name of its own (made from a configuration) and none was given.
    """
    name = model_name or getattr(model.config, "_name_or_path", "")
    if not name:
        raise RequestError(
            f"this {type(model).__name__} has no name: it was made from a configuration",
            where="model_name",
            hint="give model_name, another one for other weights",
        )
    told = revision if revision is not None else getattr(model.config, "_commit_hash", None) or ""
    return ModelIdentity(name, f"{told}+{fingerprint(model)}")


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
