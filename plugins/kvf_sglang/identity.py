"""The name of an SGLang engine's KV: engines whose KV may differ never share a name. Reads weight files.

SGLang tells a storage backend a served name only: not the weights, not the dtype. So the revision holds a digest of the
model's configuration, the settings that change KV, and every byte of its weight files, or the name that the user gave
them.
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
        "flash_rl",
        "gguf",
        "instanttensor",
        "layered",
        "mistral",
        "npcache",
        "pt",
        "safetensors",
    }
)
# Fields that may differ between two loads of the same weights.
_NOT_IDENTITY = {"_name_or_path", "transformers_version", "_commit_hash", "use_cache"}


@dataclass(frozen=True)
class ModelFacts:
    """The model as SGLang knows it. `files` determine its weights, (): they are no local files. `dtype` is that of its
    computation, `settings` are the engine's own settings that change KV. `draft` is the model that proposes tokens,
    `adapters` are the files of each LoRA adapter by name. `engine` names the engine, whose weights were read after
    `started`, seconds since the epoch."""

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
    adapters: Mapping[str, tuple[Path, ...]] | None = None
    engine: str = ""
    started: float = math.inf


def identify(facts: ModelFacts, *, model: str = "", weights: str = "") -> KvIdentity:
    """`model` and `weights` are the user's names for them; with both, the KV has the same name as in engines of other
    kinds, see `named_identity`. Without `weights`, reads the weight files whole, once.

    SGLang names an adapter by its name and path only, in the page hashes: so the bytes of all adapters that the engine
    was started with are in the name of its KV.

    Raises `ConfigFieldError` if the weights or an adapter have no name: they are no local files, or change while they
    are read.
    """
    settings = dict(facts.settings)
    if facts.draft is not None:
        draft = identify(facts.draft, weights=weights)
        settings["draft"] = [draft.revision, draft.quantization]
    if facts.adapters:
        settings["adapters"] = {
            name: _content(facts, files, f"adapter {name}") for name, files in facts.adapters.items()
        }
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
    shape = hashlib.blake2b(text.encode(), digest_size=8, person=b"kvf-sgl-config").hexdigest()
    return KvIdentity(model or facts.name, f"{facts.revision}+{shape}+{weights or _weights(facts)}", facts.quantization)


def _weights(facts: ModelFacts) -> str:
    if facts.load_format == "dummy":
        return f"dummy-{facts.seed}"
    if facts.load_format not in _FORMATS_OF_FILES:
        raise _unnamed(facts, "weights", f"are loaded as {facts.load_format!r}, which need not be the model's files")
    return _content(facts, facts.files, "weights")


def _content(facts: ModelFacts, files: tuple[Path, ...], what: str) -> str:
    if not files:
        raise _unnamed(facts, what, "are no local files")
    try:
        content = fingerprint(files)
        changed = changed_since(files, facts.started)
    except OSError as error:
        raise _unnamed(facts, what, f"cannot be read: {error}") from error
    if not changed:
        return content
    # SGLang may have loaded the former contents of the file.
    log.warning(
        "%s of %s changed after this engine started: its KV is shared with no other engine until it starts again",
        ", ".join(path.name for path in changed[:3]),
        facts.name,
    )
    return f"{content}+{facts.engine}"


def _unnamed(facts: ModelFacts, what: str, why: str) -> ConfigFieldError:
    return ConfigFieldError(
        f"the {what} of {facts.name!r} {why}, so that they cannot be distinguished from others",
        where="kvframework.weights",
        available="any text that is another one for other weights",
        hint='set "kvframework.weights", see docs/engines/sglang.md#options',
    )
