"""Placement of loaded chunks as the KV of a prompt: pieces at their positions, keys rotated to them. Runs in the engine
process and thread, on the device of the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from kvf_blend.engine.recompute import Held
from kvf_blend.engine.rotation import rotate_keys
from kvf_blend.messages import Hits, LoadPlan, Piece
from kvf_blend.rotary import PLANES, Rotary
from kvf_blend.server.digests import chunks_of
from kvf_transformers.named_model import ModelNow
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
