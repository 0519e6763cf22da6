"""The peers tier between nodes that are dicts: whom it lends to, whom it asks, and what it does when one is busy, gone,
another one, or a stranger."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_peers import messages as m
from kvf_peers.holder import Room
from kvf_peers.peer import Peer, _receive
from kvf_peers.settings import Address, Settings
from kvf_peers.tier import PeersTier
from kvf_peers.wire import Wire, admit
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.tier import Outcome
from kvframework.errors import ConfigFieldError, TierError
from tests.support.certificates import make_certificate
from tests.support.peer_nodes import Lender, ValuesNode, peers_tier, token_file
from tests.support.ports import free_port
from tests.support.waiting import wait_until

PATIENCE_S = 60.0
FOUND, MISSING, FAILED = Outcome.FOUND, Outcome.MISSING, Outcome.FAILED


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def new_keys(count: int) -> list[bytes]:
    return [os.urandom(PACKED_KEY_BYTES) for _ in range(count)]


def load(tier: PeersTier, key: bytes, nbytes: int, deadline: float | None = None) -> tuple[int | Outcome, bytes]:
    buffer = bytearray(nbytes)
    (outcome,) = tier.get_into([key], [[memoryview(buffer)]], deadline=deadline or soon())
    return outcome, bytes(buffer)


def state(tier: PeersTier, at: int = 0) -> Peer:
    return tier._peers[at]


@pytest.fixture
def token(tmp_path: Path) -> Path:
    return token_file(tmp_path)


@contextmanager
def reading(token: Path, *lenders: Lender, node: ValuesNode | None = None, **options: object) -> Iterator[PeersTier]:
    """A tier that asks them; patient, since test machines are busy."""
    tier = peers_tier(token, **{"peers": [each.address for each in lenders], "ask_s": 10.0, **options})
    if node is not None:
        tier.attach(node)
    try:
        yield tier
    finally:
        tier.close()


def test_it_is_read_only_and_says_so(token: Path) -> None:
    with Lender(token) as lender, reading(token, lender) as tier:
        key = new_keys(1)[0]
        lender.node.set(key, b"v" * 100)
        assert tier.read_only
        assert tier.put([key], [[memoryview(b"other")]], deadline=soon()) == [FAILED]
        assert tier.delete([key], deadline=soon()) == [MISSING]
        assert load(tier, key, 100) == (100, b"v" * 100)


def test_what_a_node_has_no_longer_is_had_from_another(token: Path) -> None:
    with Lender(token) as one, Lender(token) as other, reading(token, one, other) as tier:
        keys = new_keys(20)
        for key in keys:
            one.node.set(key, key)
            other.node.set(key, key)
        assert tier.contains(keys, deadline=soon()) == [FOUND] * 20
        one.node.values.clear()
        buffers = [bytearray(PACKED_KEY_BYTES) for _ in keys]
        got = tier.get_into(keys, [[memoryview(each)] for each in buffers], deadline=soon())
        assert got == [PACKED_KEY_BYTES] * 20
        assert [bytes(each) for each in buffers] == keys
        other.node.values.clear()
        assert load(tier, keys[0], 100)[0] is MISSING


def test_what_one_has_no_longer_keeps_nothing_else_from_being_asked_of_it(token: Path) -> None:
    with Lender(token) as lender, reading(token, lender) as tier:
        left, came = new_keys(2)
        lender.node.set(left, b"left")
        assert tier.contains([left], deadline=soon()) == [FOUND]
        del lender.node.values[left]
        lender.node.set(came, b"came")
        buffers = [bytearray(4), bytearray(4)]
        got = tier.get_into([left, came], [[memoryview(each)] for each in buffers], deadline=soon())
        assert got == [MISSING, 4]


def test_a_run_of_a_prefix_comes_from_one_node(token: Path) -> None:
    with Lender(token) as one, Lender(token) as other, reading(token, one, other) as tier:
        keys = new_keys(10)
        for key in keys[:8]:
            one.node.set(key, key)
        for key in keys:
            other.node.set(key, key)
        found, unsure = tier._find(keys, range(10), soon(), {})
        assert not unsure
        assert len(found) == 10
        assert len({str(found[index].address) for index in range(8)}) == 1


def test_a_name_is_tried_at_all_its_addresses(token: Path) -> None:
    with Lender(token) as lender:
        port = lender.address.rpartition(":")[2]
        tier = peers_tier(token, peers=[f"localhost:{port}"], ask_s=10)
        assert tier.contains(new_keys(1), deadline=soon()) == [MISSING]
        tier.close()


def test_this_node_among_its_peers_is_passed_over(token: Path) -> None:
    with Lender(token) as lender:
        mine = f"127.0.0.1:{free_port()}"
        node = ValuesNode()
        with reading(token, listen=mine, peers=[mine, lender.address], node=node) as tier:
            key, own = new_keys(2)
            node.set(own, b"own")
            lender.node.set(key, b"his")
            wait_until(lambda: state(tier).state == "useless", what="the greeting of this node")
            assert tier.contains([own, key], deadline=soon()) == [MISSING, FOUND]
            assert list(tier.problems()) == []
            assert [each["node"] for each in tier.status()["nodes"]] == [lender.address]  # type: ignore[attr-defined]
            tier.ping(deadline=soon())


def test_nodes_that_name_content_differently_are_a_problem_and_not_asked(token: Path) -> None:
    with ExitStack() as stack:
        ours, hasher, chunk = ValuesNode(), ValuesNode(hasher="sha256/1"), ValuesNode(chunk_size=16)
        lenders = [stack.enter_context(Lender(token, node)) for node in (hasher, chunk)]
        tier = stack.enter_context(reading(token, *lenders, node=ours))
        key = new_keys(1)[0]
        for node in (hasher, chunk):
            node.set(key, b"v")
        wait_until(lambda: [state(tier, at).state for at in (0, 1)] == ["useless"] * 2, what="both greetings")
        assert tier.contains([key], deadline=soon()) == [MISSING]
        facts = "\n".join(tier.problems())
        assert f"{lenders[0].address}: the node has another hasher" in facts
        assert f"{lenders[1].address}: the node has chunk_size 16, this node 256" in facts


def test_a_node_that_answered_before_this_one_knew_itself_is_judged_again(token: Path) -> None:
    with Lender(token, ValuesNode(chunk_size=16)) as lender, reading(token, lender) as tier:
        key = new_keys(1)[0]
        lender.node.set(key, b"v")
        tier.ping(deadline=soon())
        assert state(tier).who is None, "it was not asked yet"
        assert tier.contains([key], deadline=soon()) == [FOUND]
        tier.attach(ValuesNode())
        assert tier.contains([key], deadline=soon()) == [MISSING]
        assert "the node has chunk_size 16, this node 256" in tier.problems()[0]


def test_a_model_with_other_names_is_a_problem(token: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = ValuesNode(), ValuesNode()
    theirs.told = {"llama": [b"x" * 16], "qwen": [b"q" * 16]}
    with Lender(token, theirs) as lender, reading(token, lender, node=ours) as tier:
        wait_until(lambda: state(tier).state == "up", what="the greeting")
        assert list(tier.problems()) == []
        ours.told = {"llama": [b"y" * 16], "qwen": [b"q" * 16]}
        (fact,) = tier.problems()
        tier.problems()
    assert fact.startswith(f"{lender.address}: its engines of 'llama' differ")
    assert caplog.text.count("its engines of 'llama' differ") == 1


def test_a_busy_holder_refuses_at_once(token: Path) -> None:
    """One value alone may be larger than `lent_bytes`; the next one is not lent until it has gone out."""
    with Lender(token, lent_bytes=1000) as lender, reading(token, lender) as tier:
        one, other = new_keys(2)
        lender.node.set(one, b"1" * (64 << 20))
        lender.node.set(other, b"2" * 100)
        with _stuck_reader(lender, one, 64 << 20):
            wait_until(lambda: lender.node.loans == 1, what="a loan under way")
            with pytest.raises(TierError):
                load_or_raise(tier, other)
        wait_until(lambda: lender.node.loans == 0, what="the end of the loan of a reader that is gone")
        assert load(tier, other, 100) == (100, b"2" * 100)


def load_or_raise(tier: PeersTier, key: bytes) -> None:
    outcome, _ = load(tier, key, 100)
    if outcome is FAILED:
        raise TierError("failed")


@contextmanager
def _stuck_reader(lender: Lender, key: bytes, nbytes: int) -> Iterator[Wire]:
    """A reader that has proved itself, asked for a value, and takes none of its bytes."""
    with peers_tier_wire(lender) as wire:
        wire.write(m.Get(key, [nbytes], 600_000), soon())
        yield wire


@contextmanager
def peers_tier_wire(lender: Lender) -> Iterator[Wire]:
    host, port = lender.address.split(":")
    peer = Peer(Address(host, int(port)), lender.tier._settings, lender.tier._judged)
    wire, _ = peer._opened(soon(), None)
    try:
        yield wire
    finally:
        wire.close()


def test_a_pin_ends_with_the_readers_time_though_the_reader_lives(token: Path) -> None:
    with Lender(token) as lender:
        key = new_keys(1)[0]
        lender.node.set(key, b"1" * (64 << 20))
        with peers_tier_wire(lender) as wire:
            wire.write(m.Get(key, [64 << 20], 200), soon())
            wait_until(lambda: lender.node.loans == 1, what="the loan")
            wait_until(lambda: lender.node.loans == 0, what="the end of a loan that nobody takes")


def test_what_is_lent_leaves_l1_room_to_evict(token: Path) -> None:
    """A quarter of a small L1, whatever `lent_bytes` says."""
    node = ValuesNode()
    node.arena_bytes = 64 << 20
    with Lender(token, node) as lender, reading(token, lender) as tier:
        one, other = new_keys(2)
        node.set(one, b"1" * (16 << 20))
        node.set(other, b"2" * 100)
        with _stuck_reader(lender, one, 16 << 20):
            wait_until(lambda: node.loans == 1, what="a loan under way")
            with pytest.raises(TierError):
                load_or_raise(tier, other)
            assert refused_by(lender)["busy"] == 1


def test_a_value_waits_for_the_room_of_another() -> None:
    room, got = Room(100), []
    with room.held(60, soon()) as first:
        waiting = threading.Thread(target=lambda: got.append(_waits(room)))
        waiting.start()
        with room.held(60, time.monotonic()) as refused:
            assert (first, refused) == (True, False)
        with room.held(40, soon()) as beside:
            assert beside
    waiting.join(PATIENCE_S)
    assert got == [True]
    with room.held(1 << 60, soon()) as large:
        assert large
    assert room.taken == 0


def _waits(room: Room) -> bool:
    with room.held(60, soon()) as there:
        return there


def test_a_node_that_answers_in_pieces_holds_up_no_other(token: Path) -> None:
    """The first has sent one byte of its answer, and sends no more, before the other has begun to answer."""
    begun, ended = threading.Event(), threading.Event()

    class Later(ValuesNode):
        def holds(self, keys: Sequence[bytes]) -> Sequence[bool]:
            assert begun.wait(PATIENCE_S)
            return super().holds(keys)

    def piecewise(listener: socket.socket, settings: Settings) -> None:
        wire = Wire(listener.accept()[0])
        admit(wire, settings, ValuesNode(), soon())
        wire.read(m.FromReader, soon())  # type: ignore[arg-type]
        wire.send([memoryview(m.encoded(m.Found(b"\1"))[:1])], soon())
        begun.set()
        ended.wait(PATIENCE_S)
        wire.close()

    with socket.create_server(("127.0.0.1", 0)) as listener, Lender(token, Later()) as other:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        settings = peers_tier(token, peers=[address])._settings
        thread = threading.Thread(target=piecewise, args=(listener, settings))
        thread.start()
        key = new_keys(1)[0]
        other.node.set(key, b"v")
        tier = peers_tier(token, peers=[address, other.address], ask_s=2.0)
        assert tier.contains([key], deadline=soon()) == [FOUND]
        ended.set()
        thread.join(PATIENCE_S)
        tier.close()


def test_a_node_that_takes_questions_and_answers_none_is_passed_over_for_a_while(token: Path) -> None:
    gate = threading.Event()

    class Stuck(ValuesNode):
        def holds(self, keys: Sequence[bytes]) -> Sequence[bool]:
            gate.wait(PATIENCE_S)
            return super().holds(keys)

    key = new_keys(1)[0]
    with Lender(token, Stuck()) as lender, reading(token, lender, ask_s=0.1) as tier:
        lender.node.set(key, b"v")

        def is_passed_over() -> bool:
            assert tier_has(tier, key) is None
            return state(tier).state == "down"

        wait_until(is_passed_over, what="its pause")
        gate.set()
        wait_until(lambda: tier_has(tier, key) is FOUND, what="its answer")
        assert state(tier).counts.questions > 0


def test_a_node_that_sent_a_damaged_value_is_passed_over(token: Path) -> None:
    with Lender(token) as bad, Lender(token) as good, reading(token, bad, good) as tier:
        key = new_keys(1)[0]
        bad.node.set(key, b"bad")
        assert load(tier, key, 4) == (3, b"bad\0")
        good.node.set(key, b"good")
        tier.rejected(key)
        tier.rejected(key)
        assert load(tier, key, 4) == (4, b"good")
        assert list(tier.problems()) == [f"{bad.address}: the node sent a damaged value"]
        assert state(tier).counts.damaged == 1
        tier.rejected(new_keys(1)[0])


def test_bytes_over_tls_are_sent_until_the_deadline_and_no_longer() -> None:
    """A reader that takes one record after the other, each just in time, keeps no object pinned."""

    class Dripping:
        def settimeout(self, seconds: float) -> None:
            assert seconds <= 0.1

        def setsockopt(self, *_args: object) -> None: ...

        def send(self, piece: memoryview) -> int:
            time.sleep(0.02)
            return 1

        def sendall(self, piece: memoryview) -> None:
            raise AssertionError("it would wait for each record")

    wire = Wire(Dripping())  # type: ignore[arg-type]
    wire._is_tls = True
    with pytest.raises(TimeoutError):
        wire.send([memoryview(bytes(1 << 20))], time.monotonic() + 0.1)


def test_the_status_tells_what_came_from_whom_and_what_went(token: Path) -> None:
    with Lender(token) as lender, reading(token, lender) as tier:
        keys = new_keys(2)
        lender.node.set(keys[0], b"v" * 100)
        assert tier.contains(keys, deadline=soon()) == [FOUND, MISSING]
        assert load(tier, keys[0], 100)[0] == 100
        del lender.node.values[keys[0]]
        assert load(tier, keys[0], 100)[0] is MISSING
        (node,) = tier.status()["nodes"]  # type: ignore[misc]
        # The load that found it gone has asked once more.
        assert node == {
            "node": lender.address,
            "state": "up",
            "values": 1,
            "nbytes": 100,
            "questions": 1,
            "gone": 1,
            "busy": 0,
            "failed": 0,
            "damaged": 0,
        }

        def lent() -> tuple[int, ...]:
            told = lender.tier.status()["lending"]
            return tuple(told[name] for name in ("values", "nbytes", "bytes_under_way"))  # type: ignore[index]

        wait_until(lambda: lent() == (1, 100, 0), what="the end of the loan")
        assert tier.status()["lending"] == {}


def test_a_holder_that_stops_in_mid_value_writes_nothing_later(token: Path) -> None:
    """It goes on once the reader has given up: what it still sends goes nowhere."""
    key, nbytes = new_keys(1)[0], 8 << 20
    with StoppingHolder(token, b"1" * nbytes) as holder:
        tier = peers_tier(token, peers=[holder.address], ask_s=10)
        assert tier.contains([key], deadline=soon()) == [FOUND]
        buffer = bytearray(b"\xa5" * nbytes)
        with pytest.raises(TierError, match="did not answer in time"):
            tier.get_into([key], [[memoryview(buffer)]], deadline=time.monotonic() + 0.5)
        assert buffer.count(b"1") == nbytes // 2
        holder.go_on()
        assert buffer.count(b"1") == nbytes // 2
        assert buffer.endswith(b"\xa5" * (nbytes // 2))
        tier.close()


class StoppingHolder:
    """A holder that has every key, and stops in the middle of each value until `go_on`."""

    def __init__(self, token: Path, value: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._settings = peers_tier(token, peers=[self.address])._settings
        self._value = memoryview(value)
        self._gate = threading.Event()
        self._sent = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> StoppingHolder:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._gate.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def go_on(self) -> None:
        """Returns once the rest was sent, or could not be."""
        self._gate.set()
        assert self._sent.wait(PATIENCE_S)

    def _accept(self) -> None:
        while True:
            try:
                sock = self._listener.accept()[0]
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(Wire(sock),)))
            self._threads[-1].start()

    def _serve(self, wire: Wire) -> None:
        with contextlib.suppress(OSError, EOFError):
            admit(wire, self._settings, ValuesNode(), soon())
            while True:
                request: m.Ask | m.Get = wire.read(m.FromReader, soon())  # type: ignore[arg-type]
                if isinstance(request, m.Ask):
                    wire.write(m.Found(b"\1" * len(m.split_keys(request.keys, m.ASK_KEYS))), soon())
                    continue
                half = len(self._value) // 2
                wire.send([memoryview(m.VALUE_HEAD.pack(m.VALUE, len(self._value))), self._value[:half]], soon())
                self._gate.wait()
                try:
                    wire.send([self._value[half:]], soon())
                finally:
                    self._sent.set()
        wire.close()


def test_a_node_that_restarts_at_its_address_is_found_again(token: Path) -> None:
    key = new_keys(1)[0]
    with Lender(token) as lender, reading(token, lender) as tier:
        lender.node.set(key, b"v")
        assert tier.contains([key], deadline=soon()) == [FOUND]
        before = state(tier).who
        lender.close()
        with pytest.raises(TierError):
            load(tier, key, 1)
        with Lender(token, listen=lender.address) as again:
            wait_until(lambda: tier_has(tier, key) is MISSING, what="the node that restarted")
            assert before is not None
            assert state(tier).who != before
            again.node.set(key, b"w")
            assert load(tier, key, 1) == (1, b"w")


def tier_has(tier: PeersTier, key: bytes) -> Outcome | None:
    try:
        return tier.contains([key], deadline=soon())[0]
    except TierError:
        return None


def test_an_address_that_is_taken_is_a_problem_until_it_is_free(token: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        lender = Lender(token, listen=address)
        wait_until(lambda: bool(lender.tier.problems()), what="the problem")
        assert "Address already in use" in lender.tier.problems()[0]
    with lender:
        wait_until(lambda: not lender.tier.problems(), what="the free address")


# strangers


def test_one_with_another_token_gets_nothing(tmp_path: Path, token: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    with Lender(token) as lender, reading(token_file(folder, "another token!!!"), lender) as tier:
        key = new_keys(1)[0]
        lender.node.set(key, b"v")
        with pytest.raises(TierError, match="no node in peers answers"):
            tier.contains([key], deadline=soon())
        assert "the node refuses this node: the nodes have different tokens" in tier.problems()[0]
        wait_until(lambda: refused_by(lender)["strangers"] > 1, what="another attempt")
        (refused,) = lender.tier.status()["lending"]["strangers"]  # type: ignore[index]
        assert (refused["node"], refused["reason"]) == ("127.0.0.1", "the caller has another token")
    assert caplog.text.count("refused the node 127.0.0.1 at") == 1
    assert "another token!!!" not in caplog.text


@contextmanager
def greeting(token: Path, version: int = 1) -> Iterator[tuple[PeersTier, Wire]]:
    """A tier whose one peer has greeted it, and the peer's end of the connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as holder,
        closing(peers_tier(token, peers=[f"127.0.0.1:{holder.getsockname()[1]}"], ask_s=10)) as tier,
    ):
        state(tier).start()
        with closing(Wire(holder.accept()[0])) as wire:
            wire.write(m.Greeting(version, bytes(32)), soon())
            yield tier, wire


def test_a_holder_that_does_not_know_the_token_is_not_asked(token: Path) -> None:
    with greeting(token) as (tier, wire):
        hello = wire.read(m.Hello, soon())
        wire.write(m.Welcome(hello.proof, bytes(16), 256, "sha256/0", {}), soon())
        wait_until(lambda: "has another token" in "".join(tier.problems()), what="the refusal")


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        m.LENGTH.pack(m.STRANGER_BYTES + 1),
        m.LENGTH.pack(m.MOST_BYTES) + bytes(100),
        m.LENGTH.pack(5) + b"\xc1\xc1\xc1\xc1\xc1",
        m.encoded(m.Ask(bytes(PACKED_KEY_BYTES))),
        m.encoded(m.Hello(1, bytes(32), bytes(32))),
        m.encoded(m.Hello(2, bytes(32), bytes(32))),
    ],
)
def test_a_stranger_is_shut_out(token: Path, said: bytes) -> None:
    with Lender(token) as lender:
        host, port = lender.address.split(":")
        wait_until(lambda: _connects(host, int(port)), what="the listener")
        with socket.create_connection((host, int(port)), PATIENCE_S) as sock:
            wire = Wire(sock)
            assert wire.read(m.Greeting, soon()).version == 1
            sock.sendall(said)
            answers = b""
            try:
                while piece := sock.recv(4096):
                    answers += piece
            except ConnectionResetError:
                pass
            assert not answers or isinstance(m.decoded(answers[4:], m.Refused), m.Refused)
        wait_until(lambda: refused_by(lender)["strangers"] == 1, what="the count")
        (refused,) = lender.tier.status()["lending"]["strangers"]  # type: ignore[index]
        assert refused["reason"].startswith(("the caller is not a node: ", "the caller has", "the caller speaks"))
        assert lender.node.loans == 0


def test_a_probe_that_says_nothing_is_no_stranger_and_a_wrong_certificate_is_one(token: Path, tmp_path: Path) -> None:
    made = make_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    other = make_certificate(tmp_path / "other")
    tls = made.options()
    with Lender(token, **tls) as lender:
        host, port = lender.address.split(":")
        wait_until(lambda: _connects(host, int(port)), what="the listener")
        foreign = {**other.options(), "tls_ca": str(made.certificate)}
        with reading(token, lender, node=ValuesNode(), **foreign) as tier:
            wait_until(lambda: refused_by(lender)["strangers"] > 0, what="the refusal")
            wait_until(lambda: "TLS failed" in "".join(tier.problems()), what="its problem")
        (refused,) = lender.tier.status()["lending"]["strangers"]  # type: ignore[index]
        assert "certificate" in refused["reason"]


def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), PATIENCE_S).close()
    except ConnectionError:
        return False
    return True


@pytest.mark.parametrize(
    "request_",
    [
        m.LENGTH.pack(m.MOST_BYTES + 1),
        m.encoded(m.Ask(b"k" * 71)),
        m.encoded(m.Ask(bytes((m.ASK_KEYS + 1) * PACKED_KEY_BYTES))),
        m.encoded(m.Get(bytes(PACKED_KEY_BYTES), [], 1000)),
        m.encoded(m.Get(bytes(PACKED_KEY_BYTES), [-1], 1000)),
        m.encoded(m.Get(bytes(PACKED_KEY_BYTES), [1], 0)),
    ],
)
def test_a_bad_request_ends_its_connection_only(token: Path, request_: bytes) -> None:
    with Lender(token) as lender, reading(token, lender) as tier:
        with peers_tier_wire(lender) as wire:
            wire.send([memoryview(request_)], soon())
            with pytest.raises((EOFError, ConnectionResetError)):
                wire.read(m.Refused, soon())
        assert tier.contains(new_keys(1), deadline=soon()) == [MISSING]


def test_connections_are_bounded(token: Path) -> None:
    """By those that are used: one that is idle makes place."""
    with Lender(token, connections=1) as lender, ExitStack() as stack:
        key = new_keys(1)[0]
        lender.node.set(key, b"1" * (64 << 20))
        with _stuck_reader(lender, key, 64 << 20):
            wait_until(lambda: lender.node.loans == 1, what="a loan under way")
            with peers_tier_wire(lender) as late, pytest.raises((EOFError, OSError)):
                late.read(m.Found, soon())
        first, second = [stack.enter_context(reading(token, lender)) for _ in range(2)]
        for tier in (first, second, first):
            wait_until(lambda: tier_has(tier, key) is FOUND, what="the place of one that is idle")  # noqa: B023


def test_strangers_take_no_place_of_a_node(token: Path) -> None:
    with Lender(token, connections=1) as lender, ExitStack() as stack:
        host, port = lender.address.split(":")
        wait_until(lambda: _connects(host, int(port)), what="the listener")
        for _ in range(4):
            Wire(stack.enter_context(socket.create_connection((host, int(port))))).read(m.Greeting, soon())
        with reading(token, lender) as tier:
            assert tier.contains(new_keys(1), deadline=soon()) == [MISSING]


def test_a_crowd_of_strangers_is_bounded_by_host_and_goes(token: Path) -> None:
    with Lender(token) as lender, ExitStack() as stack:
        host, port = lender.address.split(":")
        wait_until(lambda: _connects(host, int(port)), what="the listener")
        crowd = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(60)]
        wait_until(lambda: refused_by(lender)["full"] >= 52, what="the bound")
        with reading(token, lender) as tier:
            wait_until(lambda: tier_has(tier, new_keys(1)[0]) is MISSING, what="the end of the strangers' time")
        assert len(crowd) == 60


def refused_by(lender: Lender) -> dict[str, int]:
    return lender.tier.status()["lending"]["refused"]  # type: ignore[index,no-any-return]


def test_a_token_that_cannot_be_read_is_a_refusal(
    tmp_path: Path, token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "lender"
    folder.mkdir()
    own = token_file(folder)
    with Lender(own) as lender, reading(token, lender) as tier:
        own.unlink()
        with pytest.raises(TierError):
            tier.contains(new_keys(1), deadline=soon())
        wait_until(lambda: refused_by(lender)["strangers"] > 0, what="the refusal")
    assert "cannot be read" in caplog.text
    assert "sending objects to a node failed" not in caplog.text


def test_a_holder_of_another_release_is_named(token: Path) -> None:
    with greeting(token, 2) as (tier, _):
        wait_until(lambda: "the node speaks protocol version 2, this node 1" in "".join(tier.problems()), what="it")


def test_words_of_a_stranger_are_shown_without_control_characters(token: Path) -> None:
    with greeting(token) as (tier, wire):
        wire.read(m.Hello, soon())
        wire.write(m.Refused("it has\n\x1b[31m another token"), soon())
        wait_until(lambda: r"it has\n\x1b[31m another token" in "".join(tier.problems()), what="the refusal")


@given(st.binary(max_size=400))
def test_any_bytes_are_a_request_or_a_protocol_error(body: bytes) -> None:
    try:
        request = m.decoded(body, m.FromReader)  # type: ignore[arg-type,var-annotated]
    except m.ProtocolError:
        return
    assert isinstance(request, m.Ask | m.Get)


@given(st.lists(st.binary(min_size=PACKED_KEY_BYTES, max_size=PACKED_KEY_BYTES), max_size=20), st.integers(0, 25))
def test_keys_are_split_as_they_were_joined(keys: list[bytes], most: int) -> None:
    if len(keys) > most:
        with pytest.raises(m.ProtocolError):
            m.split_keys(b"".join(keys), most)
    else:
        assert m.split_keys(b"".join(keys), most) == keys


@given(st.integers(0, 255), st.integers(0, 1 << 63), st.integers(0, 200))
def test_no_answer_writes_beyond_its_room(status: int, nbytes: int, room: int) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(m.VALUE_HEAD.pack(status, nbytes) + b"v" * min(nbytes, 1000))
        there.shutdown(socket.SHUT_WR)
        buffer = bytearray(room)
        try:
            outcome = _receive(
                Wire(here), [memoryview(buffer)[: room // 2], memoryview(buffer)[room // 2 :]], room, soon()
            )
        except (m.ProtocolError, OSError):
            return
        assert outcome in (nbytes, MISSING, FAILED, Outcome.DAMAGED)
        assert not isinstance(outcome, int) or (outcome <= room and buffer[:outcome] == b"v" * outcome)


# options


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({}, "peers and listen are both empty"),
        ({"listen": "10.0.0.7:9310"}, "without TLS, KV would be sent to and from 10.0.0.7:9310 without"),
        ({"peers": ["10.0.0.7:9310"]}, "without encryption"),
        ({"listen": "0.0.0.0:9310"}, "without encryption"),
        ({"peers": ["nonsense"]}, "'nonsense' is not HOST:PORT"),
        ({"peers": ["host:0"]}, "is not HOST:PORT"),
        ({"peers": ["127.0.0.1:1"], "tls_ca": "ca.pem"}, "tls_cert is missing: TLS needs tls_ca, tls_cert and tls_key"),
    ],
)
def test_options_that_cannot_be(token: Path, options: dict[str, object], fact: str) -> None:
    with pytest.raises(ConfigFieldError, match=fact):
        peers_tier(token, **options)


def test_a_trusted_network_and_tls_are_for_other_machines(token: Path, tmp_path: Path) -> None:
    made = make_certificate(tmp_path)
    tls = made.options()
    for more in ({"trusted_network": True}, tls):
        peers_tier(token, peers=["10.0.0.7:9310"], **more).close()  # type: ignore[arg-type]


def test_certificates_that_are_renewed_are_used_from_the_next_connection_on(token: Path, tmp_path: Path) -> None:
    made = make_certificate(tmp_path)
    tls = made.options()
    with Lender(token, **tls) as lender:
        with reading(token, lender, **tls) as tier:
            assert tier.contains(new_keys(1), deadline=soon()) == [MISSING]
        make_certificate(tmp_path)  # in the place of the first, which a new reader does not accept
        with reading(token, lender, **tls) as tier:
            assert tier.contains(new_keys(1), deadline=soon()) == [MISSING]
            made.key.write_text("half of a key")
            used = tier._settings.tls.contexts()  # type: ignore[union-attr]
            assert used == tier._settings.tls.contexts()  # type: ignore[union-attr]


def test_the_token_is_private_and_long(tmp_path: Path) -> None:
    short = token_file(tmp_path, "short")
    with pytest.raises(ConfigFieldError, match="the token has 5 bytes"):
        peers_tier(short, peers=["127.0.0.1:1"])
    short.write_text("long enough for a token")
    short.chmod(0o644)
    with pytest.raises(ConfigFieldError, match="other users may read"):
        peers_tier(short, peers=["127.0.0.1:1"])
    with pytest.raises(ConfigFieldError, match="cannot be read") as missing:
        peers_tier(tmp_path / "missing", peers=["127.0.0.1:1"])
    assert "make the file on one node, and copy it to all nodes: (umask 077; openssl rand -hex 32" in missing.value.hint
    with pytest.raises(ConfigFieldError, match="cannot be read") as unread:
        peers_tier(tmp_path, peers=["127.0.0.1:1"])
    assert "openssl" not in unread.value.hint, "it would overwrite a token that all nodes share"
