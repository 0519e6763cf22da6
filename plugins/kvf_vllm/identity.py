"""The name of a vLLM engine's KV: engines whose KV may differ never share a name. Reads weight files.

A model's name and revision do not name its weights: a checkpoint may be overwritten in place. So the revision always
holds a digest over every byte of the weight files, or the name that the user gave them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvframework.client import KvIdentity, changed_since, fingerprint, named_identity
from kvframework.errors import ConfigFieldError

log = logging.getLogger(__name__)

# Formats that load the files of the model's directory. Other formats load weights from elsewhere.
_FORMATS_OF_FILES = frozenset(
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
)
# Fields that may differ between two loads of the same weights.
_NOT_IDENTITY = {"_name_or_path", "transformers_version", "_commit_hash", "use_cache"}


@dataclass(frozen=True)
class ModelFacts:
    """The model as vLLM knows it. `files` determine its weights, (): they are no local files. `dtype` is that of its
    computation, `settings` are the engine's own settings that change KV. `draft` is the model that proposes tokens, and
    keeps KV. `engine` names the engine, whose weights were read after `started`, seconds since the epoch."""

    name: str
    revision: str
    quantization: str
    load_format: str
    seed: int
    config: Mapping[str, object]
    dtype: str
    settings: Mapping[str, object]
    files: tuple[Path, ...] = ()
    draft: ModelFacts | None = None
    engine: str = ""
    started: float = math.inf


def identify(facts: ModelFacts, *, model: str = "", weights: str = "") -> KvIdentity:
    """`model` and `weights` are the user's names for them; with both, the KV has the same name as in engines of other
    kinds, see `named_identity`. Without `weights`, reads the weight files whole, once, see `digest_files`.

    Raises `ConfigFieldError` if the weights have no name: they are no local files, or change while they are read, and
    `weights` is empty.
    """
    settings = dict(facts.settings)
    if facts.draft is not None:
        draft = identify(facts.draft, weights=weights)
        settings["draft"] = [draft.revision, draft.quantization]
    if model and weights:
        return named_identity(
            model,
            weights,
            config=facts.config,
            dtype=facts.dtype,
            quantization=facts.quantization,
            settings=settings,
        )
    relevant = {key: value for key, value in facts.config.items() if key not in _NOT_IDENTITY}
    text = json.dumps([relevant, {"dtype": facts.dtype, **settings}], sort_keys=True, default=str)
    shape = hashlib.blake2b(text.encode(), digest_size=8, person=b"kvf-vllm-config").hexdigest()
    revision = f"{facts.revision}+{shape}+{weights or _weights(facts)}"
    return KvIdentity(model or facts.name, revision, facts.quantization)


def _weights(facts: ModelFacts) -> str:
    if facts.load_format == "dummy":
        return f"dummy-{facts.seed}"
    if not facts.files:
        raise _unnamed(facts, "are no local files")
    if facts.load_format not in _FORMATS_OF_FILES:
        raise _unnamed(facts, f"are loaded as {facts.load_format!r}, which need not be the model's files")
    try:
        content = fingerprint(facts.files)
        changed = changed_since(facts.files, facts.started)
    except OSError as error:
        raise _unnamed(facts, f"cannot be read: {error}") from error
    if not changed:
        return content
    # vLLM may have loaded the former contents of the file.
    log.warning(
        "%s of %s changed after this engine started: its KV is shared with no other engine until it starts again",
        ", ".join(path.name for path in changed[:3]),
        facts.name,
    )
    return f"{content}+{facts.engine}"


def _unnamed(facts: ModelFacts, why: str) -> ConfigFieldError:
    return ConfigFieldError(
        f"the weights of {facts.name!r} {why}, so that they cannot be distinguished from others",
        where="kvframework.weights",
        available="any text that is another one for other weights",
        hint='set "kvframework.weights" in kv_connector_extra_config',
    )
