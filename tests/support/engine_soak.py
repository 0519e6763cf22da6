"""A soak of two engines behind one server: conversations of several turns at the same time, some of their requests
broken off, an engine and the server killed and started again. Every token is compared with that of an engine that
computed it without the cache.

A kind of engine is a `Kind`: its process, an HTTP server, and what it is asked.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tests.support.ports import free_port
from tests.support.processes import own_bytes, threads
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

ENGINES = 2
# A busy machine may take minutes for what takes seconds.
START_S, ANSWER_S, REST_S = 300.0, 300.0, 120.0


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


class Answer(NamedTuple):
    """The tokens, and how many of the prompt's were not computed."""

    tokens: list[int]
    cached: int


class Kind(Protocol):
    """An engine: `endpoint` "" is one without the cache."""

    def command(self, port: int, endpoint: str) -> Sequence[str]: ...

    def environment(self) -> Mapping[str, str]: ...

    def request(self, tokens: list[int], new_tokens: int, *, stream: bool) -> tuple[str, dict[str, Any]]:
        """The path and the body of a request for greedy tokens."""
        ...

    def answer(self, reply: Any) -> Answer: ...

    def faults(self, engine: Engine, *, server_killed: bool) -> list[str]:
        """What the engine, at rest, says of errors in its connector that a killed server does not explain, if one was
        killed."""
        ...


class Engine:
    """The HTTP server of an engine and all its processes. `life` counts its starts; `up` is false while it is killed or
    starts; `asked` is how many answers somebody waits for."""

    def __init__(self, kind: Kind, log: Path, endpoint: str = "") -> None:
        self._kind = kind
        self._endpoint = endpoint
        self.log = log
        self.port = free_port()
        self.life = 0
        self.up = False
        self.asked = 0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Engine:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self.up = False
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
            self.kill9()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Return once it is healthy."""
        command = self._kind.command(self.port, self._endpoint)
        with self.log.open("ab") as stream:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={**os.environ, **self._kind.environment()},
                start_new_session=True,
            )
        wait_until(self._healthy, START_S, "the engine")
        self.life += 1
        self.up = True

    def kill9(self) -> None:
        """Kill all its processes."""
        self.up = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait(60)

    def complete(self, tokens: list[int], new_tokens: int) -> Answer:
        """Raises `OSError` or `HTTPException` if the engine has ended."""
        path, body = self._kind.request(tokens, new_tokens, stream=False)
        with self._lock:
            self.asked += 1
        try:
            return self._kind.answer(json.loads(self._ask("POST", path, body)))
        finally:
            with self._lock:
                self.asked -= 1

    def break_off(self, tokens: list[int], new_tokens: int, after: float) -> None:
        """Ask, and hang up before the answer."""
        path, body = self._kind.request(tokens, new_tokens, stream=True)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            time.sleep(after)
        connection.close()

    def metrics(self) -> dict[str, float]:
        """The sums of what its Prometheus page has, by name."""
        found: dict[str, float] = {}
        for line in self._ask("GET", "/metrics").decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def resident_mib(self) -> dict[str, int]:
        """Of each of the engine's processes, by its name; without what is shared with the server."""
        found: dict[str, int] = {}
        waiting = [self.pid]
        while waiting:
            pid = waiting.pop()
            with contextlib.suppress(OSError):
                waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                found[name] = found.get(name, 0) + (own_bytes(pid) >> 20)
        return found

    def _healthy(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()[-6000:]
        try:
            self._ask("GET", "/health", timeout=5.0)
        except (OSError, http.client.HTTPException):
            return False
        return True

    def _ask(self, method: str, path: str, body: Any = None, timeout: float = ANSWER_S) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            content = reply.read()
            if reply.status != 200:
                raise http.client.HTTPException(f"{reply.status}: {content[:500]!r}")
            return content
        finally:
            connection.close()


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
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._seen.wrong:
            time.sleep(0.1)
        assert not self._seen.wrong, self._seen.wrong[:3]

    def until_rounds(self, rounds: int) -> None:
        """Go on until so many more whole conversations are over."""
        wanted = self._seen.rounds + rounds
        wait_until(lambda: self._seen.rounds >= wanted or bool(self._seen.wrong), 2 * ANSWER_S, "the conversations")

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


class Holdings(NamedTuple):
    """What a server at rest has, besides its objects."""

    own_mib: int
    descriptors: int
    threads: int
    instances: int


def at_rest(server: ServerProcess) -> tuple[Holdings, dict[str, Any]]:
    """Wait until nothing is pinned, leased or in doubt; return what the server has then, and its status."""
    status: dict[str, Any] = {}

    def resting() -> bool:
        status.update(server.status())
        l1 = status["l1"]
        held = l1["pins"], l1["write_leases"], l1["pin_leases"], l1["quarantined_bytes"], status["tickets"]
        return not any(held)

    wait_until(resting, REST_S, "the end of all pins")
    pid = status["server"]["pid"]
    return (
        Holdings(
            own_bytes(pid) >> 20,
            status["messaging"]["descriptors"]["in_use"],
            threads(pid),
            len(status["instances"]),
        ),
        status,
    )


def registered(server: ServerProcess, engines: Sequence[Engine]) -> bool:
    """Whether every engine has a valid registration."""
    found = set()
    for instance in server.status()["instances"]:
        with contextlib.suppress(ProcessLookupError):  # its process is killed, which the server sees soon
            if instance["lost"] is None:
                found.add(os.getpgid(instance["pid"]))
    return found >= {engine.pid for engine in engines}


def hit_tokens(status: dict[str, Any]) -> dict[str, int]:
    """By connected engine."""
    return {name: use["hit_tokens"] for name, use in status["use"]["engines"].items() if name != "other"}


def check_server(rests: Sequence[tuple[Holdings, dict[str, Any]]]) -> None:
    """Four times at rest: before and after the kill of an engine, and in the next server, early and late."""
    for before, after in ((rests[0], rests[1]), (rests[2], rests[3])):
        holdings, status = after
        assert holdings.instances == before[0].instances, rests
        assert holdings.descriptors <= before[0].descriptors + 2, (before[0], holdings)
        assert holdings.threads <= before[0].threads, (before[0], holdings)
        assert holdings.own_mib <= before[0].own_mib + 16, (before[0], holdings)
        earlier, hits = hit_tokens(before[1]), hit_tokens(status)
        assert len(hits) == ENGINES, hits
        assert all(tokens > earlier.get(name, 0) for name, tokens in hits.items()), (earlier, hits)
        # No engine but those that were there when the server was killed has lost a call.
        assert status["losses"] == before[1]["losses"] | {"recent": status["losses"]["recent"]}, status["losses"]
        for name in ("loop_errors", "tick_errors", "malformed", "unanswerable", "unroutable"):
            assert not status["messaging"]["counters"][name], (name, status["messaging"]["counters"])
    assert not any(rests[0][1]["losses"][name] for name in ("lookups", "loads", "stores")), rests[0][1]["losses"]


def soak(kind: Kind, talk: Talk, server: ServerProcess, directory: Path, seconds: float) -> dict[str, Any]:
    """Run it. `server` is one that does not run yet. Fails on a wrong token, an error of the server's, or when the
    server keeps anything of requests that are over or of engines that are killed. Returns what was seen, for those who
    read it and for what a kind asserts besides.
    """
    with Engine(kind, directory / "reference.log") as plain:
        right = expected(talk, plain)
    seen = Seen()
    rests: list[tuple[Holdings, dict[str, Any]]] = []
    seconds_to_rest: list[float] = []
    resident: list[list[dict[str, int]]] = []
    with server, contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(Engine(kind, directory / f"engine-{number}.log", server.endpoint))
            for number in range(ENGINES)
        ]

        def all_registered() -> None:
            wait_until(lambda: registered(server, engines), START_S, "the registrations")

        def conversing() -> Conversations:
            return Conversations(talk, engines, right, seen)

        def rest() -> None:
            assert not seen.wrong, seen.wrong[:3]
            started = time.monotonic()
            rests.append(at_rest(server))
            seconds_to_rest.append(round(time.monotonic() - started, 1))
            resident.append([engine.resident_mib() for engine in engines])

        def no_faults(*, server_killed: bool) -> None:
            faults = [fault for engine in engines for fault in kind.faults(engine, server_killed=server_killed)]
            assert not faults, faults[:5]

        all_registered()
        # The first round fills what is allocated once.
        with conversing() as conversations:
            conversations.until_rounds(talk.conversations)
        rest()
        with conversing() as conversations:
            conversations.last(seconds / 6)
            wait_until(lambda: engines[0].asked, ANSWER_S, "a request")
            engines[0].kill9()
            conversations.last(seconds / 12)
            engines[0].start()
            all_registered()
            conversations.last(seconds / 12)
            conversations.until_rounds(1)
        rest()
        no_faults(server_killed=False)
        with conversing() as conversations:
            conversations.last(seconds / 6)
            server.kill9()
            conversations.last(seconds / 12)
            server.start()
            all_registered()
            conversations.last(seconds / 12)
            conversations.until_rounds(1)
        rest()
        with conversing() as conversations:
            conversations.last(seconds / 3)
            conversations.until_rounds(1)
        rest()
        no_faults(server_killed=True)
        check_server(rests)
    statuses = [status for _, status in rests]
    return {
        "answers": seen.answers,
        "conversations": seen.rounds,
        "broken off": seen.broken_off,
        "lost with their engine": seen.lost,
        "tokens cached": seen.cached,
        "server at rest": [holdings for holdings, _ in rests],
        "seconds to rest": seconds_to_rest,
        "hit tokens by engine": [hit_tokens(status) for status in statuses],
        "losses": [{name: status["losses"][name] for name in ("lookups", "loads", "stores")} for status in statuses],
        "recovered": statuses[-1]["l1"]["recovered"],
        "evictions": [status["l1"]["evictions"] for status in statuses],
        "MiB of the engines' processes": resident,
    }
