"""Placement of loaded chunks as the KV of a prompt: pieces at their positions, keys rotated to them. Runs in the engine
process, on the keys' device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec
import torch

from kvf_blend.engine.recompute import Held
from kvf_blend.errors import BadRotary
from kvf_blend.messages import Hits, LoadPlan, Piece
from kvf_blend.rotary import PLANES, Rotary, check, inverse_frequencies
from kvf_blend.server.segments import chunks_of
from kvf_transformers.identity import ModelNow
from kvf_transformers.shapes import LayerPair
from kvframework.api.keys import DIGEST_BYTES


@dataclass(frozen=True)
class Loaded:
    """The loaded parts of a prompt. `sources` hold whole chunks, the padding of partial ones too; `pieces` map their
    tokens to positions. `exact`: the prefix is not from a blended prompt. `now` is the model that the KV belongs to,
    whose keys `rotary` rotates; None if nothing was loaded."""

    held: Held
    pieces: tuple[Piece, ...] = ()
    sources: tuple[LayerPair, ...] = ()
    exact: bool = True
    nbytes: int = 0
    copy_seconds: float = 0.0
    now: ModelNow | None = None
    rotary: Rotary | None = None

    def unrotated(self) -> Loaded:
        """The stored keys at their new positions as they are: what blending is compared with, and never an answer."""
        return replace(self, pieces=tuple(msgspec.structs.replace(piece, shift=0) for piece in self.pieces))


def held_of(tokens: int, hits: Hits, plan: LoadPlan, chunk_tokens: int, before_tokens: int = 0) -> Held:
    """The tokens of a prompt that a plan loads, whose segments were computed from position `before_tokens`. Raises
    `ValueError` for a plan that loads anything but `hits`, or to another place."""
    if sum(piece.tokens for piece in plan.pieces) > tokens:
        raise ValueError("the plan loads more tokens than the prompt has")
    segments = {(each.start, each.tokens): each.digests for each in hits.segments}
    for piece in plan.pieces:
        first, beside = divmod(piece.source, chunk_tokens)
        filled = chunks_of(piece.tokens, chunk_tokens)
        expected, computed_at = segments.get((piece.start, piece.tokens)), before_tokens
        if piece.start == 0 and filled * chunk_tokens == piece.tokens <= hits.prefix_tokens:
            expected, computed_at = hits.prefix_digests[: filled * DIGEST_BYTES], 0
        named = plan.digests[first * DIGEST_BYTES : (first + filled) * DIGEST_BYTES]
        if beside or piece.shift != piece.start - computed_at or named != expected:
            raise ValueError(f"the plan loads a segment that was not found: {piece}")
    pieces = list(plan.pieces)
    # Segments begin behind the prefix, so a piece at 0 is the prefix if there is one.
    prefix = pieces.pop(0).tokens if hits.prefix_tokens and pieces and pieces[0].start == 0 else 0
    return Held(tokens, prefix, tuple((piece.start, piece.start + piece.tokens) for piece in pieces))


def placed(loaded: Loaded, templates: Sequence[LayerPair]) -> list[LayerPair]:
    """KV of the whole prompt, layer by layer, in new tensors; where nothing was loaded it is undefined."""
    rotary = loaded.rotary
    pairs = []
    for layer, template in enumerate(templates):
        whole = tuple(plane.new_empty(1, plane.shape[1], loaded.held.tokens, plane.shape[3]) for plane in template)
        for piece in loaded.pieces:
            for index, plane in enumerate(whole):
                part = loaded.sources[layer][index][:, :, piece.source : piece.source + piece.tokens]
                if piece.shift and rotary is not None and index == PLANES.index(rotary.plane):
                    part = rotate_keys(part, rotary, piece.shift)
                plane[:, :, piece.start : piece.start + piece.tokens] = part
        keys, values = whole
        pairs.append((keys, values))
    return pairs


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
