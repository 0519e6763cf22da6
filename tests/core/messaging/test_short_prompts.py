"""The prompts that are too short to be looked up come to the server once, whatever PINGs are lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframework.api.requests import ClientInfo
from kvframework.messaging.client.liveness import Reports
from kvframework.messaging.server.sessions import SessionTable
from kvframework.service.counts import LookupCounts, ShortPrompts
from kvframework.service.finished import FinishedRequests
from kvframework.service.records import RequestLog
from kvframework.status import REASONS
from kvframework.wire.messages import MAX_SHORT, Hello, Ping, ShortPrompt


class Session(ClientInfo):
    pid, name, local = 7, "engine", True

    def __init__(self, session_id: int) -> None:
        self.session_id = session_id


class Server:
    def __init__(self) -> None:
        requests = RequestLog()
        self.counts = LookupCounts(REASONS, requests, lambda _namespace: "m")
        self.finished = FinishedRequests(b"", requests)
        self.prompts = ShortPrompts(self.counts, requests)

    @property
    def counted(self) -> int:
        return int(self.counts.status()["misses"]["too_short"])

    @property
    def ids(self) -> list[str]:
        return [record.request_id for record in self.finished.after(0).records]


steps = st.lists(st.sampled_from(["add", "heard", "heard and acknowledged", "new session"]), max_size=60)


@given(steps)
@settings(deadline=None)
def test_a_prompt_is_counted_once(course: list[str]) -> None:
    """A PING of an ended session that was heard and not acknowledged is told again: the next session's server may be
    another one."""
    reports, server, session = Reports(), Server(), 1
    added = repeated = heard = 0
    for step in course:
        if step == "add":
            added += 1
            reports.too_short(f"r{added}", added)
        elif step == "new session":
            repeated += heard
            heard, session = 0, session + 1
            reports.begin()
        else:
            ping = reports.ping()
            before = server.counted
            server.prompts.heard(Session(session), ping)
            heard += server.counted - before
            if step == "heard and acknowledged":
                reports.answered(ping)
                heard = 0
                assert reports.ping() == Ping()
    server.prompts.heard(Session(session), reports.ping())
    assert server.counted == added + repeated
    if not repeated and added <= MAX_SHORT:
        assert server.ids == [f"r{number}" for number in range(1, added + 1)]


def test_the_last_ones_are_named_and_all_are_counted() -> None:
    reports, server = Reports(), Server()
    for number in range(50):
        reports.too_short(f"r{number}", number)
        reports.too_short(f"r{number}", number)
    server.prompts.heard(Session(1), reports.ping())
    assert server.counted == 50
    assert server.ids == [f"r{number}" for number in range(50 - MAX_SHORT, 50)]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_server_believes_no_decrease(count: int) -> None:
    server = Server()
    server.prompts.heard(Session(1), Ping((), 5, (ShortPrompt("a", 1),)))
    server.prompts.heard(Session(1), Ping((), count, (ShortPrompt("b", 1),)))
    assert (server.counted, server.ids) == (5, ["a"])


def test_a_long_request_id_is_cut() -> None:
    reports = Reports()
    reports.too_short("r" * 5000, 1)
    assert len(reports.ping().short[0].request_id) == 128


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
