"""The proof that a model's stored keys are rotated as a `Rotary` says, by running the model. Runs in the engine
process, on the model's device.

The token of a one-token prompt attends to nothing but itself, so no layer's hidden state depends on its position: its
KV at position p must be its KV at position 0, rotated by p, in every layer, with no noise but the rotation's own
rounding. Every exception (learned positions, ALiBi, layers without rotation, a norm behind the rotation, frequencies
that differ by layer or with the length of the prompt) shows, whether this code knows it or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvf_blend.engine.rotation import pairs, rotate_keys
from kvf_blend.errors import BadRotary
from kvf_blend.rotary import Rotary
from transformers import DynamicCache

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
            return "are all zero and prove nothing"
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
            f"{type(model).__name__} cannot be asked for keys at a given position: {type(error).__name__}: {error}",
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
        raise BadRotary("the model fills no DynamicCache", where="model", hint="compute its prompts in full")
    return layers


def _near_by_pairs(expected: torch.Tensor, found: torch.Tensor, rotary: Rotary, tolerance: float) -> bool:
    """Compares pair by pair over the heads, so that a few wrong frequencies show; elements without rotation are
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
