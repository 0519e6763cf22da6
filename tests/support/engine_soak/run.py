"""A soak of two engines behind one server: conversations, an engine and the server killed and started again. Between
them all are at rest, and the server must hold nothing but its objects."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.engine_soak.conversations import Conversations, Right, Seen, Talk, expected
from tests.support.engine_soak.engine import ANSWER_S, START_S, Engine, Kind
from tests.support.processes import own_bytes, threads
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

ENGINES = 2
REST_S = 120.0


class NotRepeatableError(Exception):
    """The engine alone answers the same prompts differently the second time: no token can be judged by it."""


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
            own_bytes(pid) >> 20, status["messaging"]["descriptors"]["in_use"], threads(pid), len(status["instances"])
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
    """By connected client that asks: of each engine one."""
    engines = status["use"]["engines"].items()
    return {name: use["hit_tokens"] for name, use in engines if name != "other" and use["lookups"]}


def check_server(rests: Sequence[tuple[Holdings, dict[str, Any]]]) -> None:
    """Four times at rest: before and after the kill of an engine, and in the next server, early and late."""
    for before, after in ((rests[0], rests[1]), (rests[2], rests[3])):
        holdings, status = after
        assert holdings.instances == before[0].instances, rests
        assert holdings.descriptors <= before[0].descriptors + 2, (before[0], holdings)
        assert holdings.threads <= before[0].threads, (before[0], holdings)
        assert holdings.own_mib <= before[0].own_mib + 16, (before[0], holdings)
        # No engine but those that were there when the server was killed has lost a call.
        assert status["losses"] == before[1]["losses"] | {"recent": status["losses"]["recent"]}, status["losses"]
        for name in ("loop_errors", "tick_errors", "malformed", "unanswerable", "unroutable"):
            assert not status["messaging"]["counters"][name], (name, status["messaging"]["counters"])
    assert not any(rests[0][1]["losses"][name] for name in ("lookups", "loads", "stores")), rests[0][1]["losses"]


def repeatable(kind: Kind, talk: Talk, directory: Path) -> Right:
    """What the engine alone answers. Raises `NotRepeatableError`."""
    with Engine(kind, directory / "reference.log") as plain:
        right, again = expected(talk, plain), expected(talk, plain)
    others = sum(again[turn] != answer for turn, answer in right.items())
    if others:
        raise NotRepeatableError(f"the engine alone has other tokens the second time: {others} of {len(right)} turns")
    return right


def soak(kind: Kind, talk: Talk, server: ServerProcess, directory: Path, seconds: float) -> dict[str, Any]:
    """Run it. `server` is one that does not run yet. Fails on a wrong token, an error of the server's, or when the
    server keeps anything of requests that are over or of engines that are killed. Returns what was seen, for those who
    read it and for what a kind asserts besides. Raises `NotRepeatableError`.
    """
    seen = Seen()
    rests: list[tuple[Holdings, dict[str, Any]]] = []
    seconds_to_rest: list[float] = []
    resident: list[list[dict[str, int]]] = []
    with server, contextlib.ExitStack() as stack:
        right = repeatable(kind, talk, directory)
        engines = [
            stack.enter_context(Engine(kind, directory / f"engine-{number}.log", server.endpoint))
            for number in range(ENGINES)
        ]

        def all_registered() -> None:
            # Some register with their first request.
            for engine in engines:
                engine.complete(talk.turn(0, 0), 1)
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

        def all_hit(conversations: Conversations) -> None:
            """Go on until every engine has found something more in the server."""
            earlier = hit_tokens(server.status())

            def more() -> bool:
                now = hit_tokens(server.status())
                return len(now) == ENGINES and all(tokens > earlier.get(name, 0) for name, tokens in now.items())

            conversations.until(more, "hits of every engine")

        all_registered()
        # The first round fills what is allocated once.
        with conversing() as conversations:
            conversations.until(lambda: seen.rounds >= talk.conversations, "a round of all conversations")
        rest()
        with conversing() as conversations:
            conversations.last(seconds / 6)
            wait_until(lambda: engines[0].asked, ANSWER_S, "a request")
            engines[0].kill9()
            conversations.last(seconds / 12)
            engines[0].start()
            all_registered()
            conversations.last(seconds / 12)
            all_hit(conversations)
        rest()
        no_faults(server_killed=False)
        with conversing() as conversations:
            conversations.last(seconds / 6)
            server.kill9()
            conversations.last(seconds / 12)
            server.start()
            all_registered()
            conversations.last(seconds / 12)
            all_hit(conversations)
        rest()
        with conversing() as conversations:
            conversations.last(seconds / 3)
            all_hit(conversations)
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
