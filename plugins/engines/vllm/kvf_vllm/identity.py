"""The name of a vLLM engine's KV. Reads weight files."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvframework.client import EngineKind, KvIdentity, ModelFacts, changed_since, model_identity
from kvframework.errors import ConfigFieldError

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
    return model_identity(VLLM, facts, model=model, weights=weights)


@dataclass(frozen=True)
class Named:
    """A model as it was when the engine started, and its name; `model` and `weights` are the user's own."""

    facts: ModelFacts
    identity: KvIdentity
    model: str = ""
    weights: str = ""

    def after_update(self, facts: ModelFacts, began: float | None) -> KvIdentity:
        """The name after vLLM has loaded all weights from the files of `facts`, from `began` on, seconds since the
        epoch; None: from elsewhere. Reads files. Raises `ConfigFieldError` or `OSError` if they have no name, or have
        changed since."""
        if began is None:
            raise ConfigFieldError(
                "some weights of the running engine were changed in memory, not by files",
                where=facts.name,
                available='collective_rpc("reload_weights", kwargs={"weights_path": ...}), which keeps KV shared',
                hint="this engine finds only KV that it stored after that change",
            )
        own = self.facts.files
        if self.weights and own and facts.files == own and not changed_since(own, self.facts.started):
            return self.identity
        # Only the user can say what his name for the weights stands for.
        identity = model_identity(VLLM, replace(facts, started=math.inf), model=self.model)
        changed = changed_since(facts.files, began)
        if changed:
            raise OSError(f"{changed[0]} changed after vLLM began to load the weights")
        return identity
