"""The numbers of the stream: a reader that asks from any number gets each later one once, and knows the state then.
What the ledger says to a next server: all that was written, whatever a crash has left of the last record."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from kvf_events import history as module
from kvf_events.block_index import L1, BlockIndex, Medium, Removed, Stored
from kvf_events.history import Encoder, History, Numbered
from kvf_events.ledger import EventLedgerError, Found, Ledger
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


NEWS = [
    Stored("m", NAMESPACE, "", Medium.CPU, CHUNKS[0], 0, None),
    Stored("m", NAMESPACE, "", Medium.CPU, CHUNKS[1], 1, CHUNKS[1].hashes[0]),
    Stored("m", NAMESPACE, "salt", Medium.CPU, CHUNKS[5], 0, None),
    Stored("m", NAMESPACE, "", Medium.STORAGE, CHUNKS[0], 0, None),
]
REMOVED = Removed("m", Medium.CPU, list(CHUNKS[1].hashes[1:]))


def opened(path: Path, *, keeps: bool = True) -> tuple[Ledger, Found]:
    ledger = Ledger(path, keeps=keeps)
    found = ledger.open()
    ledger.rewrite(found.next, found.announced, found.gone, ())
    return ledger, found


def read(path: Path) -> Found:
    with closing(Ledger(path, keeps=True)) as ledger:
        return ledger.open()


def test_what_was_written_is_found(tmp_path: Path) -> None:
    path = tmp_path / "state" / "events-x"
    ledger, found = opened(path)
    assert found == Found()
    ledger.write(2000, 7, NEWS)
    ledger.write(0, 9, [REMOVED])
    ledger.close()
    found = read(path)
    assert found.next == 2000
    assert found.announced == {
        ("m", Medium.CPU): {*CHUNKS[0].hashes, *CHUNKS[5].hashes},
        ("m", Medium.STORAGE): set(CHUNKS[0].hashes),
    }
    assert found.gone == [(9, REMOVED)]
    assert found.contents == {NAMESPACE: {each.digest: each for each in CHUNKS[:2]}}
    assert b"salt" not in path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_without_a_keeper_no_token_is_written(tmp_path: Path) -> None:
    ledger, _ = opened(tmp_path / "l", keeps=False)
    ledger.write(2000, 7, NEWS)
    ledger.close()
    assert read(tmp_path / "l").contents == {}


def test_a_torn_or_damaged_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "l"
    ledger, _ = opened(path)
    ledger.write(2000, 7, NEWS[:1])
    whole = ledger.nbytes
    ledger.write(3000, 8, NEWS[1:2])
    ledger.close()
    data = path.read_bytes()
    assert whole < len(data)
    for cut in range(whole, len(data)):
        path.write_bytes(data[:cut])
        found = read(path)
        assert found.next in ((2000,) if cut < whole + 8 else (2000, 3000))
        assert set(CHUNKS[0].hashes) <= found.announced["m", Medium.CPU]
    before, after = set(CHUNKS[0].hashes), {*CHUNKS[0].hashes, *CHUNKS[1].hashes[1:]}
    for at in range(whole, len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        found = read(path)
        assert found.announced["m", Medium.CPU] in (before, after)
        assert found.contents[NAMESPACE].get(CHUNKS[1].digest, CHUNKS[1]) == CHUNKS[1]
    path.write_bytes(b"something else")
    assert read(path) == Found()


def test_a_rewrite_keeps_what_counts(tmp_path: Path) -> None:
    path = tmp_path / "l"
    ledger, _ = opened(path)
    ledger.write(2000, 7, NEWS)
    announced = {("m", Medium.CPU): set(CHUNKS[0].hashes)}
    ledger.rewrite(4000, announced, [(9, REMOVED)], ())
    assert not ledger.is_long
    ledger.write(0, 10, [Stored("m", NAMESPACE, "", Medium.CPU, CHUNKS[2], 0, None)])
    ledger.close()
    found = read(path)
    assert (found.next, found.gone) == (4000, [(9, REMOVED)])
    assert found.announced == {("m", Medium.CPU): {*CHUNKS[0].hashes, *CHUNKS[2].hashes}}


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EventLedgerError, match="cannot be opened") as caught:
        Ledger(tmp_path / "file" / "l", keeps=False).open()
    assert "state" in caught.value.hint


def test_two_servers_do_not_share_a_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvf_events.ledger._LOCK_S", 0.05)
    ledger, _ = opened(tmp_path / "l")
    with pytest.raises(EventLedgerError, match="another server"):
        Ledger(tmp_path / "l", keeps=False).open()
    ledger.close()
    read(tmp_path / "l")


def test_a_removal_of_everything_is_found_with_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten million blocks that leave at once: a record is smaller than the largest that is read."""
    monkeypatch.setattr("kvf_events.ledger._MAX_RECORD", 1 << 10)
    monkeypatch.setattr("kvf_events.ledger._HASHES_AT_ONCE", 100)
    ledger, _ = opened(tmp_path / "l", keeps=False)
    everything = Removed("m", Medium.CPU, list(range(1000)))
    ledger.write(2000, 7, [everything, NEWS[0]])
    ledger.close()
    found = read(tmp_path / "l")
    assert sorted(each for _, removed in found.gone for each in removed.hashes) == everything.hashes
    assert found.announced == {("m", Medium.CPU): set(CHUNKS[0].hashes)}
    ledger, found = opened(tmp_path / "l", keeps=False)
    ledger.rewrite(2000, {}, [(9, everything)], ())
    ledger.close()
    assert len(read(tmp_path / "l").gone) == 10


@pytest.mark.parametrize(
    "record",
    [
        [1, "m", 7, b"x" * 8],
        [1, "m", 0, b"x" * 7],
        [2, 1, "m", -1, b""],
        [3, b"n", b"d", b"p", b"t", b"h" * 9, [], ""],
        [9, 1],
        [0, "1"],
        {},
    ],
)
def test_a_record_of_another_release_ends_what_is_read(record: object, tmp_path: Path) -> None:
    ledger, _ = opened(tmp_path / "l")
    ledger.write(2000, 7, NEWS[:1])
    ledger.close()
    data = msgspec.msgpack.encode(record)
    with (tmp_path / "l").open("ab") as file:
        file.write(struct.pack("<II", len(data), xxhash.xxh32_intdigest(data)) + data)
    found = read(tmp_path / "l")
    assert (found.next, found.announced) == (2000, {("m", Medium.CPU): set(CHUNKS[0].hashes)})


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "l")
    with pytest.raises(EventLedgerError, match="not a file"):
        Ledger(tmp_path / "l", keeps=False).open()
    (tmp_path / "l").unlink()
    (tmp_path / "l").symlink_to(tmp_path / "other")
    with pytest.raises(EventLedgerError, match="cannot be opened"):
        Ledger(tmp_path / "l", keeps=False).open()
