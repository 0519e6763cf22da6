"""The numbers of the stream: a reader that asks from any number gets each later one once, and knows the state then."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from kvf_events import history as module
from kvf_events.block_index import L1, BlockIndex, Medium, Removed
from kvf_events.history import Encoder, History, Numbered
from tests.events.reader import Reader
from tests.events.test_block_index import BLOCK, CHUNKS, NAMESPACE, PREFIXES

chunks = st.lists(st.tuples(st.booleans(), st.sampled_from(range(len(CHUNKS)))), max_size=12)


def play(index: BlockIndex, steps: Sequence[tuple[bool, int]]) -> None:
    for comes, number in steps:
        if comes:
            index.register(NAMESPACE, "m", "", PREFIXES, [(CHUNKS[number], [True] * len(PREFIXES))])
        else:
            index.removed(PREFIXES[0] + CHUNKS[number].digest, L1)


def numbers(messages: Sequence[Numbered]) -> list[int]:
    return [each.number for each in messages]


@effort(max_examples=60, deadline=None)
@given(
    batches=st.lists(chunks, min_size=1, max_size=12),
    remembered=st.integers(0, 6),
    first=st.integers(0, 40),
    engines=st.integers(1, 2),
    data=st.data(),
)
def test_a_reader_that_asks_from_any_number_knows_the_state(
    batches: list[list[tuple[bool, int]]], remembered: int, first: int, engines: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Longer than any room that a reader leaves: several topics need as many numbers.
        patch.setattr(module, "MOST_MESSAGES", remembered + engines)
        patch.setattr(module, "MESSAGE_BYTES", 600)
        index = BlockIndex()
        history = History(Encoder("map", BLOCK), [f"e{number}" for number in range(engines)], first)
        sent: list[Numbered] = []
        for steps in batches:
            play(index, steps)
            sent += history.publish(1.0, index.take())
        assert numbers(sent) == list(range(first, history.next))
        left_at = data.draw(st.integers(0, len(sent)))
        reader = Reader()
        mine = [each for each in sent[:left_at] if each.topic.startswith((b"kv@e0@m", b"kv@e0@"))]
        reader.batches([each.payload for each in mine])
        asked = sent[left_at].number if left_at < len(sent) else history.next
        if not left_at:
            asked = 0
        answer = list(history.replay(asked, 1.0, index))
        expected = range(asked, history.next)
        assert numbers(answer) == list(expected)
        reader.batches([each.payload for each in answer if each.topic.startswith(b"kv@e0@")], replayed=True)
        announced = {medium.name: hashes for (_, medium), hashes in index.announced().items()}
        if answer or left_at:
            assert reader.now == {"CPU": set(), "STORAGE": set(), **announced}
        assert list(history.replay(history.next, 1.0, index)) == []


def test_a_reader_that_lacks_the_removal_alone_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_MESSAGES", 1)
    index, history, reader = BlockIndex(), History(Encoder("map", BLOCK), ["e"], 5), Reader()
    play(index, [(True, 0)])
    (first,) = history.publish(1.0, index.take())
    reader.batch(first.payload)
    play(index, [(False, 0)])
    (lost,) = history.publish(1.0, index.take())
    list(history.publish(1.0, ()))
    reader.batches([each.payload for each in history.replay(lost.number, 1.0, index)], replayed=True)
    assert reader.now == {"CPU": set(), "STORAGE": set()}


def test_removals_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_GONE", 10)
    index, history = BlockIndex(), History(Encoder("map", BLOCK), ["e"], 5)
    for _ in range(9):
        play(index, [(True, 0), (False, 0)])
        list(history.publish(1.0, index.take()))
    assert sum(len(removed.hashes) for _, removed in history.removals()) <= 10


def test_a_long_removal_is_told_in_parts() -> None:
    history = History(Encoder("array", BLOCK), ["e"], 0)
    sent = list(history.publish(1.0, [Removed("m", Medium.CPU, list(range(1, 100_000)))]))
    assert len(sent) > 1
    assert max(len(each.payload) for each in sent) < module.MESSAGE_BYTES * 1.1


def test_of_a_removal_of_everything_the_last_blocks_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_GONE", 1000)
    monkeypatch.setattr(module, "_HASHES_AT_ONCE", 100)
    history = History(Encoder("map", BLOCK), ["e"], 0)
    history.gone(Removed("m", Medium.CPU, list(range(5000))), 7)
    kept = [each for number, removed in history.removals() for each in removed.hashes if number == 7]
    assert kept == list(range(4000, 5000))
