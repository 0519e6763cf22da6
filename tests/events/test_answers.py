"""Answers to readers that read, read slowly, stop reading, or leave."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from kvf_events import history as module
from kvf_events.history import END, STALLED_S, Answers, Numbered

LIVE = 500
ROOM = 8


class Readers:
    """Queues of `ROOM` messages, as the socket has them."""

    def __init__(self) -> None:
        self.queues: dict[bytes, list[Numbered]] = {}
        self.read: dict[bytes, list[int]] = {}
        self.left: set[bytes] = set()

    def send(self, client: bytes, message: Numbered) -> bool | None:
        if client in self.left:
            return None
        queue = self.queues.setdefault(client, [])
        if len(queue) == ROOM:
            return False
        queue.append(message)
        return True

    def take(self, client: bytes, most: int) -> None:
        queue = self.queues.get(client, [])
        self.read.setdefault(client, []).extend(each.number for each in queue[:most])
        del queue[:most]


def at_no_cost() -> float:
    return 0.0


def numbered(first: int) -> Iterator[Numbered]:
    return (Numbered(b"t", number, b"x" * 2000) for number in range(first, LIVE))


def whole(read: list[int], first: int) -> bool:
    return read == [*range(first, LIVE), END.number]


@effort(max_examples=60, deadline=None)
@given(
    asked=st.lists(st.integers(LIVE - 60, LIVE + 2), min_size=1, max_size=50),
    speeds=st.lists(st.integers(0, 3 * ROOM), min_size=1, max_size=7),
    leaving=st.sets(st.integers(0, 49)),
    left_at=st.integers(0, 8),
)
def test_who_reads_gets_all_in_order_and_who_does_not_gets_the_end(
    asked: list[int], speeds: list[int], leaving: set[int], left_at: int
) -> None:
    readers = Readers()
    answers = Answers(readers.send, numbered, at_no_cost)
    speed = {b"%d" % each: speeds[each % len(speeds)] for each in range(len(asked))}
    for number, first in enumerate(asked):
        answers.ask(b"%d" % number, first)
    now, turns = 0.0, 0
    while answers.turn(now) < math.inf and turns < 2000:
        now, turns = now + STALLED_S / 100, turns + 1
        if turns == left_at:
            readers.left |= {b"%d" % each for each in leaving}
        for client, most in speed.items():
            readers.take(client, most)
    for client in speed:
        readers.take(client, ROOM)
    stuck = [client for client, most in speed.items() if not most and client not in readers.left]
    assert stuck or turns < 2000
    for number, first in enumerate(asked):
        client = b"%d" % number
        if client not in readers.left and client not in stuck:
            assert whole(readers.read[client], first) or (
                len(stuck) >= module.MOST_ANSWERS and not readers.read[client]
            )
    answers.turn(now)
    for client in stuck:
        readers.take(client, ROOM)
        assert readers.read[client][-1:] == [END.number] or not readers.read[client]


def test_who_does_not_read_holds_one_place_until_it_has_left() -> None:
    readers = Readers()
    answers = Answers(readers.send, numbered, at_no_cost)
    for number in range(module.MOST_ANSWERS):
        answers.ask(b"stuck %d" % number, 0)
    answers.ask(b"good", LIVE - 3)
    for step in range(100):
        answers.turn(step * STALLED_S)
    assert answers.given_up == module.MOST_ANSWERS
    assert b"good" not in readers.queues
    assert all(len(queue) == ROOM for queue in readers.queues.values())
    readers.left.add(b"stuck 0")
    for _ in range(ROOM):
        answers.turn(2000.0)
    readers.take(b"good", ROOM)
    assert whole(readers.read[b"good"], LIVE - 3)
    readers.take(b"stuck 1", ROOM)
    answers.turn(2001.0)
    readers.take(b"stuck 1", ROOM)
    assert readers.read[b"stuck 1"] == [*range(ROOM), END.number]


def test_questions_are_bounded() -> None:
    answers = Answers(lambda _client, _message: False, numbered, at_no_cost)
    for number in range(2 * module.MOST_WAITING):
        answers.ask(b"%d" % number, 0)
    assert answers.given_up == module.MOST_WAITING


def test_the_last_question_of_a_client_is_answered_from_its_beginning() -> None:
    readers = Readers()
    answers = Answers(readers.send, numbered, at_no_cost)
    answers.ask(b"a", LIVE - 30)
    answers.turn(0.0)
    readers.take(b"a", ROOM)
    answers.ask(b"a", LIVE - 2)
    while answers.turn(0.0) < math.inf:
        readers.take(b"a", ROOM)
    readers.take(b"a", ROOM)
    assert readers.read[b"a"][-3:] == [LIVE - 2, LIVE - 1, END.number]


def test_at_the_end_each_gets_its_end() -> None:
    readers = Readers()
    answers = Answers(readers.send, numbered, at_no_cost)
    for number in range(module.MOST_ANSWERS + 5):
        answers.ask(b"%d" % number, LIVE - 40)
    answers.turn(0.0)
    answers.end()
    while answers.turn(0.0) < math.inf:
        for client in list(readers.queues):
            readers.take(client, ROOM)
    for number in range(module.MOST_ANSWERS + 5):
        readers.take(b"%d" % number, ROOM)
        assert readers.read[b"%d" % number][-1] == END.number


def test_answers_take_a_share_of_the_time_whoever_asks() -> None:
    """The serving thread has the same interpreter: without a rest a reader that asks all the time takes most of it."""
    spent, asked = 0.0, 0

    def costly(_first: int) -> Iterator[Numbered]:
        nonlocal spent, asked
        spent, asked = spent + 0.25, asked + 1
        return numbered(LIVE - 1)

    answers = Answers(lambda _client, _message: True, costly, lambda: spent)
    now = 0.0
    while now < 100.0:
        for number in range(5):
            answers.ask(b"%d" % number, 0)
        before = asked
        assert answers.turn(now) >= 0.001
        assert asked <= before + 1
        now += 0.125
    assert 99.0 / 4 <= spent <= 101.0 / 4


def test_a_turn_sends_so_much_to_all_together_and_each_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TURN_BYTES", 9000)
    sent: list[bytes] = []
    answers = Answers(lambda client, _message: not sent.append(client), numbered, at_no_cost)
    for number in range(20):
        answers.ask(b"%d" % number, LIVE - 60)
        answers.turn(0.0)
    sent.clear()
    for turn in range(1, 41):
        answers.turn(0.0)
        assert len(sent) <= 3 * turn
    assert len(set(sent)) == 20


def test_the_ends_do_not_wait_for_a_rest() -> None:
    spent = iter(range(100))
    sent: list[Numbered] = []
    answers = Answers(lambda _client, message: not sent.append(message), numbered, lambda: float(next(spent)))
    answers.ask(b"a", 0)
    answers.turn(0.0)
    assert sent[-1] is not END
    answers.end()
    while answers.turn(0.0) < math.inf:
        pass
    assert sent[-1] is END


def test_who_asks_after_the_end_of_all_gets_an_end() -> None:
    sent: list[Numbered] = []
    answers = Answers(lambda _client, message: not sent.append(message), numbered, at_no_cost)
    assert not answers.end()
    answers.ask(b"a", 0)
    assert answers.turn(0.0) == math.inf
    assert sent == [END]
