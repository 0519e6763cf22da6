"""Made traces for plans: conversations that go on, below shared beginnings."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from hypothesis import strategies as st

from kvf_plan.trace.form import KVFRAMEWORK, Header, Request


class MadeTrace:
    """Requests as a trace; it can be iterated as often as you like."""

    def __init__(self, requests: Iterable[Request], chunk_tokens: int = 16) -> None:
        self.header = Header(chunk_tokens, "made", KVFRAMEWORK)
        self.requests = list(requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def at(self, times: Sequence[float]) -> MadeTrace:
        moved = [
            Request(at, each.tokens, each.output_tokens, each.chunks)
            for at, each in zip(times, self.requests, strict=True)
        ]
        return MadeTrace(moved, self.header.chunk_tokens)

    def lines(self) -> str:
        head = msgspec.json.encode({"kvframework_trace": 1, "chunk_tokens": self.header.chunk_tokens}).decode()
        rows = [
            msgspec.json.encode(
                {
                    "timestamp": round(each.at * 1000),
                    "input_length": each.tokens,
                    "output_length": 1,
                    "hash_ids": list(each.chunks),
                }
            ).decode()
            for each in self.requests
        ]
        return "\n".join([head, *rows, ""])


def conversations(count: int, seed: int = 1, chunk_tokens: int = 16, every_s: float = 0.5) -> MadeTrace:
    """`count` prompts: one in two goes on with an earlier conversation, the others begin one with a system prompt."""
    chance = random.Random(seed)
    fresh = iter(range(1, 1 << 40))
    systems = [[next(fresh) for _ in range(chance.randint(0, 4))] for _ in range(5)]
    going: list[list[int]] = []
    requests = []
    for number in range(count):
        before = going.pop(chance.randrange(len(going))) if going and chance.random() < 0.5 else chance.choice(systems)
        chunks = [*before, *(next(fresh) for _ in range(chance.randint(1, 8)))]
        going.append(chunks)
        tokens = len(chunks) * chunk_tokens + chance.randrange(chunk_tokens)
        requests.append(Request(number * every_s, tokens, 0, chunks))
    return MadeTrace(requests, chunk_tokens)


@st.composite
def traces(draw: st.DrawFn, chunk_tokens: int = 4) -> MadeTrace:
    """Prompts of two letters a chunk: their ids name all that comes before, as a trace's do."""
    ids: dict[tuple[int, ...], int] = {}
    requests = []
    for at, letters in enumerate(draw(st.lists(st.lists(st.integers(0, 1), max_size=7), min_size=1, max_size=30))):
        chunks = [ids.setdefault(tuple(letters[: end + 1]), len(ids)) for end in range(len(letters))]
        tokens = len(chunks) * chunk_tokens + draw(st.integers(0, chunk_tokens - 1))
        requests.append(Request(float(at), tokens, 0, chunks))
    return MadeTrace(requests, chunk_tokens)
