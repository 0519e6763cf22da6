"""What a keeper holds, at a server's start: each gate, its name, and what becomes of the memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterator, Sequence

import msgspec
import pytest

from kvf_pinned.memory import MemfdArena
from kvframework.api.memory import Memory
from kvframework.config.tenants import MAX_TENANTS
from kvframework.errors import ArenaError
from kvframework.storage import recovery as kept_module
from kvframework.storage.l1 import journal as journals
from kvframework.storage.l1.entries import ALIGNMENT
from kvframework.storage.l1.journal import Identity
from kvframework.storage.recovery import ARENA, JOURNAL, Recovery, free_recoverable, recover
from tests.core.storage.memory import packed_key

CAPACITY = 1 << 20
IDENTITY = Identity(256, "hasher", "pinned", "{}", (0, 0), "machine")


class DictKeeper:
    """Holds duplicates, as the other side of a socket does."""

    lasts = True

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.full = False

    def kept(self, names: Collection[str]) -> dict[str, int]:
        return {name: os.dup(fd) for name, fd in self.held.items() if name in names}

    def store(self, name: str, fd: int) -> None:
        if self.full:
            raise ConnectionRefusedError(111, "Connection refused")
        assert name not in self.held
        self.held[name] = os.dup(fd)

    def remove(self, name: str) -> None:
        if name in self.held:
            os.close(self.held.pop(name))


@pytest.fixture
def keeper() -> Iterator[DictKeeper]:
    made = DictKeeper()
    yield made
    for name in list(made.held):
        made.remove(name)


def create(kept: int | None) -> Memory:
    return MemfdArena(CAPACITY, kept=kept)


def start(keeper: DictKeeper, *, tenants: Sequence[str] = ("tenant",), **changed: object) -> tuple[Memory, Recovery]:
    return recover(keeper, msgspec.structs.replace(IDENTITY, **changed), tenants, create)


def end(memory: Memory, kept: Recovery) -> None:
    """As the end of the process: nothing is written."""
    kept.journal.close()
    memory.close()


def fill(memory: Memory, kept: Recovery, *, owner: int = 0, commit: bool = True) -> None:
    slots = kept.journal.reserve([(packed_key(1), 0, ALIGNMENT)], owner=owner, tenant=0)
    with memory.view() as view:
        view[:4] = b"kept"
    if commit:
        kept.journal.commit(slots, 1.0)
        kept.journal.served()


def first(memory: Memory) -> bytes:
    with memory.view() as view:
        return bytes(view[:4])


def test_an_arena_comes_back_with_its_bytes_and_objects(keeper: DictKeeper) -> None:
    memory, kept = start(keeper)
    assert kept.why_cold == "nothing_kept"
    fill(memory, kept)
    end(memory, kept)
    for generation in (2, 3):
        memory, kept = start(keeper)
        assert (kept.why_cold, first(memory)) == ("", b"kept")
        assert [each.key for each in kept.found.slots.objects] == [packed_key(1)]
        assert kept.journal.generation == generation
        end(memory, kept)


def cold(keeper: DictKeeper, **changed: object) -> str:
    """Return why the next start is cold; the start after that one is warm."""
    inode = os.fstat(keeper.held[ARENA]).st_ino if ARENA in keeper.held else 0
    memory, kept = start(keeper, **changed)
    assert kept.found is None
    assert os.fstat(keeper.held[ARENA]).st_ino == os.fstat(memory.fd).st_ino != inode
    end(memory, kept)
    after, again = start(keeper, **changed)
    assert again.found is not None
    end(after, again)
    return kept.why_cold


@pytest.fixture
def filled(keeper: DictKeeper) -> DictKeeper:
    memory, kept = start(keeper)
    fill(memory, kept)
    end(memory, kept)
    return keeper


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"chunk_size": 512}, "other_configuration: chunk_size was 256, is 512"),
        ({"hasher": "other"}, "other_configuration: hasher was hasher, is other"),
        ({"memory": "shared"}, "other_configuration: memory was pinned, is shared"),
        ({"options": '{"a":1}'}, 'other_configuration: options was {}, is {"a":1}'),
        ({"machine": "later"}, "other_machine: the machine was restarted"),
    ],
)
def test_another_server(filled: DictKeeper, changed: dict[str, object], why: str) -> None:
    assert cold(filled, **changed) == why


@pytest.mark.parametrize("missing", [ARENA, JOURNAL])
def test_one_of_the_two(filled: DictKeeper, missing: str) -> None:
    filled.remove(missing)
    assert cold(filled).startswith("incomplete")


def test_a_damaged_journal(filled: DictKeeper) -> None:
    with mmap.mmap(filled.held[JOURNAL], 0) as journal:
        journal[journals.SLOTS_AT + 20] ^= 1
    assert cold(filled) == "damaged: slot 0 of the journal is damaged"


def test_the_journal_of_another_arena(filled: DictKeeper) -> None:
    filled.remove(ARENA)
    other = MemfdArena(CAPACITY)
    filled.store(ARENA, other.fd)
    other.close()
    assert cold(filled) == "damaged: the journal belongs to another arena"


def longest_names(generation: int) -> list[str]:
    return [f"{generation}-{number}".ljust(32, "x") for number in range(MAX_TENANTS)]


def test_tenants_of_the_largest_configuration_and_of_another_after_it(keeper: DictKeeper) -> None:
    for generation in range(2):
        memory, kept = start(keeper, tenants=longest_names(generation))
        assert kept.why_cold == ("" if generation else "nothing_kept")
        if not generation:
            fill(memory, kept)
        end(memory, kept)


def test_more_names_of_tenants_than_the_journal_has_room_for(keeper: DictKeeper) -> None:
    whys = []
    for generation in range(10):
        memory, kept = start(keeper, tenants=longest_names(generation))
        assert kept.journal is not None
        whys.append(kept.why_cold)
        kept.journal.served()
        end(memory, kept)
    assert {why.partition(":")[0] for why in whys[1:]} == {"", "other_configuration"}
    assert "the tenants do not fit into the journal:" in max(whys[1:])


def test_the_memory_of_an_arena_that_is_not_used_is_freed_also_for_those_that_map_it(filled: DictKeeper) -> None:
    client = mmap.mmap(filled.held[ARENA], 0)
    watched = os.dup(filled.held[ARENA])
    assert os.fstat(watched).st_blocks
    cold(filled, chunk_size=512)
    assert os.fstat(watched).st_blocks == 0
    assert client[:4] == bytes(4)
    client.close()
    os.close(watched)


def test_a_keeper_that_has_ended(keeper: DictKeeper, caplog: pytest.LogCaptureFixture) -> None:
    keeper.full = True
    memory, kept = start(keeper)
    assert (kept.journal, kept.why_cold) == (None, "keeper_failed: [Errno 111] Connection refused")
    assert "L1 began empty, and the keeper will not keep it: keeper_failed: " in caplog.text
    memory.close()


def test_another_server_that_lives(filled: DictKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "LOCK_S", 0.05)
    memory, kept = start(filled)
    with pytest.raises(ArenaError, match="another server still uses the kept arena after"):
        start(filled)
    assert first(memory) == b"kept"
    end(memory, kept)


def test_a_memory_that_cannot_be_had(filled: DictKeeper) -> None:
    def refuse(kept: int | None) -> Memory:
        assert kept is not None
        os.close(kept)
        raise ArenaError("no memory", where="[l1]")

    with pytest.raises(ArenaError, match="no memory"):
        recover(filled, IDENTITY, [], refuse)
    memory, kept = start(filled)
    assert kept.found is not None
    end(memory, kept)


def test_what_is_not_to_be_kept_is_free_at_once(filled: DictKeeper) -> None:
    """Also of a client that maps it: the next arena may need the room."""
    watched = os.dup(filled.held[ARENA])
    with mmap.mmap(watched, CAPACITY) as client:
        free_recoverable(filled)
        assert not filled.held
        assert os.fstat(watched).st_blocks == 0
        assert client[:4] == bytes(4)
    os.close(watched)


def test_what_a_server_still_uses_is_left_to_it(filled: DictKeeper) -> None:
    memory, kept = start(filled)
    free_recoverable(filled)
    assert not filled.held
    assert first(memory) == b"kept"
    end(memory, kept)


def test_a_client_may_write_as_long_as_it_maps_what_it_got() -> None:
    arena = MemfdArena(CAPACITY)
    got = journals.description_for(arena.fd, 7)
    assert (journals.may_write(arena.fd, 7), journals.may_write(arena.fd, 8)) == (True, False)
    mapped = mmap.mmap(got, CAPACITY)
    os.close(got)
    assert journals.may_write(arena.fd, 7)
    again = journals.description_for(arena.fd, 7)
    mapped.close()
    assert journals.may_write(arena.fd, 7)
    os.close(again)
    assert not journals.may_write(arena.fd, 7)
    arena.close()


def test_the_lock_of_a_server_lasts_as_long_as_its_copiers_map_the_arena() -> None:
    arena = MemfdArena(CAPACITY)
    assert journals.lock_for_server(arena.fd)
    next_one = journals.own_description(arena.fd)
    copier = mmap.mmap(arena.fd, CAPACITY)
    arena.close()
    assert not journals.lock_for_server(next_one)
    copier.close()
    assert journals.lock_for_server(next_one)
    os.close(next_one)
