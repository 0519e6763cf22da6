"""The rotary positions of a transformers model, read from its configuration and proven on the model. Runs in the engine
process, once per model.

The configuration gives the frequencies; only the model's code knows which elements are pairs, where they are and in
which of the two cached tensors of a layer. So each possibility is tried on the model, and the one that holds in all
layers is taken: no model type is trusted by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvf_blend.engine.placing import pairs, rotate_keys
from kvf_blend.errors import BadRotary
from kvf_blend.rotary import PLANES, SCALINGS, STYLES, Rotary, check
from transformers import DynamicCache

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
        f"layer {nearest} of this {type(model).__name__} rotates keys otherwise than its configuration says: {why}",
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
            f"the configuration of {kind!r} does not describe rotary positions",
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
            f"the model has rotary positions of the kind {'mrope' if scaling in SCALINGS else kind!r}",
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


_ROWS = 8
# Beyond it the error of a float32 angle exceeds the difference that the proof looks for.
_FURTHEST = 131072
# Of a pair's length. A wrong pair is off by its whole length somewhere between position 0 and the furthest.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.06}

# Keys and values of one layer, [rows, heads, 1, dim].
_Planes = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Probe:
    """KV of the same tokens, each a prompt of its own, at position 0 and at `positions`; layer by layer."""

    positions: list[int]
    at_zero: list[_Planes]
    moved: list[_Planes]

    def width(self, plane: str) -> int:
        """Elements of a head in the first layer's `plane`."""
        return int(self.at_zero[0][plane == "values"].shape[-1])

    def first_difference(self, rotary: Rotary) -> tuple[int, str]:
        """The first layer whose KV differs from the rotation by `rotary`, and the difference; the number of layers if
        none differs."""
        for layer, (before, after) in enumerate(zip(self.at_zero, self.moved, strict=True)):
            turned = rotary.plane == "values"
            said = self._difference(before[turned], after[turned], rotary)
            if said:
                return layer, f"its {rotary.plane} {said}"
            if not _near(before[not turned].float(), after[not turned].float(), _TOLERANCES[before[0].dtype]):
                return layer, f"its {'keys' if turned else 'values'} depend on the position too"
        return len(self.at_zero), ""

    def _difference(self, before: torch.Tensor, after: torch.Tensor, rotary: Rotary) -> str:
        if before.shape[-1] != rotary.head_dim:
            return f"have {before.shape[-1]} elements a head, and {rotary.head_dim} in other layers"
        if not before.any():
            return "are all zero, so they cannot be checked"
        if torch.equal(before, after):
            return "do not turn with the position"
        for row, position in enumerate(self.positions):
            expected, found = rotate_keys(before[row], rotary, position), after[row]
            # A model computes its angles in float32: at large positions they are off by some 2**-24 of the position.
            tolerance = _TOLERANCES[before.dtype] + position * 2.0**-22
            if not _near_by_pairs(expected, found, rotary, tolerance):
                return f"at position {position} are not those of position 0, rotated"
        return ""


def probe(model: Any) -> Probe:
    """Blocks for two forward passes of 8 rows of one token. Raises `BadRotary` for models that cannot run
    such prompts."""
    config = model.config
    furthest = min(getattr(config, "max_position_embeddings", None) or 2048, _FURTHEST) - 1
    spread = {1, 2, 5, *(furthest // 2**step for step in (0, 1, 2, 4, 6))}
    positions = sorted(position for position in spread if 1 <= position <= furthest)
    tokens = [(row + 1) * (config.vocab_size - 1) // (_ROWS + 1) for row in range(len(positions))]
    if model.training:
        raise BadRotary("the model is in training mode", where="model", hint="call model.eval()")
    try:
        return Probe(positions, _computed(model, tokens, [0] * len(tokens)), _computed(model, tokens, positions))
    except BadRotary:
        raise
    except Exception as error:
        raise BadRotary(
            f"{type(model).__name__} cannot compute keys at a given position: {type(error).__name__}: {error}",
            where="model",
            available="decoders that take input_ids, position_ids and a DynamicCache",
            hint="compute prompts of this model in full",
        ) from error


def _computed(model: Any, tokens: list[int], positions: list[int]) -> list[_Planes]:
    cache = DynamicCache()
    with torch.no_grad():
        model(
            input_ids=torch.tensor(tokens, device=model.device)[:, None],
            position_ids=torch.tensor(positions, device=model.device)[:, None],
            past_key_values=cache,
            use_cache=True,
        )
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    for layer, planes in enumerate(layers):
        for plane in planes:
            said = f"{plane.dtype}, {tuple(plane.shape)}" if isinstance(plane, torch.Tensor) else "not there"
            if not isinstance(plane, torch.Tensor) or plane.ndim != 4 or plane.dtype not in _TOLERANCES:
                raise BadRotary(
                    f"keys and values are {said}",
                    where=f"layer {layer}",
                    available=f"[rows, heads, tokens, dim] of {', '.join(map(str, _TOLERANCES))}",
                    hint="compute prompts of this model in full",
                )
    if not layers:
        raise BadRotary("the model does not fill a DynamicCache", where="model", hint="compute prompts in full")
    return layers


def _near_by_pairs(expected: torch.Tensor, found: torch.Tensor, rotary: Rotary, tolerance: float) -> bool:
    """Compare pair by pair over the heads, so that a few wrong frequencies show; elements without rotation are
    compared bit by bit."""
    lengths = torch.hypot(*(part.float() for part in pairs(found, rotary))).norm(dim=0)
    apart = [of - to for of, to in zip(pairs(expected.float(), rotary), pairs(found.float(), rotary), strict=True)]
    allowed = tolerance * (lengths + lengths.mean() / 4)
    if not bool((torch.hypot(*apart).norm(dim=0) <= allowed).all()):  # so that NaN is no proof
        return False
    start, end = rotary.offset, rotary.offset + rotary.rotary_dim
    return all(
        _near(expected[..., part].float(), found[..., part].float(), _TOLERANCES[found.dtype])
        for part in (slice(0, start), slice(end, None))
    )


def _near(expected: torch.Tensor, found: torch.Tensor, tolerance: float) -> bool:
    return expected.shape == found.shape and bool((expected - found).norm() <= tolerance * found.norm())
