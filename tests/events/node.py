"""A server with `[events]`, engines that store and load through it, and a reader of what it tells."""

from __future__ import annotations

import array
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import zmq

from kvf_hashers.sha256 import Sha256
from kvframework.api.keys import ChunkContent
from kvframework.api.requests import CacheKey
from kvframework.messaging.curve import LoadedKeys
from kvframework.wire import messages as m
from tests.events.reader import Reader
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

CHUNK, BLOCK = 32, 8
HIDDEN = 64
OBJECT = 2 * 2 * CHUNK * HIDDEN * 4
_WAIT_S = 30


def settings(folder: str | Path, **keys: object) -> tuple[str, ...]:
    made = {
        "endpoint": f"ipc://{folder}/told.sock",
        "replay": f"ipc://{folder}/again.sock",
        "block_size": BLOCK,
        "state": str(folder),
        **keys,
    }
    return (f"server.chunk_size={CHUNK}", *[f"events.{key}={value}" for key, value in made.items()])


def packed(tokens: Sequence[int]) -> bytes:
    return array.array("I", tokens).tobytes()


class Engine:
    """An engine that stores and loads whole prompts, with their content unless `tells` is False."""

    def __init__(self, client: WireClient, instance: int = 1, *, tells: bool = True) -> None:
        self.client = client
        self.instance = instance
        self.registered = client.register(instance, hidden_dim_size=HIDDEN)
        self._tells = tells
        self._hasher = Sha256()

    def key(
        self, tokens: Sequence[int], start: int = 0, salt: str = "", extras: Mapping[int, bytes] | None = None
    ) -> CacheKey:
        digests = self._hasher.chunk_digests(packed(tokens), CHUNK, extras=extras)
        named = key_for(self.registered, tokens, start=start, cache_salt=salt)
        return msgspec.structs.replace(named, tokens=b"", digests=digests)

    def content(self, tokens: Sequence[int], start: int = 0) -> ChunkContent | None:
        return ChunkContent(packed(tokens[start:])) if self._tells else None

    def store(self, tokens: Sequence[int], start: int = 0, salt: str = "", content: ChunkContent | None = None) -> None:
        content = content or self.content(tokens, start)
        extras = {each.chunk: each.content for each in content.extras} if content else None
        plan = self.client.prepare_store(self.key(tokens, start, salt, extras), self.instance)
        if plan.lease:
            self.client.write(plan, b"kv")
            self.client.call("COMMIT_STORE", m.Commit(plan.lease, content))

    def load(self, tokens: Sequence[int], salt: str = "") -> bool:
        plan = self.client.prepare_retrieve(self.key(tokens, 0, salt), self.instance)
        if plan.hit:
            self.client.call("COMMIT_RETRIEVE", m.Commit(plan.lease, self.content(tokens)))
        return bool(plan.hit)

    def hit(self, tokens: Sequence[int]) -> int:
        reply = self.client.lookup(self.key(tokens))
        if reply.ticket:
            self.client.call("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket))
        return int(reply.hit_tokens)


class Router(Reader):
    """Reads as llm-d's subscriber does: it asks for what it lacks when a number is missing, and demands each number
    once."""

    def __init__(self, endpoint: str, replay: str = "", keys: LoadedKeys | None = None) -> None:
        super().__init__()
        self._context = zmq.Context()
        self._endpoint = endpoint
        self._keys = keys
        self._replay = replay
        self.next: int | None = None
        self.topics: set[bytes] = set()
        self.replays = 0
        self.lost: set[int] = set()
        self.join()

    def join(self) -> None:
        self.news = self._socket(zmq.SUB, self._endpoint)
        self.news.subscribe(b"kv@")

    def leave(self) -> None:
        self.news.close()

    def close(self) -> None:
        self.leave()
        self._context.term()

    def read(self, timeout_s: float = 0.0) -> bool:
        if not self.news.poll(timeout_s * 1000):
            return False
        topic, number, payload = self.news.recv_multipart()
        self.take(topic, int.from_bytes(number, "big"), payload)
        return True

    def take(self, topic: bytes, number: int, payload: bytes) -> None:
        if number in self.lost:
            return
        if self.next is None or number > self.next:
            self.ask(self.next or 0)
        if number < self.next:
            return
        assert number == self.next, "the answer has not reached the live number"
        self._apply(topic, number, payload, replayed=False)

    def ask(self, number: int) -> None:
        """Ask for all messages from a number on, and apply them: each number once."""
        self.replays += 1
        expected = number
        with closing(self.question(number)) as socket:
            while True:
                assert socket.poll(_WAIT_S * 1000), "no answer"
                empty, topic, at, payload = socket.recv_multipart()
                assert not empty
                if not payload:
                    assert at == b"\xff" * 8
                    return
                assert int.from_bytes(at, "big") == expected
                self._apply(topic, expected, payload, replayed=True)
                expected += 1

    def question(self, number: int = 0, *, most: int = 1000) -> zmq.Socket[bytes]:
        """A socket on which all messages from a number on were asked for; `most` of them wait at this side."""
        socket = self._socket(zmq.DEALER, self._replay, most)
        socket.send_multipart([b"", number.to_bytes(8, "big")])
        return socket

    def _socket(self, kind: int, endpoint: str, most: int = 1000) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.rcvhwm = most
        socket.linger = 0
        if self._keys is not None:
            self._keys.apply(socket)
        socket.connect(endpoint)
        return socket

    def _apply(self, topic: bytes, number: int, payload: bytes, *, replayed: bool) -> None:
        self.topics.add(topic)
        self.batch(payload, replayed=replayed)
        self.next = number + 1

    def until(self, announced: Callable[[], set[tuple[int, ...]]] | set[tuple[int, ...]], medium: str = "CPU") -> None:
        """Read until the announced beginnings of prompts are `announced`, in a medium."""

        def there() -> bool:
            while self.read():
                pass
            return self.prompts(medium) == (announced() if callable(announced) else announced)

        wait_until(there, _WAIT_S, "what is announced")


@contextmanager
def router(server: ServerProcess) -> Iterator[Router]:
    folder = server.endpoint.removeprefix("ipc://").rpartition("/")[0]
    with closing(Router(f"ipc://{folder}/told.sock", f"ipc://{folder}/again.sock")) as made:
        yield made


def prompt(number: int, chunks: int) -> list[int]:
    """The tokens of a prompt; prompts of one ten share their beginning: a chunk and a half."""
    shared = [number // 10 + 7] * (CHUNK + CHUNK // 2)
    return list(itertools.islice(itertools.chain(shared, itertools.cycle((number, number + 1, 3))), chunks * CHUNK))


def beginnings(tokens: Sequence[int], end: int | None = None, *, block: int = BLOCK) -> set[tuple[int, ...]]:
    """The blocks of the first `end` tokens of a prompt, each as the beginning of the prompt that it ends."""
    last = len(tokens) if end is None else end
    return {tuple(tokens[:at]) for at in range(block, last + 1, block)}


def found(engine: Engine, prompts: Iterable[Sequence[int]]) -> set[tuple[int, ...]]:
    return {each for tokens in prompts for each in beginnings(tokens, engine.hit(tokens))}
