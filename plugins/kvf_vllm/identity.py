"""The name of a vLLM engine's KV. Reads weight files."""

from __future__ import annotations

from kvframework.client import EngineKind, KvIdentity, ModelFacts, model_identity

VLLM = EngineKind(
    b"kvf-vllm-config",
    frozenset(
        {
            "auto",
            "bitsandbytes",
            "fastsafetensors",
            "gguf",
            "hf",
            "instanttensor",
            "mistral",
            "npcache",
            "pt",
            "runai_streamer",
            "runai_streamer_sharded",
            "safetensors",
            "sharded_state",
        }
    ),
    "kv_connector_extra_config",
)


def identify(facts: ModelFacts, *, model: str = "", weights: str = "") -> KvIdentity:
    """See `model_identity`."""
    return model_identity(VLLM, facts, model=model, weights=weights)
