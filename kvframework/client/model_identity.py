"""The name of the KV of an engine that loads its model from files: engines whose KV may differ never share a name.
Reads weight files.

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
from typing import NamedTuple

from kvframework.client.model_files import changed_since, fingerprint
from kvframework.client.naming import KvIdentity, named_identity
from kvframework.errors import ConfigFieldError

log = logging.getLogger(__name__)

# Fields that may differ between two loads of the same weights.
_NOT_IDENTITY = {"_name_or_path", "transformers_version", "_commit_hash", "use_cache"}


class EngineKind(NamedTuple):
    """A kind of engine. `person` (16 bytes at most) keeps its names apart from those of other kinds; `formats` are the
    load formats that load the files of the model's directory, others load weights from elsewhere; `options` is what the
    user calls the place of its options."""

    person: bytes
    formats: frozenset[str]
    options: str


@dataclass(frozen=True)
class ModelFacts:
    """The model as the engine knows it. `files` determine its weights, (): they are no local files. `dtype` is that of
    its computation, `settings` are the engine's own settings that change KV. `draft` is the model that proposes tokens,
    and keeps KV; `adapters` are the files of each LoRA adapter that is always part of the model, by name. `engine`
    names the engine, whose weights were read after `started`, seconds since the epoch."""

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


def model_identity(kind: EngineKind, facts: ModelFacts, *, model: str = "", weights: str = "") -> KvIdentity:
    """`model` and `weights` are the user's names for them; with both, the KV has the same name as in engines of other
    kinds, see `named_identity`. Without `weights`, reads the weight files whole, once, see `digest_files`.

    Raises `ConfigFieldError` if the weights or an adapter have no name: they are no local files, or change while they
    are read, and `weights` is empty.
    """
    settings = dict(facts.settings)
    if facts.draft is not None:
        draft = model_identity(kind, facts.draft, weights=weights)
        settings["draft"] = [draft.revision, draft.quantization]
    if facts.adapters:
        settings["adapters"] = {
            name: _content(kind, facts, files, f"adapter {name}") for name, files in facts.adapters.items()
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
    shape = hashlib.blake2b(text.encode(), digest_size=8, person=kind.person).hexdigest()
    revision = f"{facts.revision}+{shape}+{weights or _weights(kind, facts)}"
    return KvIdentity(model or facts.name, revision, facts.quantization, facts.dtype.removeprefix("torch."))


def _weights(kind: EngineKind, facts: ModelFacts) -> str:
    if facts.load_format == "dummy":
        return f"dummy-{facts.seed}"
    if facts.load_format not in kind.formats:
        why = f"are loaded as {facts.load_format!r}, which need not be the model's files"
        raise _unnamed(kind, facts, "weights", why)
    return _content(kind, facts, facts.files, "weights")


def _content(kind: EngineKind, facts: ModelFacts, files: tuple[Path, ...], what: str) -> str:
    if not files:
        raise _unnamed(kind, facts, what, "are no local files")
    try:
        content = fingerprint(files)
        changed = changed_since(files, facts.started)
    except OSError as error:
        raise _unnamed(kind, facts, what, f"cannot be read: {error}") from error
    if not changed:
        return content
    # The engine may have loaded the former contents of the file.
    log.warning(
        "%s of %s changed after this engine started: its KV is shared with no other engine until it starts again",
        ", ".join(path.name for path in changed[:3]),
        facts.name,
    )
    return f"{content}+{facts.engine}"


def _unnamed(kind: EngineKind, facts: ModelFacts, what: str, why: str) -> ConfigFieldError:
    return ConfigFieldError(
        f"the {what} of {facts.name!r} {why}, so that they cannot be distinguished from others",
        where="kvframework.weights",
        available="any text that is another one for other weights",
        hint=f'set "kvframework.weights" in {kind.options}',
    )
