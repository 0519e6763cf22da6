"""The identity of KV by the user's own names, by one rule for all engines: so engines of different kinds find each
other's objects. Pure; runs once a model, in the engine process.

Each engine can also name its KV by itself, from its own knowledge of its weights; such names never equal these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from kvframework.errors import RequestError

# The settings that may differ between two engines, or two loads, of the same model. The dtype is named by itself: an
# engine may compute in a dtype other than its configuration's.
_NOT_KV = frozenset(
    {"architectures", "dtype", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache"}
)


class KvIdentity(NamedTuple):
    """The identity of KV within the namespace, see `kvframework.api.keys.compute_namespace`. `dtype` is what the model
    computes in, for the server's status: where it changes KV, `revision` names it, too."""

    model_name: str
    revision: str
    quantization: str = ""
    dtype: str = ""


def named_identity(
    model: str,
    weights: str,
    *,
    config: Mapping[str, object],
    dtype: str,
    quantization: str = "",
    settings: Mapping[str, object] | None = None,
) -> KvIdentity:
    """Return the identity of a model's KV for a user who has named the model and its weights.

    The user promises that equal names mean equal weights, adapters and the like included. The engine's own knowledge is
    added: `config`, the model's configuration in the words of transformers (rope scaling is in it), `dtype`, in which
    the engine computes, `quantization`, "" for none, and `settings` of the engine that change KV, except those that are
    off (None, False, "", 0).

    Raises `RequestError` for an empty name.
    """
    if not model or not weights:
        raise RequestError(
            f"the model is called {model!r} and its weights {weights!r}",
            available="a name for each",
            hint="give both, the same ones to every engine that is to share",
        )
    more = {name: value for name, value in (settings or {}).items() if value}
    described = msgspec.json.encode(
        [_kv_part(config), dtype.removeprefix("torch."), more], enc_hook=str, order="deterministic"
    )
    digest = hashlib.blake2b(described, digest_size=16, person=b"kvf-named").hexdigest()
    return KvIdentity(model, f"named+{digest}+{weights}", quantization, dtype.removeprefix("torch."))


def _kv_part(config: object) -> object:
    """Return a configuration without the settings that do not change KV, at any depth."""
    if isinstance(config, Mapping):
        return {
            str(key): _kv_part(value)
            for key, value in config.items()
            if key not in _NOT_KV and not str(key).startswith("_")
        }
    return [_kv_part(each) for each in config] if isinstance(config, (list, tuple)) else config
