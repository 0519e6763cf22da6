"""Conversations of several turns with engines, all at the same time, some of their requests broken off. Every token is
compared with that of an engine that computed it without the cache."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.support.engine_soak.engine import ANSWER_S, Engine


@dataclass(frozen=True)
class Talk:
    """The conversations: their number, turns and lengths in tokens. Half of them begin alike. `broken_off`: the tokens
    of answers that nobody waits for."""

    conversations: int = 8
    turns: int = 4
    answer: int = 24
    broken_off: int = 400
    shared: int = 600
    own: int = 200
    said: int = 60
    vocabulary: tuple[int, int] = (300, 32000)

    def opening(self, conversation: int) -> list[int]:
        length = self.own * (5 + conversation) // 5
        return [*self._tokens(self.shared, conversation % 2), *self._tokens(length, 100 + conversation)]

    def turn(self, conversation: int, turn: int) -> list[int]:
        return self._tokens(self.said, 1000 + 10 * conversation + turn)

    def _tokens(self, count: int, seed: int) -> list[int]:
        source = random.Random(seed)
        return [source.randrange(*self.vocabulary) for _ in range(count)]


# By conversation and turn: the prompt and its answer.
Right = dict[tuple[int, int], tuple[list[int], list[int]]]


def expected(talk: Talk, engine: Engine) -> Right:
    """What an engine without the cache answers, one request after the other."""
    found: Right = {}
    for conversation in range(talk.conversations):
        tokens = talk.opening(conversation)
        for turn in range(talk.turns):
            tokens = [*tokens, *talk.turn(conversation, turn)]
            answer = engine.complete(tokens, talk.answer).tokens
            found[conversation, turn] = (tokens, answer)
            tokens = [*tokens, *answer]
    return found


@dataclass
class Seen:
    """What the conversations have seen so far. `rounds` are whole conversations; `lost` the requests at an engine that
    was killed meanwhile."""

    answers: int = 0
    rounds: int = 0
    broken_off: int = 0
    lost: int = 0
    cached: int = 0
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Conversations:
    """All conversations at the same time, again and again while the block runs, each turn with any of the engines."""

    def __init__(self, talk: Talk, engines: Sequence[Engine], right: Right, seen: Seen) -> None:
        self._talk = talk
        self._engines = engines
        self._right = right
        self._seen = seen
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Conversations:
        self._threads = [
            threading.Thread(target=self._go_on, args=(conversation,))
            for conversation in range(self._talk.conversations)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def last(self, seconds: float) -> None:
        """Go on for so long; fails at once with the first wrong answer."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end, "the end", seconds + ANSWER_S)

    def until(self, condition: Callable[[], bool], what: str, timeout: float = 2 * ANSWER_S) -> None:
        """Go on until the condition is true; fails at once with the first wrong answer."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert not self._seen.wrong, self._seen.wrong[:3]
            assert time.monotonic() < deadline, f"{what}: not within {timeout} s"
            # Conditions may ask the server, which has other things to do.
            time.sleep(0.1)

    def _go_on(self, conversation: int) -> None:
        source = random.Random(f"{conversation} {self._seen.answers}")
        try:
            while not self._ended.is_set():
                for turn in range(self._talk.turns):
                    self._take(conversation, turn, source)
                with self._seen.lock:
                    self._seen.rounds += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, the test fails with it
            with self._seen.lock:
                self._seen.wrong.append(f"conversation {conversation}: {error!r}")

    def _take(self, conversation: int, turn: int, source: random.Random) -> None:
        tokens, right = self._right[conversation, turn]
        while True:
            chosen = source.choice([engine for engine in self._engines if engine.up])
            life = chosen.life
            if source.random() < 0.3:
                chosen.break_off(tokens, self._talk.broken_off, source.random() * 0.5)
                with self._seen.lock:
                    self._seen.broken_off += 1
            try:
                found, cached = chosen.complete(tokens, self._talk.answer)
            except (OSError, http.client.HTTPException, ValueError):
                if chosen.up and chosen.life == life:
                    raise
                with self._seen.lock:
                    self._seen.lost += 1
                continue
            with self._seen.lock:
                self._seen.answers += 1
                self._seen.cached += cached
                if found != right:
                    self._seen.wrong.append(f"{conversation}.{turn}, port {chosen.port}: {found} is not {right}")
            return
