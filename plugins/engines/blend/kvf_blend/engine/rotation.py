"""Rotation of keys to another position, with torch. Runs in the engine process, on the keys' device; keeps no tensor.

All tokens move by the same number of positions, so one angle per pair is enough. It is computed in float64, on the
host: in float32 the product of a position near 100,000 and a frequency near 1 is off by hundredths of a radian.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from kvf_blend.errors import BadRotary
from kvf_blend.rotary import Rotary, check, inverse_frequencies

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def rotate_keys(keys: torch.Tensor, rotary: Rotary, shift: int) -> torch.Tensor:
    """`keys`, [..., tokens, head_dim] with any leading axes, rotated to positions `shift` higher.

    A new tensor of the same dtype and device, which the caller owns; `keys` stay unchanged. Elements that are not
    rotated are copied bit by bit: those outside the rotated part, and with a shift of 0 all of them. Computed in
    float32, with some 10 bytes of temporaries for each rotated element: pass large tensors layer by layer. Raises
    `BadRotary` for parameters that `check` refuses, and for keys of another head size or dtype.
    """
    cosines, sines = _turn(rotary, shift)
    if keys.ndim < 2 or keys.shape[-1] != rotary.head_dim or keys.dtype not in _DTYPES:
        raise BadRotary(
            f"keys are {keys.dtype}, {tuple(keys.shape)}",
            where="rotate_keys",
            available=f"[..., tokens, {rotary.head_dim}] of {', '.join(map(str, _DTYPES))}",
            hint="register the head size of the stored keys",
        )
    rotated = keys.clone()
    if shift == 0:
        return rotated
    cos = torch.tensor(cosines, dtype=torch.float32, device=keys.device)
    sin = torch.tensor(sines, dtype=torch.float32, device=keys.device)
    first, second = (part.float() for part in pairs(keys, rotary))
    to_first, to_second = pairs(rotated, rotary)
    to_first.copy_(first * cos - second * sin)
    to_second.copy_(second * cos + first * sin)
    return rotated


def pairs(keys: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and of the second elements of all pairs, [..., tokens, rotary_dim / 2]."""
    part = keys[..., rotary.offset : rotary.offset + rotary.rotary_dim]
    if rotary.style == "interleaved":
        return part[..., 0::2], part[..., 1::2]
    half = rotary.rotary_dim // 2
    return part[..., :half], part[..., half:]


@lru_cache(maxsize=256)
def _turn(rotary: Rotary, shift: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    check(rotary)
    angles = [shift * frequency for frequency in inverse_frequencies(rotary)]
    return tuple(map(math.cos, angles)), tuple(map(math.sin, angles))
