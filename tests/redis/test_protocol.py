"""The Redis tier's own RESP code: pure parts, and a peer that lies, stammers, falls silent or hangs up."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvf_redis import resp
from kvf_redis.commands import Command, Count
from kvf_redis.node import MAX_BYTES, MAX_COMMANDS, fly
from kvframework.api.plugin import Buffer
from kvframework.api.tier import Outcome, Tier
from kvframework.errors import TierError
from tests.support.received import outcomes_of
from tests.support.redis_tier import open_redis_tier, soon
from tests.support.resp_peer import RespPeer
from tests.support.waiting import wait_until

VALUE = b"v" * 40


@contextlib.contextmanager
def served(*script: bytes, **options: Any) -> Iterator[tuple[RespPeer, Tier]]:
    with RespPeer(*script, **options) as peer, contextlib.closing(open_redis_tier(peer.url)) as tier:
        yield peer, tier


def misses_by_connection(number: int, peer: RespPeer, tier: Tier) -> None:
    """The next answer, a MISSING, is read as that, over so many connections in all."""
    peer.script = b"$-1\r\n"
    assert get(tier, 1, soon())[0] == [Outcome.MISSING]
    assert peer.connections == number


def get(tier: Tier, count: int, deadline: float) -> tuple[list[Outcome], list[bytearray]]:
    buffers = [bytearray(len(VALUE)) for _ in range(count)]
    keys = [b"key %d" % index for index in range(count)]
    answers = tier.get_into(keys, [[memoryview(buffer)] for buffer in buffers], deadline=deadline)
    return outcomes_of(answers), buffers


# Pure


class Stutter:
    """A socket that takes and gives as many bytes as it likes."""

    def __init__(self, incoming: bytes = b"", steps: Iterable[int] = (1,)) -> None:
        self.incoming, self.outgoing = memoryview(incoming), bytearray()
        self._steps = list(steps)

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0

    def recv_into(self, view: memoryview) -> int:
        count = min(self._step(), len(view), len(self.incoming))
        view[:count] = self.incoming[:count]
        self.incoming = self.incoming[count:]
        return count

    def sendmsg(self, views: list[memoryview]) -> int:
        data = b"".join(views)[: self._step()]
        self.outgoing += data
        return len(data)

    def sendall(self, view: memoryview) -> None:
        self.outgoing += view

    def _step(self) -> int:
        self._steps.append(step := self._steps.pop(0))
        return step


def wire_over(sock: Stutter, *, vectored: bool = True) -> resp.Wire:
    return resp.Wire(sock, lambda: None, vectored=vectored)  # type: ignore[arg-type]


steps = st.lists(st.integers(1, 40_000), min_size=1, max_size=8)
texts = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60)
replies = st.one_of(
    st.builds(lambda text: ("+", text), texts),
    st.builds(lambda text: ("-", text), texts),
    st.builds(lambda number: (":", number), st.integers(-(10**17), 10**17)),
    st.builds(lambda size, seed: ("$", bytes([seed]) * size), st.integers(0, 40_000), st.integers(0, 255)),
    st.just(("$", None)),
)


@given(st.lists(replies, max_size=12), steps, st.booleans())
@settings(max_examples=60)
def test_replies_are_read_however_they_are_cut(sent: list[tuple[str, object]], cuts: list[int], drop: bool) -> None:
    encoded = bytearray()
    for kind, content in sent:
        if isinstance(content, bytes):
            encoded += b"$%d\r\n%b\r\n" % (len(content), content)
        else:
            encoded += f"{kind}{-1 if content is None else content}\r\n".encode()
    wire = wire_over(Stutter(bytes(encoded), cuts))
    for kind, content in sent:
        reply = wire.reply(soon())
        assert reply.kind == kind
        if isinstance(content, bytes):
            assert reply.number == len(content)
            if drop:
                wire.drain(reply.number, soon())
                continue
            value = bytearray(reply.number)
            middle = len(value) // 3
            room = [memoryview(value)[:middle], memoryview(value)[middle:], memoryview(bytearray(5))]
            wire.value_into(room, reply.number, soon())
            assert value == content
            assert bytes(room[2]) == bytes(5)
        elif kind in "+-":
            assert reply.text == content
        else:
            assert reply.number == (-1 if content is None else content)


@given(st.lists(st.binary(max_size=3000), max_size=1100), steps, st.booleans())
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example])
def test_all_buffers_are_sent_in_order_however_much_is_taken(pieces: list[bytes], cuts: list[int], tls: bool) -> None:
    sock = Stutter(steps=cuts)
    wire_over(sock, vectored=not tls).send(pieces, soon())
    assert sock.outgoing == b"".join(pieces)


@given(st.binary(max_size=80))
def test_a_line_is_a_reply_or_a_surprise(line: bytes) -> None:
    try:
        reply = resp.parse_line(line)
    except resp.ProtocolSurprise:
        return
    assert line[:1].decode() == reply.kind


@pytest.mark.parametrize(
    "line", [b"", b":", b":1_0", b": 1", b":+1", b":1" + b"0" * 30, b"$-2", b"$", b"*-2", b"*", b"_", b"$\xb2"]
)
def test_lines_that_only_look_right_are_surprises(line: bytes) -> None:
    with pytest.raises(resp.ProtocolSurprise):
        resp.parse_line(line)


def test_commands_have_the_bytes_that_redis_reads() -> None:
    assert resp.command(b"GET", b"a\r\nb") == b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n"
    assert b"abc".join(resp.set_command(b"k", 3, 0)) == resp.command(b"SET", b"k", b"abc")
    assert b"abc".join(resp.set_command(b"k", 3, 60)) == resp.command(b"SET", b"k", b"abc", b"EX", b"60")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MOVED 3999 127.0.0.1:6381", resp.Redirect(False, 3999, resp.Place("127.0.0.1", 6381))),
        ("ASK 0 redis-3.internal:7000", resp.Redirect(True, 0, resp.Place("redis-3.internal", 7000))),
        ("MOVED 16383 ::1:6381", resp.Redirect(False, 16383, resp.Place("::1", 6381))),
        ("MOVED 1 :6381", resp.Redirect(False, 1, resp.Place("", 6381))),
        ("MOVED 1 ?:6381", resp.Redirect(False, 1, resp.Place("", 6381))),
        ("MOVED 16384 host:1", None),
        ("MOVED 1 host:65536", None),
        ("MOVED 1 host", None),
        ("MOVED", None),
        ("CLUSTERDOWN The cluster is down", None),
        ("TRYAGAIN Multiple keys request during rehashing of slot", None),
    ],
)
def test_redirections_are_read(text: str, expected: resp.Redirect | None) -> None:
    assert resp.parse_redirect(text) == expected


@given(texts)
def test_any_error_is_a_redirection_or_none(text: str) -> None:
    found = resp.parse_redirect(text)
    assert found is None or text.startswith(("MOVED ", "ASK "))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:1", resp.Place("host", 1)),
        ("[::1]:6379", resp.Place("::1", 6379)),
        ("127.0.0.1:65535", resp.Place("127.0.0.1", 65535)),
        ("host", None),
        ("host:0", None),
        ("host:65536", None),
        ("::1:6379", None),
        ("user:word@host:6379", None),
        ("redis://host:6379", None),
        ("host:6379/0", None),
        ("", None),
    ],
)
def test_addresses_are_read_and_written(text: str, expected: resp.Place | None) -> None:
    assert resp.Place.parse(text) == expected
    assert expected is None or str(expected) == text


def test_errors_about_one_key_are_told_from_the_others() -> None:
    assert resp.holds(resp.Reply(":", 1), ":")
    assert not resp.holds(resp.Reply("-", text="WRONGTYPE Operation against a key"), "$")
    assert not resp.holds(resp.Reply("-", text="OOM command not allowed"), "+")
    with pytest.raises(resp.Refused):
        resp.holds(resp.Reply("-", text="LOADING Redis is loading"), "$")
    with pytest.raises(resp.ProtocolSurprise):
        resp.holds(resp.Reply("+", text="OK"), "$")


class Counting:
    """Stands for a wire: counts what is under way."""

    def __init__(self) -> None:
        self.sends = 0
        self.under_way: list[Weight] = []

    def send(self, buffers: list[Buffer], deadline: float) -> None:
        self.sends += 1


class Weight(Command):
    """Weighs `cost`, and notes when it is sent and answered."""

    def __init__(self, wire: Counting, cost: int) -> None:
        super().__init__(b"key", cost)
        self.wire = wire

    def buffers(self) -> list[Buffer]:
        self.wire.under_way.append(self)
        assert len(self.wire.under_way) <= MAX_COMMANDS
        assert len(self.wire.under_way) == 1 or sum(each.cost for each in self.wire.under_way) <= MAX_BYTES
        return [b"x"]

    def receive(self, wire: resp.Wire, deadline: float) -> None:
        assert self.wire.under_way.pop(0) is self
        self.answered = True

    def _buffers(self) -> list[Buffer]:
        raise NotImplementedError

    def _take(self, reply: resp.Reply, wire: resp.Wire, deadline: float) -> None:
        raise NotImplementedError


@given(st.lists(st.integers(0, MAX_BYTES * 2), max_size=600))
@settings(max_examples=60)
def test_a_flight_is_bounded_and_in_order(costs: list[int]) -> None:
    wire = Counting()
    weights = [Weight(wire, cost) for cost in costs]
    fly(wire, weights, 0.0)  # type: ignore[arg-type]
    assert all(weight.answered for weight in weights)
    assert not wire.under_way


def test_small_commands_travel_together() -> None:
    wire = Counting()
    fly(wire, [Weight(wire, 100) for _ in range(1000)], 0.0)  # type: ignore[arg-type]
    assert wire.sends <= 1000 / (MAX_COMMANDS / 2) + 1


def test_a_key_that_is_asked_for_elsewhere_travels_with_its_permission() -> None:
    sock = Stutter(b"+OK\r\n:1\r\n")
    count = Count(b"key", b"EXISTS", Outcome.FOUND)
    count.asking = True
    fly(wire_over(sock), [count], soon())
    assert sock.outgoing == b"*1\r\n$6\r\nASKING\r\n*2\r\n$6\r\nEXISTS\r\n$3\r\nkey\r\n"
    assert count.outcome is Outcome.FOUND


# A peer that is no good Redis

fragments = st.one_of(
    st.sampled_from(
        [b"+OK\r\n", b":1\r\n", b":0\r\n", b"$-1\r\n", b"$40\r\n", b"*3\r\n", b"-ERR no\r\n", b"\r\n", b"$9999"]
    ),
    st.just(b"$%d\r\n%b\r\n" % (len(VALUE), VALUE)),
    st.binary(max_size=60),
    st.deferred(lambda: pages),
)
pages = st.sampled_from([b"*2\r\n$1\r\n0\r\n*0\r\n", b"*2\r\n$1\r\n7\r\n", b"*1\r\n$76\r\nkvf:" + b"k" * 72 + b"\r\n"])
calls = st.sampled_from(["contains", "get_into", "put", "delete", "ping", "scan"])


@given(st.lists(st.tuples(calls, st.lists(fragments, max_size=6)), min_size=1, max_size=4))
@settings(max_examples=25)
def test_garbage_is_an_error_or_an_outcome_and_never_more(plan: list[tuple[str, list[bytes]]]) -> None:
    with served() as (peer, tier):
        for call, script in plan:
            peer.script = b"".join(script)
            try:
                if call == "get_into":
                    outcomes, buffers = get(tier, 3, soon(3))
                    assert all(
                        outcome is not Outcome.FOUND or bytes(buffer) in peer.script
                        for outcome, buffer in zip(outcomes, buffers, strict=True)
                    )
                elif call == "put":
                    outcomes = tier.put([b"a", b"b"], [[memoryview(VALUE)]] * 2, deadline=soon(3))
                    assert outcomes.count(Outcome.STORED) <= peer.script.count(b"+OK\r\n")
                elif call == "ping":
                    tier.ping(deadline=soon(3))
                elif call == "scan":
                    assert all(len(entry.key) == 72 for entry in tier.scan(deadline=soon(3)))
                else:
                    getattr(tier, call)([b"a", b"b"], deadline=soon(3))
            except TierError:
                pass
        peer.script = b":1\r\n"
        # The peer may close the connection of an earlier call only now, which is one more error.
        answers: list[list[Outcome]] = []
        wait_until(lambda: answered(tier, answers), what="an answer on a new connection")
        assert answers == [[Outcome.FOUND]]


def answered(tier: Tier, answers: list[list[Outcome]]) -> bool:
    with contextlib.suppress(TierError):
        answers.append(list(tier.contains([b"key"], deadline=soon())))
    return bool(answers)


@pytest.mark.parametrize(
    "page",
    [
        b"*1\r\n$1\r\n0\r\n",
        b"*2\r\n$1\r\nx\r\n*0\r\n",
        b"*2\r\n$99\r\n" + b"0" * 99 + b"\r\n*0\r\n",
        b"*2\r\n$1\r\n0\r\n*-1\r\n",
        b"*2\r\n$1\r\n0\r\n*1048577\r\n",
        b"*2\r\n$1\r\n0\r\n*1\r\n$-1\r\n",
        b"*2\r\n$1\r\n0\r\n*1\r\n$5\r\nkvf:k\r\n",
        b"*2\r\n$1\r\n0\r\n*1\r\n$2147483647\r\n",
    ],
)
def test_a_page_that_is_none_ends_the_listing(page: bytes) -> None:
    with served(page) as (_, tier), pytest.raises(TierError, match="unexpected reply"):
        list(tier.scan(deadline=soon()))


@pytest.mark.parametrize(
    "script", [b"", b"$40", b"$40\r\n" + VALUE[:39], b"$40\r\n" + VALUE, b"$40\r\n" + VALUE + b"\r", b"$-1\r\n$40\r\n"]
)
def test_a_reply_that_stops_short_ends_with_the_deadline(script: bytes) -> None:
    with served(script, hangs_up=False) as (peer, tier):
        started = time.monotonic()
        with pytest.raises(TierError, match="deadline"):
            get(tier, 2, soon(0.2))
        assert time.monotonic() - started < 20.0
        misses_by_connection(2, peer, tier)


@pytest.mark.parametrize("script", [b"$40\r\n" + VALUE + b"XX", b"+OK\r\n", b":1\r\n", b"x" * 20_000, b"*1\r\n"])
def test_a_surprise_drops_the_connection(script: bytes) -> None:
    with served(script, hangs_up=False) as (peer, tier):
        with pytest.raises(TierError, match="unexpected reply"):
            get(tier, 1, soon())
        misses_by_connection(2, peer, tier)


def test_a_connection_left_in_the_middle_of_a_value_is_not_used_again() -> None:
    with served(b"$999999999\r\n", hangs_up=False) as (peer, tier):
        assert get(tier, 2, soon())[0] == [Outcome.DAMAGED, Outcome.DAMAGED]
        misses_by_connection(3, peer, tier)


def test_bytes_behind_the_last_reply_are_never_taken_for_the_next() -> None:
    with served(b"$-1\r\n$40\r\n" + VALUE + b"\r\n", hangs_up=False) as (peer, tier):
        assert get(tier, 1, soon())[0] == [Outcome.MISSING]
        misses_by_connection(2, peer, tier)


@pytest.mark.parametrize(
    "answer",
    [
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-MASTERDOWN Link with MASTER is down\r\n",
        b"-NOAUTH Authentication required.\r\n",
        b"-READONLY You can't write against a read only replica.\r\n",
        b"-ERR unknown command\r\n",
    ],
)
def test_errors_about_the_server_fail_the_call(answer: bytes) -> None:
    with served(answer) as (_, tier):
        code = answer[1:].split()[0].decode()
        for call in (lambda: get(tier, 1, soon()), lambda: tier.put([b"key"], [[memoryview(VALUE)]], deadline=soon())):
            with pytest.raises(TierError, match=code):
                call()


@pytest.mark.parametrize(
    "login", [b"*1\r\n" * 5000, b"$abc\r\n", b":x\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"+OK\r\n:1\r\n"]
)
def test_garbage_at_login_is_a_tier_error(login: bytes) -> None:
    with served(login=login) as (_, tier), pytest.raises(TierError, match=r"cannot connect|unexpected reply"):
        tier.ping(deadline=soon(0.5))


def test_a_login_that_trickles_ends_with_the_deadline() -> None:
    def trickle(listener: socket.socket) -> None:
        with listener.accept()[0] as sock, contextlib.suppress(OSError):
            while True:
                sock.sendall(b"+")
                time.sleep(0.02)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = threading.Thread(target=trickle, args=(listener,))
        peer.start()
        tier = open_redis_tier(f"redis://127.0.0.1:{listener.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(TierError, match="deadline"):
            tier.ping(deadline=soon(0.3))
        assert time.monotonic() - started < 20.0
        tier.close()
        peer.join()
