"""The name of an SGLang engine's KV. Reads weight files.

SGLang tells a storage backend a served name only: not the weights, not the dtype. An adapter it names by its name and
path, in the page hashes: so the bytes of all adapters that the engine was started with are in the name of its KV.
"""

from __future__ import annotations

from kvframework.client import EngineKind, KvIdentity, ModelFacts, model_identity

SGLANG = EngineKind(
    b"kvf-sgl-config",
    frozenset(
        {
            "auto",
            "bitsandbytes",
            "fastsafetensors",
            "flash_rl",
            "gguf",
            "instanttensor",
            "layered",
            "mistral",
            "npcache",
            "pt",
            "safetensors",
        }
    ),
    "SGLang's extra configuration, see docs/engines/sglang.md#options",
)


def identify(facts: ModelFacts, *, model: str = "", weights: str = "") -> KvIdentity:
    """See `model_identity`."""
    return model_identity(SGLANG, facts, model=model, weights=weights)
