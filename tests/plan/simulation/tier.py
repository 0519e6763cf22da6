"""A simulated L2 tier: found, missing, failed, damaged, slow, down, full, read-only, or wrong in its answers. Notes
what it told, for the checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from kvframework.api.tier import Outcome, PackedKey, Tier, TierEntry, TierUsage
from kvframework.errors import TierError
from kvframework.storage.namespaces import HEADER_BYTES
from tests.plan.simulation.dice import Dice
from tests.plan.simulation.jobs import Turns
from tests.plan.simulation.model import must
from tests.plan.simulation.prompts import CONTENT

R = TypeVar("R", bound="int | Outcome")
MODES = ("down", "late", "full", "read-only", "flaky", "raises", "miscounts")


class TierBug(ValueError):
    """What a tier raises that is wrong: the log tells it with its traceback."""


class SimTier(Tier):
    """`values` outlive a restart of the server. `dice` is the running action's."""

    def __init__(self, number: int, capacity: int | None, clock: Callable[[], float], turns: Turns) -> None:
        self.name = f"tier{number}"
        self._has = frozenset({"scan", "usage"} if capacity else {"touch"})
        self.values: dict[PackedKey, bytes] = {}
        self.used_at: dict[PackedKey, float] = {}
        self.mode = "well"
        self.dice = Dice(0)
        # How often each was told to be damaged, or listed: nothing else may be deleted.
        self.may_delete: Counter[PackedKey] = Counter()
        self.spoilt: set[PackedKey] = set()
        # What it has lost, as other nodes may have it; and what one of them wrote, with the first time after that at
        # which no call was under way.
        self.elsewhere: dict[PackedKey, bytes] = {}
        self.from_others: dict[PackedKey, float | None] = {}
        self.told: Counter[str] = Counter()
        self.clearing = False
        self.closed = False
        self._capacity = capacity or 0
        self._clock = clock
        for name in ("contains", "get_into", "put", "delete", "touch", "ping", "usage", "scan"):
            setattr(self, name, partial(turns.step, f"{name} of {self.name}", getattr(self, name)))

    def capabilities(self) -> frozenset[str]:
        return self._has

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        self._begin(deadline)
        outcomes = self._end([self._flaky() or self._here(key) for key in keys])
        if len(outcomes) == len(keys):
            self.told["missing"] += outcomes.count(Outcome.MISSING)
        return outcomes

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        self._begin(deadline)
        outcomes: list[int | Outcome] = []
        for key, each in zip(keys, parts, strict=True):
            outcome: int | Outcome = self._flaky() or self._here(key)
            if outcome is Outcome.FOUND:
                value = self.values[key]
                outcome = len(value)
                if key in self.spoilt:
                    self.may_delete[key] += 1
                for part in each:
                    part[: len(value)], value = value[: part.nbytes], value[part.nbytes :]
            elif self.dice.chance(50):
                each[-1][:8] = b"anything"
            outcomes.append(outcome)
        outcomes = self._end(outcomes)
        if len(outcomes) == len(keys):
            self.told["missing"] += outcomes.count(Outcome.MISSING)
            self.told["failed"] += outcomes.count(Outcome.FAILED)
        return outcomes

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        self._begin(deadline)
        if self.mode == "read-only":
            raise TierError("read-only")
        outcomes = []
        for key, each in zip(keys, parts, strict=True):
            value = b"".join(each)
            must(key not in CONTENT or value[HEADER_BYTES:] == CONTENT[key], "wrong bytes were written to a tier")
            if (self.mode == "full" and self.dice.chance(80)) or self._flaky():
                outcomes.append(Outcome.FAILED)
                continue
            self.values[key] = value
            self.used_at[key] = self._clock()
            self.spoilt.discard(key)
            self.from_others.pop(key, None)
            self.told["records"] += key not in CONTENT
            outcomes.append(Outcome.STORED)
        return self._end(outcomes)

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        self._begin(deadline)
        for key in keys:
            must(self.clearing or self.may_delete[key] > 0, "a good value was deleted in a tier")
            self.may_delete[key] -= not self.clearing
        return self._end([self._dropped(key) for key in keys])

    def touch(self, keys: Sequence[PackedKey], *, deadline: float) -> None:
        self._begin(deadline)
        self.used_at.update((key, self._clock()) for key in keys if key in self.values)
        self._end([])

    def ping(self, *, deadline: float) -> None:
        self._begin(deadline)
        self._end([])

    def usage(self, *, deadline: float) -> TierUsage:
        self._begin(deadline)
        return TierUsage(sum(map(len, self.values.values())), self._capacity)

    def scan(self, *, deadline: float) -> Iterator[TierEntry]:
        self._begin(deadline)
        self.may_delete.update(list(self.values))
        return iter([TierEntry(key, len(value), self.used_at[key]) for key, value in self.values.items()])

    def close(self) -> None:
        self.closed = True

    def lose(self, key: PackedKey) -> None:
        """It is forgotten there, or another node deleted it."""
        if key in CONTENT and key not in self.spoilt:
            self.elsewhere[key] = self.values[key]
        self._dropped(key)

    def regain(self, key: PackedKey) -> None:
        """Another node writes it."""
        self.values[key] = self.elsewhere.pop(key)
        self.used_at[key] = self._clock()
        self.spoilt.discard(key)
        self.from_others[key] = None

    def spoil(self, key: PackedKey, at: int) -> None:
        value = self.values[key]
        at %= len(value)
        self.values[key] = value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]
        self.spoilt.add(key)

    def _here(self, key: PackedKey) -> Outcome:
        if key not in self.values:
            return Outcome.MISSING
        if key in self.spoilt and self.dice.chance(30):
            self.may_delete[key] += 1
            return Outcome.DAMAGED
        return Outcome.FOUND

    def _flaky(self) -> Outcome | None:
        return Outcome.FAILED if self.mode == "flaky" and self.dice.chance(40) else None

    def _dropped(self, key: PackedKey) -> Outcome:
        self.used_at.pop(key, None)
        self.from_others.pop(key, None)
        return Outcome.MISSING if self.values.pop(key, None) is None else Outcome.DELETED

    def _begin(self, deadline: float) -> None:
        if self.closed or self.mode == "down" or self._clock() > deadline:
            raise TierError("closed, down, or too late")
        if self.mode == "raises":
            raise TierBug("a bug of the tier")

    def _end(self, outcomes: list[R]) -> list[R]:
        """What was done is done; the answer may not come."""
        if self.mode == "late" and self.dice.chance(70):
            raise TierError("too late")
        return outcomes[1:] if self.mode == "miscounts" and self.dice.chance(50) else outcomes
