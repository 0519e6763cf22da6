"""What the ledger says to a next server: all that was written, whatever a crash has left of the last record."""

from __future__ import annotations

import os
import stat
import struct
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import xxhash

from kvf_events.block_index import Medium, Removed, Stored
from kvf_events.ledger import EventLedgerError, Found, Ledger
from tests.events.test_block_index import CHUNKS, NAMESPACE

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
