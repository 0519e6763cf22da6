"""What a follower has taken in, against publishers that lose batches, restart and forget."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvf_route.follower import Follower

TOPIC = b"kv@a@m"


class Publisher:
    """Numbers batches, each of which adds a word or takes it away; keeps the last `buffer` for a replay. As with their
    times, no two publishers make the same batch."""

    made = 0

    def __init__(self, buffer: int) -> None:
        Publisher.made += 1
        self.serial = Publisher.made
        self.words: set[bytes] = set()
        self.batches: list[tuple[int, bytes]] = []
        self.buffer = buffer
        self.next = 0

    def publish(self, word: bytes) -> tuple[int, bytes]:
        payload = b"%b%b@%d" % (b"-" if word in self.words else b"+", word, self.serial)
        self.words ^= {word}
        batch = (self.next, payload)
        self.next += 1
        self.batches = [*self.batches, batch][-self.buffer :]
        return batch


class Words:
    """A sink."""

    def __init__(self) -> None:
        self.words: set[bytes] = set()

    def apply(self, topic: bytes, payload: bytes) -> None:
        assert topic == TOPIC
        word = payload[1:].partition(b"@")[0]
        self.words = (self.words | {word}) if payload[:1] == b"+" else (self.words - {word})

    def clear(self) -> None:
        self.words = set()


class Following(RuleBasedStateMachine):
    """Live batches wait in `queue`, as in a socket, while a replay is under way or the follower does not read."""

    @initialize(buffer=st.sampled_from([3, 1000]), continues=st.booleans())
    def begin(self, buffer: int, continues: bool) -> None:
        self.publisher = Publisher(buffer)
        self.continues = continues
        self.sink = Words()
        self.follower = Follower(self.sink, has_replay=True)
        self.queue: list[tuple[int, bytes]] = []
        self.works = True
        self.follower.connected()

    @rule(word=st.sampled_from([b"a", b"b", b"c"]), lost=st.booleans())
    def publish(self, word: bytes, lost: bool) -> None:
        batch = self.publisher.publish(word)
        if not lost:
            self.queue.append(batch)

    @rule()
    def read(self) -> None:
        self.drain()

    @rule(works=st.booleans())
    def break_replay(self, works: bool) -> None:
        self.works = works

    @rule()
    def restart(self) -> None:
        """The next publisher holds nothing. Its numbers begin again, or go on after telling so."""
        before = self.publisher
        self.publisher = Publisher(before.buffer)
        if self.continues:
            self.publisher.next = before.next + 1000
        self.queue.clear()
        self.follower.connected()

    @rule()
    def reconnect(self) -> None:
        self.queue.clear()
        self.follower.connected()

    @precondition(lambda self: self.follower.in_doubt)
    @rule()
    def try_again(self) -> None:
        self.follower.connected()

    @invariant()
    def certain_is_right(self) -> None:
        """With a working replay that reaches back far enough, and nothing that waits, all is as told."""
        if not self.works or self.publisher.buffer < 1000:
            return
        follower = self.follower
        if follower.in_doubt:
            follower.connected()
        self.drain()
        batch = self.publisher.publish(b"z")  # what was lost shows with the next batch
        self.queue.append(batch)
        self.drain()
        assert not follower.in_doubt
        assert follower.question is None
        assert self.sink.words == self.publisher.words

    def drain(self) -> None:
        turns = 0
        while self.queue or self.follower.question is not None:
            turns += 1
            assert turns < 10_000, "a question without end"
            if self.follower.question is not None:
                self.replay(self.follower.question)
            elif self.follower.live(TOPIC, *self.queue[0]):
                self.queue.pop(0)

    def replay(self, asked: int) -> None:
        if not self.works:
            self.follower.failed()
            return
        for batch in self.publisher.batches:
            if batch[0] >= asked and not self.follower.answer(TOPIC, *batch):
                return
        self.follower.end()


TestFollowing = Following.TestCase
TestFollowing.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def follow(follower: Follower, *numbers: int) -> list[bool]:
    return [follower.live(TOPIC, number, b"+%d" % number) for number in numbers]


def test_without_a_replay_what_is_lost_is_counted_and_a_number_that_falls_is_a_new_beginning() -> None:
    sink = Words()
    follower = Follower(sink, has_replay=False)
    follower.connected()
    assert follow(follower, 5, 6, 9) == [True, True, True]
    assert (follower.lost, follower.question, sink.words) == (2, None, {b"5", b"6", b"9"})
    assert follow(follower, 0, 1) == [True, True]
    assert (follower.forgotten, sink.words) == (1, {b"0", b"1"})


def test_a_replay_that_never_has_what_is_missing_is_asked_once_a_gap() -> None:
    sink = Words()
    follower = Follower(sink, has_replay=True)
    follower.connected()
    follower.answer(TOPIC, 0, b"+0")
    follower.end()
    assert follow(follower, 4) == [False]
    assert follower.question == 0
    follower.answer(TOPIC, 0, b"+0")
    follower.end()
    assert follow(follower, 4) == [True]
    assert follower.lost == 3


def test_an_answer_with_a_hole_proves_nothing() -> None:
    sink = Words()
    follower = Follower(sink, has_replay=True)
    follower.connected()
    for number in (0, 1):
        follower.answer(TOPIC, number, b"+%d" % number)
    follower.end()
    assert follow(follower, 5) == [False]
    assert follower.question == 1
    assert follower.answer(TOPIC, 1, b"+1")
    assert not follower.answer(TOPIC, 3, b"+3")
    assert (follower.question, sink.words) == (0, set())


def test_what_was_taken_in_doubt_of_another_publisher_does_not_stay() -> None:
    """Found by chance: no batch was certain, so nothing could be asked for but all."""
    sink = Words()
    follower = Follower(sink, has_replay=True)
    follower.connected()
    follower.failed()
    assert follow(follower, 0) == [True]
    for answered in (False, True):
        follower.connected()
        assert follower.question == 0
        assert sink.words == {b"0"}
        if answered:
            follower.end()
        else:
            follower.failed()
    assert sink.words == set()
