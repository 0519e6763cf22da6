"""What must be true of L1, said apart from the code: who has each unit of the arena, and what protects which object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvframework.api.keys import PackedKey
from kvframework.storage.l1.entries import ALIGNMENT, rounded

Item = tuple[PackedKey, int, int]


class Broken(BaseException):
    """Something that must be true is not. Passes through every `except Exception` of the code under test."""


def must(true: object, what: str) -> None:
    if not true:
        raise Broken(what)


@dataclass(eq=False)
class Writing:
    """A write lease as its holder sees it: it may write there until it has said COMMIT or ABORT, or is dead."""

    id: str
    owner: int
    request_id: str
    deadline: float
    items: list[Item]
    unwritten: list[Item]
    cancelled: bool = False


@dataclass(eq=False)
class Guard:
    """A pin: until its deadline or its end the objects stay. `broken` once one of them is gone."""

    id: str
    owner: int
    request_id: str
    deadline: float
    keys: list[PackedKey]
    broken: bool = False


@dataclass
class Model:
    units: list[object]
    clock: Callable[[], float]
    objects: dict[PackedKey, tuple[int, int]] = field(default_factory=dict)
    writings: dict[str, Writing] = field(default_factory=dict)
    guards: dict[str, Guard] = field(default_factory=dict)
    guarded: dict[PackedKey, list[Guard]] = field(default_factory=dict)

    def handed_out(self, writing: Writing) -> None:
        for key, offset, nbytes in writing.items:
            must(key not in self.objects, "an object that is here is written again")
            for unit in span(offset, nbytes):
                must(self.units[unit] is None, f"unit {unit} is handed out, and {self.units[unit]!r} has it")
                self.units[unit] = writing.id
        self.writings[writing.id] = writing

    def ended(self, writing: Writing, published: int) -> None:
        """COMMIT, ABORT, or the end of the owner."""
        del self.writings[writing.id]
        late = writing.cancelled or self.clock() >= writing.deadline
        must(not published or not late, "a lease that had expired was published")
        must(published in (0, len(writing.items)), "a lease was published in part")
        must(not published or not writing.unwritten, "what was never written was published")
        for key, offset, nbytes in writing.items:
            for unit in span(offset, nbytes):
                must(self.units[unit] == writing.id, f"{self.units[unit]!r} has unit {unit} of a lease")
                self.units[unit] = key if published else None
            if published:
                self.objects[key] = offset, nbytes

    def removed(self, key: PackedKey) -> None:
        """An object left L1."""
        offset, nbytes = self.objects.pop(key)
        for guard in self.guarded.get(key, ()):
            must(self.clock() >= guard.deadline, f"a pinned object was evicted (pin {guard.id} of {guard.owner})")
            guard.broken = True
        for unit in span(offset, nbytes):
            must(self.units[unit] == key, f"{self.units[unit]!r} has unit {unit} of an object")
            self.units[unit] = None

    def pinned(self, guard: Guard) -> None:
        self.guards[guard.id] = guard
        for key in guard.keys:
            must(key in self.objects, "what is not here was pinned")
            self.guarded.setdefault(key, []).append(guard)

    def unpinned(self, lease_id: str) -> Guard:
        must(lease_id in self.guards, "a pin went on after its end")
        guard = self.guards.pop(lease_id)
        for key in guard.keys:
            self.guarded[key].remove(guard)
        return guard

    def end_owner(self, owner: int) -> None:
        for writing in self.writings_of(owner):
            self.ended(writing, 0)
        for guard in self.guards_of(owner):
            self.unpinned(guard.id)

    def cancel(self, owner: int, request_id: str | None) -> None:
        for writing in self.writings_of(owner):
            if request_id in (None, writing.request_id):
                writing.cancelled = True
        for guard in self.guards_of(owner):
            if request_id in (None, guard.request_id):
                self.unpinned(guard.id)

    def writings_of(self, owner: int) -> list[Writing]:
        return [writing for writing in self.writings.values() if writing.owner == owner]

    def guards_of(self, owner: int) -> list[Guard]:
        return [guard for guard in self.guards.values() if guard.owner == owner]

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Every range that is taken, by objects and leases."""
        yield from self.objects.values()
        for writing in self.writings.values():
            yield from ((offset, nbytes) for _, offset, nbytes in writing.items)


def span(offset: int, nbytes: int) -> range:
    return range(offset // ALIGNMENT, (offset + rounded(nbytes)) // ALIGNMENT)


def total(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(rounded(nbytes) for _, nbytes in ranges)
