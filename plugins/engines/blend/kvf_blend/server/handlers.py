"""The handlers of blend's requests. Those that hash or match run in the server's worker threads, registration on the
serving thread; none waits for L2.

A request only plans: it names segments, finds hits and their positions, and pins them. The bytes move by the core's
STORE and RETRIEVE under these names, over the instance's transport.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from kvf_blend import BlendOptions
from kvf_blend import messages as m
from kvf_blend.errors import BadSegments
from kvf_blend.server.instances import Blended, attach, blended, detach
from kvf_blend.server.lookup import Loads, Lookup, pinned
from kvf_blend.server.matcher import KnownSegments, Space
from kvf_blend.server.segments import (
    Choice,
    Question,
    Span,
    chunks_of,
    final_digests,
    marked,
    prompt_digests,
    segment_digests,
    unpack,
)
from kvframework.api.keys import DIGEST_BYTES, TOKEN_BYTES
from kvframework.api.requests import CacheServices, ClientInfo, Handler, HandlerResult


class BlendHandlers:
    """The handlers of one server. Between requests they keep the index of known segments and the number of loads in
    progress."""

    def __init__(self, options: BlendOptions, services: CacheServices) -> None:
        self._services = services
        self._known = KnownSegments(options.known_segments)
        self._loads = Loads()

    def handlers(self) -> list[Handler[Any]]:
        return [
            Handler(m.CB_REGISTER_KV_CACHE, self._register),
            Handler(m.CB_UNREGISTER_KV_CACHE, self._unregister),
            Handler(m.CB_STORE_PRE_COMPUTED, self._store, pooled=True),
            Handler(m.CB_LOOKUP_PRE_COMPUTED, self._lookup, pooled=True),
            Handler(m.CB_RETRIEVE_PRE_COMPUTED, self._retrieve, pooled=True),
            Handler(m.CB_STORE_FINAL, self._store_final, pooled=True),
        ]

    def _register(self, client: ClientInfo, payload: m.RegisterBlend, _buffers: object) -> m.BlendRegistered:
        instance = attach(self._services, client, payload)
        return m.BlendRegistered(instance.fingerprint, instance.chunk_tokens)

    def _unregister(self, client: ClientInfo, payload: m.UnregisterBlend, _buffers: object) -> m.BlendUnregistered:
        detach(self._services, client, payload.instance_id)
        return m.BlendUnregistered()

    def _store(self, client: ClientInfo, payload: m.StorePreComputed, _buffers: object) -> m.SegmentNames:
        instance = blended(self._services, payload.instance_id, client)
        tokens = payload.tokens
        spans = marked(tokens, payload.separator, payload.ranges)
        if not payload.separator and not payload.ranges:
            raise BadSegments("the request has neither a separator nor ranges", available="a separator or ranges")
        objects = instance.objects(self._services, payload.cache_salt)
        objects.check(sum(chunks_of(end - start, instance.chunk_tokens) for start, end in spans))
        segments = list(self._named(instance, tokens, spans))
        for each in segments:
            self._known.add(_space(instance, payload.cache_salt), _cut(tokens, each.start, each.tokens), each.digests)
        digests = list(dict.fromkeys(digest for each in segments for digest in unpack(each.digests)))
        held = objects.whole(digests, self._services.present(objects.keys(digests)))
        return m.SegmentNames(
            tuple(
                m.Segment(each.start, each.tokens, each.digests, held.issuperset(unpack(each.digests)))
                for each in segments
            )
        )

    def _lookup(self, client: ClientInfo, payload: m.LookupPreComputed, _buffers: object) -> HandlerResult:
        instance = blended(self._services, payload.instance_id)
        tokens, hasher, chunk = payload.tokens, self._services.hasher, instance.chunk_tokens
        spans = marked(tokens, payload.separator, payload.ranges)
        # The last token is always left to compute: the engine needs its logits.
        most = max(len(tokens) // TOKEN_BYTES - 1, 0)
        objects = instance.objects(self._services, payload.cache_salt, all_ranks=True)
        chained = _cut(tokens, 0, min(most, objects.most_digests // 4 * chunk))
        candidates = list(self._named(instance, tokens, [(start, end) for start, end in spans if end <= most]))
        candidates += self._known.find(
            _space(instance, payload.cache_salt), _cut(tokens, 0, most), lambda part: self._name(instance, part)
        )
        question = Question(
            unpack(prompt_digests(hasher, chained, chunk)),
            unpack(final_digests(hasher, chained, chunk, instance.fingerprint)),
            candidates,
            chunk_tokens=chunk,
            most_digests=objects.most_digests,
        )
        lookup = Lookup(
            self._services, client, question, objects, payload.request_id, chunk_tokens=chunk, loads=self._loads
        )
        return lookup.start(instance.desc)

    def _retrieve(self, client: ClientInfo, payload: m.RetrievePreComputed, _buffers: object) -> m.LoadPlan:
        instance = blended(self._services, payload.instance_id, client)
        chunk = instance.chunk_tokens
        _check_hits(payload, chunk)
        objects = instance.objects(self._services, payload.cache_salt)
        named = len(payload.prefix_digests) + sum(len(each.digests) for each in payload.segments)
        objects.check(named // DIGEST_BYTES)
        question = Question(
            unpack(payload.prefix_digests), (), payload.segments, chunk_tokens=chunk, most_digests=objects.most_digests
        )
        choice, ticket = pinned(self._services, client, question, objects, payload.request_id)
        return _plan(choice, chunk, ticket, instance.before_tokens)

    def _store_final(self, client: ClientInfo, payload: m.StoreFinal, _buffers: object) -> m.FinalNames:
        instance = blended(self._services, payload.instance_id, client)
        tokens = payload.tokens
        marked(tokens, b"", b"")
        instance.objects(self._services, payload.cache_salt).check(len(tokens) // TOKEN_BYTES // instance.chunk_tokens)
        return m.FinalNames(final_digests(self._services.hasher, tokens, instance.chunk_tokens, instance.fingerprint))

    def _named(self, instance: Blended, tokens: bytes, spans: Sequence[Span]) -> Iterable[m.Segment]:
        for start, end in spans:
            yield m.Segment(start, end - start, self._name(instance, _cut(tokens, start, end - start)))

    def _name(self, instance: Blended, tokens: bytes) -> bytes:
        return segment_digests(self._services.hasher, tokens, instance.chunk_tokens, instance.fingerprint)


def _plan(choice: Choice, chunk_tokens: int, ticket: str, before_tokens: int) -> m.LoadPlan:
    """The load plan of a choice. A chunk that occurs twice in the prompt is loaded once."""
    loaded = list(choice.prefix)
    prefix = len(loaded) * chunk_tokens
    pieces = [m.Piece(0, 0, prefix, 0)] if prefix else []
    sources: dict[bytes, int] = {}
    for each in choice.segments:
        if each.digests not in sources:
            sources[each.digests] = len(loaded) * chunk_tokens
            loaded += unpack(each.digests)
        pieces.append(m.Piece(sources[each.digests], each.start, each.tokens, each.start - before_tokens))
    return m.LoadPlan(b"".join(loaded), tuple(pieces), ticket)


def _check_hits(payload: m.RetrievePreComputed, chunk_tokens: int) -> None:
    """Raise `BadSegments` for hits that no CB_LOOKUP_PRE_COMPUTED returns."""
    digests, rest = divmod(len(payload.prefix_digests), DIGEST_BYTES)
    if rest or digests * chunk_tokens != payload.prefix_tokens:
        raise BadSegments(
            f"the prefix has {payload.prefix_tokens} tokens and {len(payload.prefix_digests)} bytes of digests",
            where="prefix",
            available=f"{DIGEST_BYTES} bytes for each chunk of {chunk_tokens} tokens",
        )
    last = payload.prefix_tokens
    for index, each in enumerate(payload.segments):
        expected = chunks_of(each.tokens, chunk_tokens) * DIGEST_BYTES
        if len(each.digests) != expected:
            raise BadSegments(
                f"the segment has {each.tokens} tokens and {len(each.digests)} bytes of digests",
                where=f"segments[{index}]",
                available=f"{expected} bytes",
            )
        if each.start < last:
            raise BadSegments(
                f"the segment begins at token {each.start}",
                where=f"segments[{index}]",
                available=f"{last} or later, in order",
                hint="send the segments that CB_LOOKUP_PRE_COMPUTED answered, or some of them",
            )
        last = each.start + each.tokens


def _cut(tokens: bytes, start: int, count: int) -> bytes:
    return tokens[start * TOKEN_BYTES : (start + count) * TOKEN_BYTES]


def _space(instance: Blended, cache_salt: str) -> Space:
    # Only a digest of the salt, which is a secret, stays in memory.
    salt = hashlib.blake2b(cache_salt.encode(), digest_size=16, person=b"kvf-blend").digest()
    return instance.context.namespace, salt, instance.fingerprint
