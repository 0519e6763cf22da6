"""The queue of one tier's writes against a model: several writers, each with a batch, and L1 that loses objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvframework.api.keys import PackedKey
from kvframework.storage.l2.writer import BATCH_OBJECTS, Batch, WritePolicy, WriteQueue
from tests.core.storage.memory import packed_key

K = [packed_key(number) for number in range(40)]
BOUND, WRITERS = 20, 3


class Watching(WritePolicy):
    """Notes what left L1 while it waited."""

    def __init__(self, holds: Callable[[PackedKey], bool]) -> None:
        super().__init__("write_back")
        self._holds = holds

    def removed(self, key: PackedKey) -> bool:
        return self._holds(key)


class Writers(RuleBasedStateMachine):
    """`sending` is what each writer sends: it is pinned, so it stays in L1."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.queue = WriteQueue(Watching(lambda key: self.queue.holds(key)), BOUND, self.count)
        self.here: set[PackedKey] = set()
        self.taken: list[Batch] = []
        self.sending: list[tuple[Batch, list[PackedKey]]] = []
        self.offered = self.written = 0

    def count(self, **amounts: int) -> None:
        self.counts.update(amounts)

    @rule(numbers=st.lists(st.integers(0, 39), max_size=25))
    def commit(self, numbers: list[int]) -> None:
        fresh = list(dict.fromkeys(K[number] for number in numbers if K[number] not in self.here))
        self.here.update(fresh)
        self.offered += sum(not self.queue.holds(key) for key in fresh)
        self.queue.offer(fresh)

    @rule(number=st.integers(0, 39))
    def evict(self, number: int) -> None:
        if K[number] in self.here and not any(K[number] in keys for _, keys in self.sending):
            self.here.discard(K[number])
            self.queue.removed(K[number])

    @precondition(lambda self: len(self.taken) + len(self.sending) < WRITERS)
    @rule()
    def take(self) -> None:
        self.taken.append(self.queue.take(self.now))
        assert len(self.taken[-1]) <= BATCH_OBJECTS

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        batch = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.sending.append((batch, self.queue.found(batch, [key for key in batch if key in self.here])))

    @precondition(lambda self: self.sending)
    @rule(data=st.data(), stored=st.lists(st.booleans(), min_size=BATCH_OBJECTS, max_size=BATCH_OBJECTS))
    def answered(self, data: st.DataObject, stored: list[bool]) -> None:
        batch, keys = self.sending.pop(data.draw(st.integers(0, len(self.sending) - 1)))
        sent = data.draw(st.integers(0, len(keys)))
        self.queue.answered(keys[:sent], stored[:sent], self.now)
        self.written += sum(stored[:sent])
        self.queue.put_back(batch)

    @precondition(lambda self: self.sending)
    @rule(data=st.data())
    def failed(self, data: st.DataObject) -> None:
        batch, keys = self.sending.pop(data.draw(st.integers(0, len(self.sending) - 1)))
        if keys and self.queue.failed(keys):
            self.queue.give_up(keys)
        self.queue.put_back(batch)

    @rule()
    def later(self) -> None:
        self.now += 1.0

    @invariant()
    def each_object_is_with_one_writer_and_ends_once(self) -> None:
        sent = [key for _, keys in self.sending for key in keys]
        assert len(sent) == len(set(sent)), "two writers send one object"
        ended = self.written + sum(self.counts[f"write_{how}"] for how in ("dropped", "lost", "given_up"))
        assert self.offered == ended + self.queue.pending
        assert self.queue.pending <= BOUND + WRITERS * BATCH_OBJECTS

    def teardown(self) -> None:
        for batch in [*self.taken, *(batch for batch, _ in self.sending)]:
            self.queue.put_back(batch)
        for _ in range(1000):
            self.now += 1.0
            batch = self.queue.take(self.now)
            keys = self.queue.found(batch, [key for key in batch if key in self.here])
            self.queue.answered(keys, [True] * len(keys), self.now)
            self.queue.put_back(batch)
        assert not self.queue.pending, "everything comes to its end"
        assert not self.queue._most
        assert not self.queue._attempts


Writers.TestCase.settings = settings(deadline=None, stateful_step_count=40, max_examples=60)
TestWriters = Writers.TestCase


def test_an_object_that_another_batch_was_refused_waits_for_its_own_time() -> None:
    """It was lost and stored again between: the batch that took it first must not send it, too."""
    counts: Counter[str] = Counter()
    here = {K[1]}
    queue = WriteQueue(Watching(lambda key: key in here), BOUND, lambda **amounts: counts.update(amounts))
    queue.offer([K[1]])
    first = queue.take(0.0)
    queue.removed(K[1])
    queue.offer([K[1]])
    second = queue.take(0.0)
    queue.answered(queue.found(second, [K[1]]), [False], 0.0)
    queue.put_back(second)
    assert queue.found(first, [K[1]]) == []
    queue.put_back(first)
    assert queue.pending == 1
    assert queue.take(1.0) == [K[1]]


def test_an_object_that_was_dropped_is_not_sent_by_the_batch_that_took_it_before() -> None:
    counts: Counter[str] = Counter()
    here = {K[0]}
    queue = WriteQueue(Watching(lambda key: key in here), 2, lambda **amounts: counts.update(amounts))
    queue.offer([K[0]])
    batch = queue.take(0.0)
    queue.removed(K[0])
    queue.offer([K[1], K[2], K[0]])
    assert counts == {"write_lost": 1, "write_dropped": 1}
    assert queue.found(batch, [K[0]]) == []
    queue.put_back(batch)
    assert queue.pending == 2
