"""Which of vLLM's kinds of cache are kept, a decision for each of its classes. By name, so that nothing here imports
vLLM; a test compares the names with vLLM's, and docs/engines/vllm.md has the table."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvf_vllm.facts import check_states, layer_specs
from kvframework.errors import BadLayout


class Kind(NamedTuple):
    """What becomes of a class of vLLM's. `kept`: an engine that has it is served; `prompts_only`: what was decoded is
    not stored, since it is not what vLLM computes of the same tokens in a prompt."""

    kept: bool
    what: str
    prompts_only: bool = False


KINDS = {
    "FullAttentionSpec": Kind(True, "all tokens of the hit"),
    "MLAAttentionSpec": Kind(True, "all tokens of the hit; not on a CPU"),
    "SinkFullAttentionSpec": Kind(True, "all tokens of the hit; vLLM 0.32 cannot start such a model"),
    "HiddenStateCacheSpec": Kind(True, "all tokens of the hit"),
    "RSWASpec": Kind(True, "prompt tokens; decoded tokens are not stored", True),
    "SlidingWindowSpec": Kind(True, "the last window of the hit"),
    "SlidingWindowMLASpec": Kind(True, "the last window of the hit, unless vLLM computes it (bounded replay)"),
    "ChunkedLocalAttentionSpec": Kind(True, "the last attention chunk of the hit"),
    "MambaSpec": Kind(True, "the last state, if `mamba_cache_mode` is `align`, also within a block"),
    "CircularBufferSpec": Kind(True, "nothing: vLLM does not need this cache for a hit"),
    "HiSparseHotSpec": Kind(False, "HiSparseConnector moves it"),
    "HiSparseResidentSpec": Kind(False, "HiSparseConnector moves it"),
    "CrossAttentionSpec": Kind(False, "nothing: vLLM keeps it"),
    "EncoderOnlyAttentionSpec": Kind(False, "nothing: vLLM keeps it"),
}


def check_kinds(kv_cache_config: Any) -> bool:
    """Return whether only prompts may be stored. Raises `BadLayout` for a kind of cache that is not kept, or that
    nothing is known of."""
    prompts_only = False
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = list(layer_specs(group.kv_cache_spec).values())
        for name in sorted({type(spec).__name__ for spec in specs}):
            kind = KINDS.get(name, Kind(False, "this release does not know the kind"))
            if not kind.kept:
                raise BadLayout(
                    f"KV cache group {index} holds {name}: {kind.what}",
                    where="kvf_vllm",
                    available=", ".join(sorted(name for name, kind in KINDS.items() if kind.kept)),
                    hint="run this model without the connector",
                )
            prompts_only |= kind.prompts_only
        check_states(index, [spec for spec in specs if type(spec).__name__ == "MambaSpec"])
    return prompts_only


def table() -> str:
    """Return the kinds as a table in Markdown."""
    rows = [f"| `{name}` | {'yes' if kind.kept else 'no'} | {kind.what} |" for name, kind in KINDS.items()]
    return "\n".join(["| vLLM's cache class | supported | what a hit loads |", "|---|---|---|", *rows])
