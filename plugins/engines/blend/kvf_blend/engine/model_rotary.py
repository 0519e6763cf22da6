"""The rotary positions of a transformers model, read from its configuration and proven on the model. Runs in the engine
process, once per model.

The configuration gives the frequencies; only the model's code knows which elements are pairs, where they are and in
which of the two cached tensors of a layer. So each possibility is tried on the model, and the one that holds in all
layers is taken: no model type is trusted by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kvf_blend.engine.rotary_proof import Probe, probe
from kvf_blend.errors import BadRotary
from kvf_blend.rotary import PLANES, SCALINGS, STYLES, Rotary, check

_SUPPORTED = "rotary positions that are the same in all layers: " + ", ".join(SCALINGS) + "; half or interleaved"
_HINT = "compute prompts of this model in full"
# These models rotate by a table in their code: their configuration contains no frequency.
_BY_TABLE = {"gptj": 10000.0, "codegen": 10000.0}


def rotary_of(model: Any) -> Rotary:
    """The rotary parameters of a transformers decoder `model`, which is in eval mode.

    Blocks for two forward passes of eight rows of one token each. Raises `BadRotary`, with the reason, for models whose
    keys cannot be moved to another position by rotating them.
    """
    said = _said(model.config)
    scaling = _scaling(said, model.config)
    asked = probe(model)
    nearest, why = -1, ""
    for candidate in _candidates(model.config, said, scaling, asked):
        check(candidate)
        layer, difference = asked.first_difference(candidate)
        if not difference:
            return candidate
        if layer > nearest:
            nearest, why = layer, difference
    raise BadRotary(
        f"layer {nearest} of this {type(model).__name__} is not rotated as its configuration says: {why}",
        where="model",
        available=_SUPPORTED,
        hint=_rounded(model) or _HINT,
    )


def _said(config: Any) -> Mapping[str, Any]:
    """The one set of rotary parameters that all layers have."""
    said = getattr(config, "rope_parameters", None)
    kind = getattr(config, "model_type", type(config).__name__)
    if not said and kind in _BY_TABLE:
        return {"rope_theta": _BY_TABLE[kind]}
    if not isinstance(said, Mapping) or not said:
        raise BadRotary(
            f"the configuration of {kind!r} says nothing of rotary positions",
            where="config.rope_parameters",
            available=_SUPPORTED,
            hint=_HINT,
        )
    if not any(isinstance(value, Mapping) for value in said.values()):
        return said
    by_layer = [said.get(layer) for layer in dict.fromkeys(getattr(config, "layer_types", None) or said)]
    if by_layer[0] is None or any(other != by_layer[0] for other in by_layer):
        raise BadRotary(
            f"layers of {kind!r} differ in their rotary positions",
            where="config.rope_parameters",
            available=_SUPPORTED,
            hint=_HINT,
        )
    only: Mapping[str, Any] = by_layer[0]
    return only


def _scaling(said: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The fields of `Rotary` that determine the frequencies."""
    kind = said.get("rope_type", "default")
    scaling = "none" if kind == "default" else kind
    if scaling not in SCALINGS or said.get("mrope_section"):
        raise BadRotary(
            f"rotary positions of the kind {'mrope' if scaling in SCALINGS else kind!r}",
            where="config.rope_parameters",
            available=_SUPPORTED,
            hint=_HINT,
        )
    original = said.get("original_max_position_embeddings") or 0
    given = {
        "factor": said.get("factor"),
        "original_max_position": original,
        "low_freq_factor": float(said.get("low_freq_factor") or 0.0),
        "high_freq_factor": float(said.get("high_freq_factor") or 0.0),
        # The defaults of transformers.
        "beta_fast": float(said.get("beta_fast") or 32.0),
        "beta_slow": float(said.get("beta_slow") or 1.0),
        "truncate": bool(said.get("truncate", True)),
    }
    if given["factor"] is None:
        given["factor"] = getattr(config, "max_position_embeddings", 0) / original if original else 0.0
    # Every scaling with factor 1 leaves the frequencies unchanged.
    scaling = "none" if given["factor"] == 1.0 else scaling
    fields = {name: given[name] for name in SCALINGS[scaling]}
    return {"theta": float(said.get("rope_theta") or 0.0), "scaling": scaling, **fields}


def _candidates(config: Any, said: Mapping[str, Any], scaling: dict[str, Any], asked: Probe) -> Iterator[Rotary]:
    """The rotations that a model's code may derive from its configuration, the usual first."""
    latent = getattr(config, "qk_rope_head_dim", None)
    for plane in PLANES if latent else PLANES[:1]:
        head = asked.width(plane)
        dim = min(head, latent or head)
        if getattr(config, "model_type", "") in _BY_TABLE:
            dim = getattr(config, "rotary_dim", None) or dim
        else:
            dim = int(dim * (said.get("partial_rotary_factor") or 1.0))
        for offset in dict.fromkeys((0, head - dim)):
            for style in STYLES:
                yield Rotary(style, head_dim=head, rotary_dim=dim, offset=offset, plane=plane, **scaling)


def _rounded(model: Any) -> str:
    """A hint if the model's own frequencies have lost their precision, which `model.to(dtype)` does."""
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.dtype != torch.float32:
            return f"{name} is {buffer.dtype}: give the dtype when the model is loaded, not by model.to(dtype)"
    return ""
