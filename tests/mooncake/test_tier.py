"""The Mooncake tier with a stand-in for Mooncake's client: codes, seals, repeated keys, options. `tests/mooncake` has
the real one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_mooncake import MooncakeOptions, kvf_tiers, place
from kvf_mooncake import client as helper
from kvf_mooncake.client import MooncakeHelperTier, diagnose, make_tier
from kvf_mooncake.tier import SEAL_BYTES, MooncakeTier, broken_seal, seal
from kvframework.api.plugin import TableContext
from kvframework.api.tier import Outcome
from kvframework.errors import TierError
from tests.core.doctor.tables import ask, levels
from tests.mooncake import fake_mooncake

A, B, C = (letter * 72 for letter in (b"a", b"b", b"c"))
OPTIONS = MooncakeOptions(master="127.0.0.1:50051")


@pytest.fixture
def client() -> fake_mooncake.FakeClient:
    return fake_mooncake.FakeClient()


@pytest.fixture
def tier(client: fake_mooncake.FakeClient) -> MooncakeTier:
    return MooncakeTier(client, None, prefix="kvf:", where="[[l2]] #1")


def sealed(value: bytes) -> list[memoryview]:
    """As the server's half gives a value: with room for the seal."""
    return [memoryview(bytearray(value + bytes(SEAL_BYTES)))]


def put(tier: MooncakeTier, *pairs: tuple[bytes, bytes]) -> list[Outcome]:
    return tier.put([key for key, _ in pairs], [sealed(value) for _, value in pairs], deadline=fake_mooncake.after(10))


def get(tier: MooncakeTier, *keys: bytes, room: int = 32) -> list[bytes | Outcome]:
    rooms = [bytearray(room + SEAL_BYTES) for _ in keys]
    answers = tier.get_into(keys, [[memoryview(each)] for each in rooms], deadline=fake_mooncake.after(10))
    return [
        answer if isinstance(answer, Outcome) else bytes(each[:answer])
        for answer, each in zip(answers, rooms, strict=True)
    ]


@given(st.binary(min_size=72, max_size=72), st.binary(max_size=300), st.data())
def test_a_seal_is_broken_by_any_change(key: bytes, value: bytes, data: st.DataObject) -> None:
    (room,) = sealed(value)
    seal(key, room)
    assert room[:-SEAL_BYTES] == value
    assert broken_seal(key, room) is None
    assert broken_seal(bytes([key[0] ^ 1]) + key[1:], room) is not None
    assert broken_seal(key, room[:-1]) is not None
    at = data.draw(st.integers(0, len(room) - 1))
    room[at] ^= 1 << data.draw(st.integers(0, 7))
    assert broken_seal(key, room) is not None


def test_values_come_back_empty_ones_too(tier: MooncakeTier) -> None:
    assert put(tier, (A, b"value"), (B, b"")) == [Outcome.STORED] * 2
    assert get(tier, A, C, B) == [b"value", Outcome.MISSING, b""]
    assert tier.contains([A, C], deadline=fake_mooncake.after(10)) == [Outcome.FOUND, Outcome.MISSING]
    assert tier.delete([A, A], deadline=fake_mooncake.after(10)) == [Outcome.DELETED, Outcome.MISSING]


def test_a_key_twice_is_written_twice_in_order(tier: MooncakeTier, client: fake_mooncake.FakeClient) -> None:
    assert put(tier, (A, b"1"), (B, b"2"), (A, b"3"), (A, b"4"), (C, b"5")) == [Outcome.STORED] * 5
    assert all(len(keys) == len(set(keys)) for keys in client.puts)
    assert get(tier, A, B, C) == [b"4", b"2", b"5"]


def test_what_another_client_deletes_or_replaces_meanwhile(
    tier: MooncakeTier, client: fake_mooncake.FakeClient
) -> None:
    upsert = client.batch_upsert_from

    def deleted(*arguments: Any) -> list[int]:
        del client.values["kvf:" + A.hex()]
        return [-704]

    def replaced(*arguments: Any) -> list[int]:
        client.batch_upsert_from = upsert  # type: ignore[method-assign]
        put(MooncakeTier(client, None, prefix="kvf:", where=""), (A, b"other"))
        return [-601]

    for meanwhile, kept in ((deleted, b"new"), (replaced, b"other")):
        put(tier, (A, b"old"))
        client.batch_upsert_from = meanwhile  # type: ignore[method-assign]
        client.before_put = lambda: setattr(client, "batch_upsert_from", upsert)
        assert put(tier, (A, b"new"), (B, b"value")) == [Outcome.STORED] * 2
        assert get(tier, A, B) == [kept, b"value"]
        tier.delete([A, B], deadline=fake_mooncake.after(10))


def test_a_write_of_another_client_is_waited_for(tier: MooncakeTier, client: fake_mooncake.FakeClient) -> None:
    """Mooncake's put says yes at once; a replacement would cost the other client its write."""
    name = "kvf:" + A.hex()
    client.unfinished = {name}

    def other_ends() -> None:
        if rounds.pop():
            client.unfinished.discard(name)
            put(MooncakeTier(client, None, prefix="kvf:", where=""), (A, b"other"))

    rounds = [False] * 10 + [True, False]
    client.before_put = other_ends
    assert put(tier, (A, b"value"), (B, b"value")) == [Outcome.STORED] * 2
    assert get(tier, A, B) == [b"other", b"value"]


def test_what_a_dead_client_began_to_write_is_replaced(
    tier: MooncakeTier, client: fake_mooncake.FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvf_mooncake.tier._WRITE_UNDER_WAY_S", 0.01)
    client.unfinished = {"kvf:" + A.hex()}
    assert put(tier, (A, b"value"), (B, b"value")) == [Outcome.STORED] * 2
    assert get(tier, A, B) == [b"value"] * 2


def test_a_key_twice_is_read_twice(tier: MooncakeTier) -> None:
    put(tier, (A, b"1"), (B, b"2"))
    assert get(tier, A, A, B, C, A, C) == [b"1", b"1", b"2", Outcome.MISSING, b"1", Outcome.MISSING]


def test_a_key_is_changed_by_one_call_at_a_time(tier: MooncakeTier, client: fake_mooncake.FakeClient) -> None:
    """Mooncake gives the place of a value that is deleted while it is written to another one."""
    inside, go_on = threading.Event(), threading.Event()
    upsert = client.batch_upsert_from

    def slow(*arguments: Any) -> list[int]:
        inside.set()
        assert go_on.wait(60)
        return upsert(*arguments)

    client.batch_upsert_from = slow  # type: ignore[method-assign]
    writer = threading.Thread(target=put, args=(tier, (A, b"value")))
    writer.start()
    assert inside.wait(60)
    deleted: list[Outcome] = []
    deleter = threading.Thread(target=lambda: deleted.extend(tier.delete([B, A], deadline=fake_mooncake.after(60))))
    deleter.start()
    assert tier.delete([B], deadline=fake_mooncake.after(60)) == [Outcome.MISSING]
    assert not deleted
    go_on.set()
    writer.join()
    deleter.join()
    assert deleted == [Outcome.MISSING, Outcome.DELETED]


def test_a_longer_value_is_damaged_and_a_refusal_is_not(tier: MooncakeTier, client: fake_mooncake.FakeClient) -> None:
    put(tier, (A, b"value"), (B, b"value"))
    client.codes[B.hex()] = -600
    assert get(tier, A, B, room=4) == [Outcome.DAMAGED] * 2
    assert get(tier, A, B, room=5) == [b"value", Outcome.FAILED]


def test_codes_of_one_key_fail_that_key(tier: MooncakeTier, client: fake_mooncake.FakeClient) -> None:
    put(tier, (A, b"value"), (B, b"value"))
    client.codes[B.hex()] = fake_mooncake.DEAD_PEER
    assert get(tier, A, B) == [b"value", Outcome.FAILED]
    assert tier.contains([A, B], deadline=fake_mooncake.after(10)) == [Outcome.FOUND, Outcome.FAILED]
    client.codes[B.hex()] = fake_mooncake.FULL
    assert put(tier, (A, b"v"), (B, b"v")) == [Outcome.STORED, Outcome.FAILED]
    client.codes[B.hex()] = -601
    assert put(tier, (A, b"v"), (B, b"v")) == [Outcome.STORED, Outcome.FAILED]
    client.codes[B.hex()] = -706
    assert tier.delete([A, B], deadline=fake_mooncake.after(10)) == [Outcome.DELETED, Outcome.FAILED]


def test_a_master_that_does_not_answer_fails_the_call(tier: MooncakeTier, client: fake_mooncake.FakeClient) -> None:
    client.codes[B.hex()] = fake_mooncake.NO_MASTER
    calls = (
        lambda: get(tier, A, B),
        lambda: put(tier, (A, b"v"), (B, b"v")),
        lambda: tier.contains([A, B], deadline=fake_mooncake.after(10)),
        lambda: tier.delete([A, B], deadline=fake_mooncake.after(10)),
    )
    for call in calls:
        with pytest.raises(TierError, match=r"the master does not answer \(-900\)"):
            call()


def test_an_answer_of_another_length_is_an_error(tier: MooncakeTier, client: fake_mooncake.FakeClient) -> None:
    client.batch_is_exist = lambda _keys, /: [1]  # type: ignore[method-assign]
    with pytest.raises(TierError, match="1 codes for 2 keys"):
        tier.contains([A, B], deadline=fake_mooncake.after(10))


def test_a_reader_waits_for_the_end_of_a_write(tier: MooncakeTier, client: fake_mooncake.FakeClient) -> None:
    put(tier, (A, b"old"))
    whole = client.values["kvf:" + A.hex()]
    states = iter([{A.hex(): fake_mooncake.NOT_READY}, {A.hex(): fake_mooncake.NOT_READY}, {}])
    client.before_get = lambda: setattr(client, "codes", next(states))
    assert get(tier, A) == [b"old"]
    # Overwritten in place, while it is read: another content each time, and at last the new one.
    contents = iter([b"nld" + whole[3:], b"ned" + whole[3:], b"new" + whole[3:], whole])
    client.before_get = lambda: client.values.update({"kvf:" + A.hex(): next(contents)})
    assert get(tier, A) == [b"old"]


def test_a_write_that_never_ends_is_a_miss(
    tier: MooncakeTier, client: fake_mooncake.FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvf_mooncake.tier._WRITE_UNDER_WAY_S", 0.01)
    put(tier, (A, b"value"), (B, b"value"))
    client.codes[B.hex()] = fake_mooncake.NOT_READY
    assert get(tier, A, B) == [b"value", Outcome.MISSING]


def test_what_is_no_value_and_stays_so_is_damaged(
    tier: MooncakeTier, client: fake_mooncake.FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvf_mooncake.tier._WRITE_UNDER_WAY_S", 0.01)
    client.values |= {"kvf:" + A.hex(): b"a stranger's", "kvf:" + B.hex(): b"short"}
    assert get(tier, A, B) == [Outcome.DAMAGED] * 2


def test_memory_is_registered_and_forgotten(tier: MooncakeTier, client: fake_mooncake.FakeClient) -> None:
    memory = memoryview(bytearray(4096))
    tier.register_memory(memory)
    assert list(client.registered.values()) == [4096]
    tier.unregister_memory(memory)
    assert not client.registered

    def refused(_address: int, _nbytes: int, /) -> int:
        return -600

    client.register_buffer = refused  # type: ignore[method-assign]
    with pytest.raises(TierError, match="4096 bytes of memory cannot be registered"):
        tier.register_memory(memory)


@pytest.fixture
def in_a_helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeHelperTier]:
    monkeypatch.setattr(helper, "make_tier", fake_mooncake.fake_tier)
    tier = MooncakeHelperTier(OPTIONS, where="[[l2]] #1")
    yield tier
    tier.close()


def test_values_pass_to_the_helper_and_back(in_a_helper: MooncakeHelperTier) -> None:
    value = bytes(range(256)) * 8192
    parts = [memoryview(value)[:80], memoryview(value)[80:]]
    assert in_a_helper.put([A, B], [parts, [memoryview(b"")]], deadline=fake_mooncake.after(60)) == [Outcome.STORED] * 2
    room = bytearray(len(value) + 1)
    got = in_a_helper.get_into(
        [A, B, C],
        [[memoryview(room)[:7], memoryview(room)[7:]], [], [memoryview(bytearray(4))]],
        deadline=fake_mooncake.after(60),
    )
    assert got == [len(value), 0, Outcome.MISSING]
    assert room[: len(value)] == value
    assert in_a_helper.get_into([A], [[memoryview(room)[:9]]], deadline=fake_mooncake.after(60)) == [Outcome.DAMAGED]


def test_a_client_that_holds_the_interpreter_holds_the_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of the server go on: this one's neighbour counts while the client sleeps in C."""
    monkeypatch.setattr(helper, "make_tier", fake_mooncake.holding_tier)
    tier = MooncakeHelperTier(OPTIONS, where="[[l2]] #1")
    tier.delete([A], deadline=fake_mooncake.after(60))  # it is up
    beats, ended = 0, threading.Event()

    def beat() -> None:
        nonlocal beats
        while not ended.wait(0.001):
            beats += 1

    heart = threading.Thread(target=beat)
    heart.start()
    with pytest.raises(TierError, match="the call's deadline has passed"):
        tier.contains([A], deadline=fake_mooncake.after(0.5))
    ended.set()
    heart.join()
    tier.close()
    assert beats > 10


def test_no_master_is_refused_before_mooncake_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvf_mooncake.client.library", lambda _where: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listening = MooncakeOptions(master=f"127.0.0.1:{port}")
        findings = diagnose(listening, TableContext(where="[[l2]] #1"), fake_mooncake.after(10))
        assert [(each.id, each.level) for each in findings] == [("mooncake.master", "ok"), ("mooncake.host", "warn")]
    with pytest.raises(TierError, match=rf"no mooncake_master answers at 127.0.0.1:{port}: Connection refused"):
        make_tier(listening, "[[l2]] #1")
    (finding,) = diagnose(listening, TableContext(where="[[l2]] #1"), fake_mooncake.after(10))
    assert (finding.id, finding.level) == ("mooncake.master", "fail")


@pytest.mark.parametrize(
    "master", ["", "host", "host:", "host:0", "host:65536", "http://host:1", "a b:1", "etcd://h:1"]
)
def test_a_master_that_is_no_place_is_refused(master: str) -> None:
    with pytest.raises(ValueError, match='master is "host:port"'):
        MooncakeOptions(master=master)


def test_places() -> None:
    assert place("10.0.0.7:50051") == ("10.0.0.7", 50051)
    assert place("[fe80::1]:1") == ("fe80::1", 1)
    with pytest.raises(ValueError, match='devices needs protocol = "rdma", found'):
        MooncakeOptions(master="h:1", devices="mlx5_0")


def test_without_mooncake_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvf_mooncake.find_spec", lambda _name: None)
    (provider,) = kvf_tiers()
    assert provider.shared
    assert provider.probe is not None
    assert "Mooncake is not installed: pip install" in str(provider.probe())


def test_the_doctor_finds_that_a_library_of_the_system_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = ask("mooncake", master="127.0.0.1:1")
    assert levels(found) == {"plugin.usable": "ok", "mooncake.client": "fail"}
    assert found["mooncake.client"].fact == "Mooncake's client cannot be imported: libibverbs.so.1: cannot open"
    assert found["mooncake.client"].advice.startswith("install libibverbs1")
