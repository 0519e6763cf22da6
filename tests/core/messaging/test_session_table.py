"""The pure parts against small models: sessions, deadlines, the heartbeat."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvframework.errors import HelloRequired, ProtocolError, ServerFull
from kvframework.messaging.client.liveness import Watch
from kvframework.messaging.polling import Deadlines
from kvframework.messaging.server.sessions import MAX_IDENTITIES, PRESSED_S, ClientSession, SessionTable
from kvframework.wire.messages import Hello

TIMEOUT = 30.0
IDENTITIES = st.integers(0, 6).map(lambda n: b"id%d" % n)


class SessionMachine(RuleBasedStateMachine):
    """The model: who owns which routing id, and when each session was last heard."""

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = SessionTable(lambda: self.now, session_timeout_s=TIMEOUT, max_sessions=4)
        self.owner: dict[bytes, ClientSession] = {}
        self.last_message: dict[ClientSession, float] = {}
        self.ids: list[int] = []

    @rule(target=sessions, identity=IDENTITIES)
    def open(self, identity: bytes) -> object:
        if identity in self.owner or len(self.last_message) == 4:
            with pytest.raises(ProtocolError if identity in self.owner else ServerFull):
                self.table.open(identity, Hello("c", 1))
            return None
        session = self.table.open(identity, Hello("c", 1))
        self.owner[identity], self.last_message[session] = session, self.now
        self.ids.append(session.session_id)
        return session

    @rule(session=sessions, identity=IDENTITIES)
    def join(self, session: ClientSession | None, identity: bytes) -> None:
        if session is None:
            return
        if session not in self.last_message:
            with pytest.raises(HelloRequired):
                self.table.join(identity, session.token)
        elif self.owner.get(identity, session) is not session:
            with pytest.raises(ProtocolError):
                self.table.join(identity, session.token)
        else:
            assert self.table.join(identity, session.token) is session
            self.owner[identity], self.last_message[session] = session, self.now

    @rule(session=sessions, local=st.booleans())
    def liveness(self, session: ClientSession | None, local: bool) -> None:
        if session is not None:
            session.local = local

    @rule(identity=IDENTITIES)
    def touch(self, identity: bytes) -> None:
        if (session := self.table.by_identity(identity)) is not None:
            self.table.touch(session)
            self.last_message[session] = self.now

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        patience = PRESSED_S if len(self.last_message) > 2 else TIMEOUT
        silent = {s for s, heard in self.last_message.items() if not s.local and self.now - heard >= patience}
        assert set(self.table.expire(self.now)) == silent
        for session in silent:
            self._end(session)

    @rule(session=consumes(sessions))
    def end(self, session: ClientSession | None) -> None:
        if session is not None:
            self._end(session)

    def _end(self, session: ClientSession) -> None:
        assert self.table.end(session) == (session in self.last_message)
        self.last_message.pop(session, None)
        self.owner = {identity: owner for identity, owner in self.owner.items() if owner is not session}
        assert not self.table.end(session)
        assert self.table.by_token(session.token) is None

    @invariant()
    def agrees(self) -> None:
        assert set(self.table.sessions()) == set(self.last_message)
        for n in range(7):
            assert self.table.by_identity(b"id%d" % n) is self.owner.get(b"id%d" % n)
        assert len(set(self.ids)) == len(self.ids)
        for session in self.last_message:
            assert session.identities == {i for i, owner in self.owner.items() if owner is session}


TestSessionTable = SessionMachine.TestCase
TestSessionTable.settings = settings(max_examples=60, stateful_step_count=30)


def test_the_connections_of_one_session_are_bounded() -> None:
    table = SessionTable(lambda: 0.0)
    session = table.open(b"0", Hello("c", 1))
    for n in range(1, MAX_IDENTITIES):
        table.join(b"%d" % n, session.token)
    with pytest.raises(ProtocolError, match="connections"):
        table.join(b"more", session.token)


def test_tokens_are_secret() -> None:
    table = SessionTable(lambda: 0.0)
    one, other = table.open(b"1", Hello("c", 1)), table.open(b"2", Hello("c", 1))
    assert len(one.token) == 16
    assert one.token != other.token
    assert repr(one.token) not in repr(one)


@given(st.lists(st.tuples(st.sampled_from(["set", "discard", "due"]), st.integers(0, 20), st.integers(0, 9))))
def test_deadlines_match_a_dict(steps: list[tuple[str, int, int]]) -> None:
    deadlines: Deadlines[int] = Deadlines()
    model: dict[int, float] = {}
    for step, key, when in steps * 8:
        if step == "set":
            deadlines.set(key, when)
            model[key] = when
        elif step == "discard":
            deadlines.discard(key)
            model.pop(key, None)
        else:
            due = deadlines.due(when)
            assert sorted(due) == sorted(k for k, w in model.items() if w <= when)
            model = {k: w for k, w in model.items() if w > when}
        assert deadlines.next() == min(model.values(), default=None)
        assert len(deadlines) == len(model)


def test_discarded_deadlines_do_not_pile_up() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for key in range(10_000):
        deadlines.set(key, 1e9)
        deadlines.discard(key)
    assert len(deadlines._heap) < 200


class Server:
    """A server under a watch, with a clock of its own: it answers PINGs while it is not `silent`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.changes = 0
        self.silent = True
        self.pinged: list[float] = []
        self.watch = Watch(interval=0.2, timeout=0.5, now=0.0, changed=self._changed)

    def run(self, seconds: float) -> None:
        """As the link does, whenever it is time."""
        until = self.now + seconds
        while self.watch.next_at <= until:
            self.now = max(self.watch.next_at, self.now)
            if silence := self.watch.unanswered_s(self.now):
                self.watch.doubt(self.now - silence, self.now)
            self.watch.log(self.now)
            self.pinged.append(self.now)
            self.watch.pinged(self.now)
            if not self.silent:
                self.watch.answered(self.now)
        self.now = until

    def _changed(self) -> None:
        self.changes += 1


def test_a_silent_server_is_asked_ever_more_slowly_and_in_doubt_until_it_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    server = Server()
    server.run(0.6)
    assert (server.watch.suspect, server.watch.silent_s(0.6)) == (False, 0.0)
    server.run(20)
    gaps = [after - before for before, after in itertools.pairwise(server.pinged)]
    assert server.pinged[0] == pytest.approx(0.2)
    assert gaps[:3] == pytest.approx([0.5, 1.0, 2.0])
    assert max(gaps) == pytest.approx(2.0)
    assert server.watch.suspect
    assert server.watch.silent_s(server.now) == pytest.approx(server.now - 0.2)
    server.watch.heard_at = server.now - 1.0
    assert server.watch.silent_s(server.now) == pytest.approx(1.0)
    server.silent = False
    server.run(3)
    assert (server.watch.suspect, server.changes) == (False, 2)
    assert server.pinged[-1] - server.pinged[-2] == pytest.approx(0.2), "at the usual pace again"
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_one_late_answer_is_asked_about_at_once_once_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    server.watch.doubt(since=-0.1, now=0.0)
    assert server.watch.suspect
    server.run(0.0)
    server.watch.ask_now()
    server.run(0.4)
    assert server.pinged == [0.0], "one PING at a time"
    server.watch.answered(server.now)
    assert (server.watch.suspect, server.changes, caplog.records) == (False, 2, [])


def test_silent_strangers_go_sooner_when_there_are_many() -> None:
    now = [0.0]
    table = SessionTable(lambda: now[0], session_timeout_s=30.0, max_sessions=4)
    first = table.open(b"0", Hello("c", 1))
    first.local = True
    strangers = [table.open(bytes([index]), Hello("c", 1)) for index in (1, 2)]
    now[0] = PRESSED_S
    assert table.expire(now[0]) == strangers
    table.end(strangers[0])
    assert table.expire(now[0]) == []


def test_the_table_knows_the_tokens_of_its_sessions_for_a_while() -> None:
    table = SessionTable(lambda: 0.0, max_sessions=3)
    tokens = []
    for number in range(5):
        session = table.open(bytes([number]), Hello("engine", 7))
        tokens.append(session.token)
        assert table.was_opened(session.token)
        table.end(session)
    assert [table.was_opened(token) for token in tokens] == [False, False, True, True, True]
    assert not table.was_opened(b"")
    assert not table.was_opened(bytes(16))
