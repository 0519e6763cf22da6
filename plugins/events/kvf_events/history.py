"""The numbered messages of the stream, and the answer to a reader that lacks some. Pure.

What is still remembered is repeated word for word. For older numbers the answer is the state: removals of what was
announced before, then what is announced now, then empty batches, so that each number from the one asked for to the live
one comes once, as some readers demand. What is announced is removed first, since a reader counts the announcements.

The answers to readers that lack messages, each sent as fast as its reader takes it. Pure.

A reader that takes nothing costs what its queue holds, and one of `MOST_ANSWERS` places until it has left: the rest of
its answer is given up. The end of the answer, without which some readers wait for ever, is sent once there is room.
However many ask, answers take a share of a core, since the serving thread has the same interpreter.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import msgspec

from kvf_events.block_index import BlockIndex, News, Removed, Stored
from kvf_events.chunks import SALT_TAG, ExtraKeys
from kvf_events.options import Format
from kvframework.api.hasher import TOKEN_BYTES

# Batches of events as vLLM writes them, which routers read: msgpack of `[time, events, rank]`, an event being a map
# with its `type` or, for older readers, an array. Pure. Encoding the event of a chunk takes 2 us.
#
# Field for field vLLM's, in its order; what has no meaning here is left out. `cache_salt` is the one field beside:
# NVIDIA Dynamo keeps salts apart by it, other readers skip it.

# The rank of a batch: there is one server a node, and a router tells it from the engine's ranks by its registration.
_RANK = 0


class _Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: Sequence[ExtraKeys | None] | None = None
    cache_salt: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    block_hashes: Sequence[int]
    medium: str | None


class Encoder:
    """Encodes batches in one format. `block_size` is the tokens of a block."""

    def __init__(self, form: Format, block_size: int) -> None:
        self._map = form == "map"
        self._block_size = block_size
        self._encode = msgspec.msgpack.Encoder().encode

    def batch(self, at: float, events: Sequence[Stored | Removed]) -> bytes:
        """Return the payload of a batch; `at` is the wall clock's time."""
        return self._encode((at, [self._event(each) for each in events], _RANK))

    def _event(self, event: Stored | Removed) -> object:
        if isinstance(event, Removed):
            removed = event.hashes, event.medium.name
            return _Removed(*removed) if self._map else ("BlockRemoved", *removed)
        chunk, first = event.chunk, event.first
        tokens = chunk.tokens[first * self._block_size * TOKEN_BYTES :] if first else chunk.tokens
        keys = _with_salt(chunk.extra_keys[first:], event.salt, len(chunk.hashes) - first)
        stored = _Stored(
            chunk.hashes[first:],
            event.parent,
            _array_of(tokens),
            self._block_size,
            None,
            event.medium.name,
            chunk.lora_name or None,
            keys or None,
            event.salt.removeprefix(SALT_TAG) or None,
        )
        if self._map:
            return stored
        # Readers of arrays are of older releases: what came later follows only if there is any.
        fields: list[object] = [*msgspec.structs.astuple(stored)[:-1]]
        while fields[-1] is None:
            fields.pop()
        return ("BlockStored", *fields)


def _array_of(tokens: bytes) -> msgspec.Raw:
    """Return packed u32 as an array in msgpack: each a byte for its type, then big-endian. A third of the time of
    making integers of them."""
    packed = bytearray(_zeros(len(tokens) // TOKEN_BYTES))
    packed[6::5] = tokens[3::4]
    packed[7::5] = tokens[2::4]
    packed[8::5] = tokens[1::4]
    packed[9::5] = tokens[0::4]
    return msgspec.Raw(packed)


@lru_cache(16)
def _zeros(count: int) -> bytes:
    """Return as many zeros as an array in msgpack, each in five bytes."""
    return b"\xdd" + count.to_bytes(4, "big") + b"\xce\0\0\0\0" * count


def _with_salt(keys: Sequence[ExtraKeys | None], salt: str, blocks: int) -> Sequence[ExtraKeys | None]:
    """Return the extra keys with the salt in the first block, where Dynamo reads it in every event."""
    if not salt:
        return keys
    keys = keys or [None] * blocks
    return [(*(keys[0] or ()), SALT_TAG + salt.removeprefix(SALT_TAG)), *keys[1:]]


# Messages that are remembered, at most, and their bytes.
MOST_MESSAGES = 1 << 12
MOST_BYTES = 64 << 20
# The largest message, about: so far more messages than topics are remembered.
MESSAGE_BYTES = 256 << 10
# Hashes of removed blocks that are remembered for readers that missed their removal.
MOST_GONE = 1 << 20
_HASHES_AT_ONCE = 1 << 14
_EVENT_BYTES = 256
_HASH_BYTES = 9
# Events after which other threads get their turn.
_AT_ONCE = 128


class Numbered(NamedTuple):
    topic: bytes
    number: int
    payload: bytes


class History:
    """See the module. `next` is the number of the next message; `engines` are the names under which routers know this
    node: each message is there once for each, with a number of its own. `pause` gives way to other threads."""

    def __init__(
        self, encoder: Encoder, engines: Sequence[str], first: int, pause: Callable[[], None] = lambda: None
    ) -> None:
        self.next = first
        self._pause = pause
        self._encoder = encoder
        self._engines = tuple(engines)
        self._sent: deque[Numbered] = deque()
        self._sent_bytes = 0
        self._gone: deque[tuple[int, Removed]] = deque()
        self._gone_hashes = 0

    def publish(self, at: float, news: Sequence[News]) -> Iterator[Numbered]:
        """Yield the messages of news, all of which must be taken; an empty one for none."""
        if not news:
            yield self._add(self._topic(self._engines[0], ""), self._encoder.batch(at, ()))
        for model, events in _packs(news, MESSAGE_BYTES):
            payload = self._encoder.batch(at, events)
            for engine in self._engines:
                yield self._add(self._topic(engine, model), payload)
        # Of the last message, since a reader may lack that one alone.
        for each in news:
            if isinstance(each, Removed):
                self.gone(each, self.next - 1)

    def gone(self, removed: Removed, number: int) -> None:
        self._gone.extend((number, part) for part in _split(removed))
        self._gone_hashes += len(removed.hashes)
        while self._gone_hashes > MOST_GONE:
            self._gone_hashes -= len(self._gone.popleft()[1].hashes)

    def removals(self) -> Iterator[tuple[int, Removed]]:
        """Yield what is remembered of removals, with their numbers."""
        return iter(self._gone)

    def replay(self, asked: int, at: float, index: BlockIndex) -> Iterator[Numbered]:
        """Return a message for each number from `asked` to the live one of now. They are made as they are taken."""
        if self._sent and self._sent[0].number <= asked:
            return iter([each for each in self._sent if each.number >= asked])
        room = self.next - asked
        if room <= 0:
            return iter(())
        state = chain[News](self._removals(asked, index), index.snapshot())
        events = list(self._with_pauses(state))
        size: float = MESSAGE_BYTES
        packs = list(_packs(self._with_pauses(events), size))
        while len(packs) * len(self._engines) > room and size < math.inf:
            size = size * 2 if size < sum(map(_weight, events)) else math.inf
            packs = list(_packs(self._with_pauses(events), size))
        return self._state(range(asked, self.next), at, packs)

    def _state(self, numbers: range, at: float, packs: Sequence[tuple[str, list[News]]]) -> Iterator[Numbered]:
        free = iter(numbers)
        for model, part in packs:
            payload = self._encoder.batch(at, part)
            # First the numbers, which may end before the engines do: `zip` drops none.
            for engine, number in zip(self._engines, free, strict=False):
                yield Numbered(self._topic(engine, model), number, payload)
        empty, topic = self._encoder.batch(at, ()), self._topic(self._engines[0], "")
        for number in free:
            yield Numbered(topic, number, empty)

    def _removals(self, asked: int, index: BlockIndex) -> Iterator[Removed]:
        """Yield the removals before the state; a reader that asks from 0 has heard nothing."""
        if not asked:
            return
        for number, removed in self._gone:
            if number >= asked:
                now = index.counts.get((removed.model, removed.medium), {})
                yield removed._replace(hashes=[each for each in removed.hashes if each not in now])
                self._pause()
        for (model, medium), now in index.counts.items():
            yield Removed(model, medium, list(now))

    def _with_pauses(self, events: Iterable[News]) -> Iterator[News]:
        for number, each in enumerate(events):
            if not number % _AT_ONCE:
                self._pause()
            yield each

    def _add(self, topic: bytes, payload: bytes) -> Numbered:
        message = Numbered(topic, self.next, payload)
        self.next += 1
        self._sent.append(message)
        self._sent_bytes += len(payload)
        while len(self._sent) > MOST_MESSAGES or self._sent_bytes > MOST_BYTES:
            self._sent_bytes -= len(self._sent.popleft().payload)
        return message

    @staticmethod
    def _topic(engine: str, model: str) -> bytes:
        return f"kv@{engine}@{model}".encode("utf-8", "replace") if engine else b""


def _packs(news: Iterable[News], most_bytes: float) -> Iterator[tuple[str, list[News]]]:
    """Yield the news by model, in order, in packs of about so many bytes."""
    packs: dict[str, tuple[list[News], int]] = {}
    for each in news:
        for part in _split(each) if isinstance(each, Removed) else (each,):
            events, nbytes = packs.get(part.model, ([], 0))
            if events and nbytes + _weight(part) > most_bytes:
                yield part.model, events
                events, nbytes = [], 0
            events.append(part)
            packs[part.model] = events, nbytes + _weight(part)
    yield from ((model, events) for model, (events, _) in packs.items())


def _split(removed: Removed) -> Iterator[Removed]:
    for first in range(0, len(removed.hashes), _HASHES_AT_ONCE):
        yield removed._replace(hashes=removed.hashes[first : first + _HASHES_AT_ONCE])


def _weight(each: News) -> int:
    if isinstance(each, Removed):
        return _EVENT_BYTES + _HASH_BYTES * len(each.hashes)
    keys = [key for keys in each.chunk.extra_keys for key in keys or ()]
    named = sum(_HASH_BYTES + len(key if isinstance(key, str) else key[0]) for key in keys)
    return _EVENT_BYTES + _HASH_BYTES * len(each.chunk.hashes) + len(each.chunk.tokens) + named


END = Numbered(b"", (1 << 64) - 1, b"")

# Answers under way, and questions that wait for one of these places.
MOST_ANSWERS = 32
MOST_WAITING = 1024
# Without a message taken, after which an answer is given up.
STALLED_S = 10.0
# Of messages in one turn; a message counts for some more than its own.
_TURN_BYTES = 1 << 18
ANSWER_BYTES = 1 << 10
# Of a core.
_SHARE = 0.25
_SOON_S, _LATER_S = 0.001, 0.02


class _Answer:
    """`message` is sent next, then those that are left; `moved_at` is when the last one was taken."""

    def __init__(self, messages: Iterator[Numbered], now: float) -> None:
        self.left = messages
        self.message = next(messages, END)
        self.moved_at = now

    def end(self) -> None:
        self.left, self.message = iter(()), END


class Answers:
    """See the module. `send` sends a message to a client: False if there is no room for it yet, None if the client has
    left. `messages` returns those from a number on, and changes no more with the state. `spent` is the clock of the
    processor time of this thread."""

    def __init__(
        self,
        send: Callable[[bytes, Numbered], bool | None],
        messages: Callable[[int], Iterable[Numbered]],
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self.given_up = 0
        self._spent = spent
        self._share = _SHARE
        self._rest_until = -math.inf
        self._send = send
        self._messages = messages
        self._waiting: dict[bytes, int] = {}
        self._open: dict[bytes, _Answer] = {}

    def ask(self, client: bytes, number: int) -> None:
        """A client lacks the messages from a number on. Of its questions the last one is answered."""
        if len(self._waiting) >= MOST_WAITING and client not in self._waiting:
            self.given_up += 1
            return
        self._waiting[client] = number

    def end(self) -> bool:
        """Send nothing any more but the ends, and those at once, also for replay requests from now on. True if any are
        due."""
        self._share, self._rest_until = math.inf, -math.inf
        self._messages = lambda _number: ()
        for client in self._waiting:
            self._open.setdefault(client, _Answer(iter(()), 0.0))
        self._waiting.clear()
        for answer in self._open.values():
            answer.end()
        return bool(self._open)

    def turn(self, now: float) -> float:
        """Begin an answer and send what readers take, for a few milliseconds at most; return the seconds until the next
        turn, infinity if all is sent. Does nothing before that turn."""
        if not self._open and not self._waiting:
            return math.inf
        if now < self._rest_until:
            return self._rest_until - now
        began = self._spent()
        self._begin(now)
        nbytes = _TURN_BYTES
        for client in list(self._open):
            if nbytes > 0:
                nbytes -= self._go_on(client, now, nbytes)
        pause = _SOON_S if self._waiting or nbytes < _TURN_BYTES else _LATER_S
        lasts = (self._spent() - began) / self._share
        self._rest_until = now + lasts
        return max(pause, lasts) if self._open or self._waiting else math.inf

    def _begin(self, now: float) -> None:
        for client in self._waiting:
            if client in self._open or len(self._open) < MOST_ANSWERS:
                self._open[client] = _Answer(iter(self._messages(self._waiting.pop(client))), now)
                return

    def _go_on(self, client: bytes, now: float, most: int) -> int:
        """Send about so many bytes of an answer, and return how many; after that it is the turn of all others."""
        answer, nbytes = self._open.pop(client), 0
        while nbytes < most:
            sent = self._send(client, answer.message)
            if sent is None or (sent and answer.message is END):
                return nbytes + ANSWER_BYTES
            if not sent:
                if answer.message is not END and now - answer.moved_at > STALLED_S:
                    self.given_up += 1
                    answer.end()
                break
            answer.moved_at = now
            nbytes += ANSWER_BYTES + len(answer.message.payload)
            answer.message = next(answer.left, END)
        self._open[client] = answer
        return nbytes
