"""What the ledger says to a next server: all that was written, whatever a crash has left of the last record."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvframework.events.known import Medium, Removed, Stored
from kvframework.events.ledger import EventLedgerError, Found, Ledger
from tests.events.test_known import CHUNKS, NAMESPACE

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
    ledger = Ledger(path, keeps=True)
    try:
        return ledger.open()
    finally:
        ledger.close()


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
    monkeypatch.setattr("kvframework.events.ledger._LOCK_S", 0.05)
    ledger, _ = opened(tmp_path / "l")
    with pytest.raises(EventLedgerError, match="another server"):
        Ledger(tmp_path / "l", keeps=False).open()
    ledger.close()
    read(tmp_path / "l")
