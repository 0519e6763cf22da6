"""Pre-computation of segments: each is computed behind the same tokens, so that one name means one content. Runs in the
engine process and thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache

from kvf_blend.engine.results import PreComputed
from kvf_blend.messages import Segment
from kvf_transformers.forward import Forward
from kvf_transformers.named_model import ModelNow
from kvf_transformers.session import CacheSession
from kvf_transformers.shapes import LayerPair, layers_of
from kvframework.api.keys import DIGEST_BYTES


def pre_compute(
    tokens: Sequence[int],
    segments: Sequence[Segment],
    before: Sequence[int],
    forward: Forward,
    session: CacheSession,
    now: ModelNow,
) -> PreComputed:
    """Computes the segments of `tokens` that are not held, each behind `before`, and stores them without it, all in one
    store, for the model in its state `now`. Raises the errors of that store."""
    lacking = {segment.digests: segment for segment in segments if not segment.held}
    held = sum(segment.held for segment in segments)
    if not lacking:
        return PreComputed(len(segments), held)
    chunk = session.attach(now).registration.desc.chunk_tokens
    parts: list[list[LayerPair]] = []
    for segment in lacking.values():
        cache = DynamicCache()
        forward.compute([*before, *tokens[segment.start : segment.start + segment.tokens]], cache)
        filled = len(segment.digests) // DIGEST_BYTES * chunk
        pairs = layers_of(cache, tokens=len(before) + segment.tokens)
        parts.append([_cut(pair, len(before), filled) for pair in pairs])
    moved = session.store_named(now, b"".join(lacking), [_joined(layer) for layer in zip(*parts, strict=True)])
    computed = sum(segment.tokens for segment in lacking.values())
    return PreComputed(len(segments), len(segments) if moved.tokens else held, computed, moved.nbytes)


def _cut(pair: LayerPair, before: int, tokens: int) -> LayerPair:
    """The pair without its first `before` tokens, and with zeros behind its last one: the stored bytes are the same in
    every process."""
    keys, values = (
        torch.nn.functional.pad(plane[:, :, before:], (0, 0, 0, tokens + before - plane.shape[2])) for plane in pair
    )
    return keys, values


def _joined(layer: Sequence[LayerPair]) -> LayerPair:
    """One layer of all segments, one behind the other."""
    return torch.cat([keys for keys, _ in layer], dim=2), torch.cat([values for _, values in layer], dim=2)
