"""A load of multi-turn conversations, made from a trace: which requests, when, and of which tokens. Pure.

The trace says what prompts share, not what they say: equal chunk ids become equal tokens. Lengths are divided and times
compressed, each by one number, so that who shares what with whom, and in which order they come, stay as they were.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

import msgspec

from kvf_plan.trace.form import Request
from kvframework_bench.errors import BenchFailed

# Ids below are special tokens of some models.
_FIRST_TOKEN = 300
# A chunk that more than this share of all requests begin with is a system prompt: it makes no conversation.
_COMMON = 0.5
# No conversation is more than a fourth of the load: a cache that holds one of a few has them all.
_SHARE = 4


class LoadShape(msgspec.Struct, frozen=True):
    """What is taken of a trace. Of its first `window_s` seconds, those conversations that have two turns or more, but
    not more than a fourth of the load, and whose prompts, divided by `shorter`, have at most `longest` tokens; of
    these, evenly, so many that there are about `requests` requests, which arrive within `seconds`. Answers are
    `shorter_answers` times as short as the trace's, from 1 to `longest_answer` tokens."""

    requests: int
    seconds: float
    window_s: float = 1200.0
    shorter: int = 4
    longest: int = 4096
    shorter_answers: int = 16
    longest_answer: int = 32


class Piece(msgspec.Struct, frozen=True):
    """The first `tokens` tokens of a chunk of the trace."""

    chunk: int
    tokens: int


class Ask(msgspec.Struct, frozen=True):
    """One request: when it is due, in seconds from the beginning of the load, and what it asks. `turn` counts the
    requests of its conversation from 0 on."""

    at: float
    conversation: int
    turn: int
    pieces: tuple[Piece, ...]
    answer_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


def make_load(trace: Iterable[Request], chunk_tokens: int, shape: LoadShape) -> list[Ask]:
    """Return the requests of a load, in the order of time. Raises `BenchFailed` for a trace without such
    conversations, and what reading it raises."""
    window = _window(trace, shape.window_s)
    conversations = [
        turns
        for turns in _conversations(window)
        if 1 < len(turns) <= max(shape.requests // _SHARE, 2)
        and all(each.tokens // shape.shorter <= shape.longest for each in turns)
    ]
    taken = _evenly(conversations, shape.requests)
    if not taken:
        raise BenchFailed(
            f"the trace's first {shape.window_s:.0f} s have no conversation of two to "
            f"{max(shape.requests // _SHARE, 2)} turns with at most {shape.longest * shape.shorter} tokens",
            available="a trace with prompts that begin with the chunk ids of an earlier prompt",
        )
    asks = [
        Ask(
            at=request.at * shape.seconds / shape.window_s,
            conversation=number,
            turn=turn,
            pieces=_pieces(request, chunk_tokens, shape.shorter),
            answer_tokens=min(max(request.output_tokens // shape.shorter_answers, 1), shape.longest_answer),
        )
        for number, turns in enumerate(taken)
        for turn, request in enumerate(turns)
    ]
    asks.sort(key=lambda ask: ask.at)
    return [msgspec.structs.replace(ask, at=ask.at - asks[0].at) for ask in asks]


def token_ids(ask: Ask, *, seed: int, vocabulary: int) -> list[int]:
    """Return the prompt's token ids: equal for equal pieces and seed, and of another seed different from the first
    one on, but for chance."""
    ids: list[int] = []
    for piece in ask.pieces:
        source = random.Random(f"{seed} {piece.chunk}")
        ids += [source.randrange(_FIRST_TOKEN, vocabulary) for _ in range(piece.tokens)]
    return ids


def shared_tokens(asks: Sequence[Ask]) -> int:
    """Return how many tokens of the prompts an unlimited cache has seen before, at the same place of a prompt that
    began alike."""
    seen: set[tuple[Piece, ...]] = set()
    found = 0
    for ask in asks:
        prefixes = [ask.pieces[: at + 1] for at in range(len(ask.pieces))]
        for prefix in prefixes:
            if prefix not in seen:
                break
            found += prefix[-1].tokens
        seen.update(prefixes)
    return found


def _window(trace: Iterable[Request], seconds: float) -> list[Request]:
    """Return the requests until then, and no more of the trace than that."""
    found = []
    for request in trace:
        if request.at >= seconds:
            break
        found.append(request)
    return found


def _conversations(requests: Sequence[Request]) -> list[list[Request]]:
    """Return requests that begin alike, beyond what most of them begin with, in the order of the first of each."""
    often = Counter(chunk for request in requests for chunk in set(request.chunks))
    by_root: dict[int, list[Request]] = {}
    for request in requests:
        own = (chunk for chunk in request.chunks if often[chunk] <= _COMMON * len(requests))
        for root in islice(own, 1):
            by_root.setdefault(root, []).append(request)
    return list(by_root.values())


def _evenly(conversations: Sequence[list[Request]], requests: int) -> list[list[Request]]:
    """Return conversations from the whole of the window, until there are so many requests; at least one of them."""
    total = sum(map(len, conversations))
    if total <= requests:
        return list(conversations)
    taken, passed, have = [], 0, 0
    for turns in conversations:
        passed += len(turns)
        if have * total < requests * passed:
            taken.append(turns)
            have += len(turns)
    return taken


def _pieces(request: Request, chunk_tokens: int, shorter: int) -> tuple[Piece, ...]:
    """Return the prompt in pieces of a chunk's tokens, the last one of what is left. A prompt is never empty."""
    size, left = max(chunk_tokens // shorter, 1), max(request.tokens // shorter, 1)
    pieces = []
    for chunk in request.chunks:
        pieces.append(Piece(chunk, min(size, left)))
        left -= size
        if left <= 0:
            break
    return tuple(pieces)
