"""`BlendTransformers`: a transformers model whose prompts reuse the KV of documents at any position.

Runs in the engine process and thread; every call blocks, with deadlines on all waits for the server. A server that
fails or does not run costs time: the prompt is then computed in full.
"""

from __future__ import annotations

import logging
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvf_blend.engine.client import BlendClient
from kvf_blend.engine.model_rotary import rotary_of
from kvf_blend.engine.placing import Loaded, held_of, placed
from kvf_blend.engine.prefill import Decoder, check_decoder, prefill
from kvf_blend.engine.recompute import Held, by_deviation
from kvf_blend.errors import BadSegments
from kvf_blend.messages import MAX_BEFORE, REQUESTS, Segment
from kvf_blend.rotary import Rotary
from kvf_transformers.forward import Forward, Saved, token_list, warn
from kvf_transformers.identity import ModelNow
from kvf_transformers.kv import ServedModel
from kvf_transformers.session import Attached, CacheSession, Moved
from kvf_transformers.shapes import LayerPair, layers_of
from kvframework.api.keys import DIGEST_BYTES
from kvframework.errors import RequestError
from transformers import DynamicCache


def pre_compute(
    tokens: Sequence[int],
    segments: Sequence[Segment],
    before: Sequence[int],
    forward: Forward,
    session: CacheSession,
    now: ModelNow,
) -> PreComputed:
    """Compute the segments of `tokens` that are not held, each behind `before`, and store them without it, all in one
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
    return torch.cat([keys for keys, _ in layer], dim=2), torch.cat([values for _, values in layer], dim=2)


_log = logging.getLogger(__name__)

Ranges = Sequence[tuple[int, int]]


class BlendTransformers(ServedModel):
    """Pre-computes segments of text, and blends them into prompts, for one model and one request at a time.

    `model` is in eval mode. `options` and errors are those of `ServedModel`, `share`: the fraction of loaded tokens
    that is recomputed, 0 to 1, and `before`: the tokens that every segment is computed behind, which are those that
    begin the prompts, 4096 at most. They are not stored with a segment, but are part of its name: instances share
    segments if they are given the same ones. Segments are marked by a `separator` (token ids between them) or by
    `ranges` (pairs of start and end, in order); segments that are marked the same way are found behind any L2, and
    those that the server has been given are found in any prompt.

    Raises also `BlendRefused` and `BadRotary` for a model that cannot be blended, `UnknownRequest` from a server
    without `[[requests]] use = "blend"`, `VersionMismatch` from one that is too old for `before`.
    """

    requests = REQUESTS

    def __init__(
        self, model: Any, *, share: float = 0.15, before: torch.Tensor | Sequence[int] = (), **options: Any
    ) -> None:
        self._share = _checked(share)
        self._before = token_list(before) if len(before) else []
        if len(self._before) > MAX_BEFORE:
            raise RequestError(
                f"`before` has {len(self._before)} tokens", where="before", available=f"at most {MAX_BEFORE}"
            )
        self._decoder = Decoder(model)
        self._borrowed = model
        # The client and the rotary parameters of each registration.
        self._blends: weakref.WeakKeyDictionary[Attached, tuple[BlendClient, Rotary]] = weakref.WeakKeyDictionary()
        self._proven: tuple[ModelNow, Rotary] | None = None
        super().__init__(model, **options)

    def close(self) -> None:
        for blend, _ in [*self._blends.values()]:
            blend.unregister()
        self._blends.clear()
        super().close()

    def pre_compute(
        self,
        input_ids: torch.Tensor | Sequence[int],
        *,
        separator: Sequence[int] | None = None,
        ranges: Ranges | None = None,
    ) -> PreComputed:
        """Compute each marked segment that the server does not hold, behind `before` and nothing else, and store it.

        After any failure no segment counts as held. Raises `BadSegments` for arguments that mark no segments,
        `RequestError` for a batch.
        """
        tokens = token_list(input_ids)
        started = time.perf_counter()
        marks = (separator or (), ranges or ())
        try:
            now = self._model.now()
            segments = self._attach(now)[0].name_segments(tokens, *marks)
            done = pre_compute(tokens, segments, self._before, self._forward, self._session, now)
        except BadSegments:
            raise
        except Exception as error:  # noqa: BLE001 - a failed store must not cost the engine its answer
            warn(_log, "the segments could not be stored", error)
            done = PreComputed()
        return PreComputed(done.segments, done.held, done.computed_tokens, done.nbytes, time.perf_counter() - started)

    def restore(
        self,
        input_ids: torch.Tensor | Sequence[int],
        *,
        separator: Sequence[int] | None = None,
        ranges: Ranges | None = None,
    ) -> Loaded:
        """Load the cached parts of this prompt: its longest prefix, then segments behind it, marked or known.

        After any failure nothing is loaded. Raises as `pre_compute`.
        """
        tokens = token_list(input_ids)
        try:
            return self._load(tokens, separator or (), ranges or ())
        except BadSegments:
            raise
        except Exception as error:  # noqa: BLE001 - whatever fails, the prompt is computed
            warn(_log, "nothing could be loaded, so the prompt is computed", error)
            return Loaded(Held(len(tokens)))

    def prefill(
        self,
        input_ids: torch.Tensor | Sequence[int],
        *,
        separator: Sequence[int] | None = None,
        ranges: Ranges | None = None,
        share: float | None = None,
        loaded: Loaded | None = None,
    ) -> BlendedPrompt:
        """Load the cached parts, rotate keys to their new positions and compute the rest, with `share` of the
        segments' tokens: those whose KV in layer 1 is furthest from the loaded one. A `share` of 0 recomputes none and
        skips the measure.

        `loaded` replaces the `restore` of the same prompt; it is not used if the model has changed since. Raises as
        `pre_compute`.
        """
        tokens = token_list(input_ids)
        wanted = self._share if share is None else _checked(share)
        started = time.perf_counter()
        loaded = loaded if loaded is not None else self.restore(tokens, separator=separator, ranges=ranges)
        held = loaded.held
        if held.tokens != len(tokens):
            raise RequestError(f"the loaded KV has {held.tokens} tokens", where="loaded", available=str(len(tokens)))
        try:
            now = self._model.now()
        except Exception as error:  # noqa: BLE001 - a model without a name computes as without a cache
            warn(_log, "the prompt is computed", error)
            plain = DynamicCache()
            logits = self._forward.compute(tokens, plain)
            return BlendedPrompt(logits, plain, Blended(len(tokens), seconds=time.perf_counter() - started))
        if loaded.now not in (None, now):
            _log.warning("the prompt is computed, because the model changed after its KV was loaded")
            loaded = Loaded(Held(len(tokens)))
            held = loaded.held
        pairs = placed(loaded, now.templates)
        choose = partial(by_deviation, share=wanted) if wanted else None
        done = prefill(self._decoder, tokens, held, pairs, choose)
        cache = DynamicCache()
        for index, (keys, values) in enumerate(pairs):
            cache.update(keys, values, index)
        self._guard.begin(cache, now).tokens = [*tokens]
        blended = Blended(
            tokens=len(tokens),
            prefix_tokens=held.prefix,
            hit_tokens=held.prefix + held.loaded,
            recomputed=done.recomputed,
            exact=loaded.exact,
            nbytes=loaded.nbytes,
            seconds=time.perf_counter() - started,
            copy_seconds=loaded.copy_seconds,
        )
        return BlendedPrompt(done.logits, cache, blended)

    def decode(self, logits: torch.Tensor, cache: Any, max_new_tokens: int) -> Iterator[int]:
        """Greedy tokens one by one, after `prefill`; the last one is not in `cache` yet."""
        return self._forward.decode(logits, cache, max_new_tokens)

    def save_final(self, input_ids: torch.Tensor | Sequence[int], cache: Any) -> Saved:
        """Store the whole chunks of a blended prompt, which `cache` holds, as a prefix for later blended prompts.

        The KV is near to exact but not exact: only blend finds it. Borrows the cache until it returns. After any
        failure `tokens` is 0, as for a cache that was filled unseen, or before the model changed. Raises `BadLayout`
        and `RequestError` as `TransformersKV.save`.
        """
        tokens = token_list(input_ids)
        held = min(len(tokens), cache.get_seq_length()) if len(cache) else 0
        pairs = layers_of(cache, tokens=held) if held else []
        begun = self._guard.begun(cache)
        held = begun.plain(tokens[:held]) if begun else 0
        started = time.perf_counter()
        moved = Moved()
        try:
            now = self._model.now()
            if begun is None or begun.now != now:
                raise RequestError("the model changed after the cache was filled, or another model filled the cache")
            if held:
                moved = self._session.store_named(now, self._attach(now)[0].name_final(tokens[:held]), pairs)
        except Exception as error:  # noqa: BLE001 - a failed store must not cost the engine its answer
            warn(_log, "the blended prompt could not be stored", error)
        return Saved(moved.tokens, moved.nbytes, time.perf_counter() - started, moved.seconds)

    def _load(self, tokens: list[int], separator: Sequence[int], ranges: Ranges) -> Loaded:
        now = self._model.now()
        blend, rotary = self._attach(now)
        request_id = uuid.uuid4().hex
        hits = blend.look_up(request_id, tokens, separator, ranges)
        plan = blend.plan(request_id, hits)
        try:
            chunk = self._session.attach(now).registration.desc.chunk_tokens
            held = held_of(len(tokens), hits, plan, chunk, len(self._before))
            moved = self._session.load_named(now, plan.digests)
        finally:
            blend.end(request_id)
        if any(piece.source + piece.tokens > moved.tokens for piece in plan.pieces):
            return Loaded(Held(len(tokens)))
        return Loaded(
            held, plan.pieces, moved.pairs, hits.exact or not held.prefix, moved.nbytes, moved.seconds, now, rotary
        )

    def _attach(self, now: ModelNow, timeout_s: float = 0.0) -> tuple[BlendClient, Rotary]:
        attached = self._session.attach(now, timeout_s)
        known = self._blends.get(attached)
        if known is None:
            rotary = self._rotary_of(now)
            blend = BlendClient(
                self._session.client,
                attached.worker,
                attached.scheduler,
                rotary,
                before=self._before,
                cache_salt=self._session.cache_salt,
                timeout_s=self._session.timeout_s,
            )
            blend.register()
            known = self._blends[attached] = (blend, rotary)
        return known

    def _prove(self, now: ModelNow) -> None:
        self._rotary_of(now)

    def _rotary_of(self, now: ModelNow) -> Rotary:
        """The rotary parameters of the model, once a proof has shown that the model can be blended in its present
        state."""
        if self._proven is None or self._proven[0] != now:
            check_decoder(self._borrowed, self._decoder)
            self._proven = (now, rotary_of(self._borrowed))
        return self._proven[1]


def _checked(share: float) -> float:
    if not 0 <= share <= 1:
        raise RequestError(f"the share to recompute is {share}", where="share", available="0 to 1")
    return share


@dataclass(frozen=True)
class PreComputed:
    """The result of `pre_compute`. The server holds `held` of a text's `segments`; `computed_tokens` of them went
    through the model now, and `nbytes` were copied."""

    segments: int = 0
    held: int = 0
    computed_tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Blended:
    """The reuse of a prompt. `hit_tokens` of the prompt's `tokens` were loaded: the first `prefix_tokens`, and segments
    behind them, of which `recomputed` went through the model again. `exact`: no part of the prefix is from a blended
    prompt.

    Copying the `nbytes` that were loaded took `copy_seconds` of `seconds`; the rest is the lookup, the wait for L2,
    rotation and computation.
    """

    tokens: int
    prefix_tokens: int = 0
    hit_tokens: int = 0
    recomputed: int = 0
    exact: bool = True
    nbytes: int = 0
    seconds: float = 0.0
    copy_seconds: float = 0.0


@dataclass(frozen=True)
class BlendedPrompt:
    """Logits `[1, vocabulary]` behind the last token, a `DynamicCache` with the whole prompt, and its reuse."""

    logits: torch.Tensor
    cache: Any
    blended: Blended
