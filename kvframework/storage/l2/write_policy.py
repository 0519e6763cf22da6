"""The write policies: which objects go to an L2 tier, and when. Pure: no I/O, no lock, no clock.

The writer of one tier reports every event to its policy and queues the keys that the policy returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvframework.api.keys import PackedKey

# Keys that left L1 after one use, remembered so that another store counts as the second use.
MAX_GHOSTS = 1 << 14


class WritePolicy(ABC):
    """Base class of the policies. Every method returns the keys to write now."""

    name: str
    # False if only `committed` and `promoted` matter to the policy: `leaving`, `removed` and `written`
    # are not called then.
    watches_l1 = True

    @abstractmethod
    def committed(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        """Objects that an engine stored."""

    @abstractmethod
    def promoted(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        """Objects that were loaded from a later tier."""

    def used(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        """Objects of L1 that were looked up, read, or stored again."""
        return ()

    def leaving(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        """Objects that L1 is about to evict; it keeps the returned ones until they are written."""
        return ()

    def written(self, keys: Iterable[PackedKey]) -> None:
        """Objects whose writing is over: stored, or given up."""
        return

    def removed(self, key: PackedKey) -> bool:
        """An object has left L1; returns True if it was still to be written."""
        return False


class WriteThrough(WritePolicy):
    """Every object, as soon as it is committed: `write_through`."""

    name = "write_through"
    watches_l1 = False

    def committed(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        return keys

    def promoted(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        return keys


class WriteThroughSelective(WritePolicy):
    """An object at its second use: `write_through_selective`. An object used only once costs the tier nothing."""

    name = "write_through_selective"

    def __init__(self) -> None:
        self._once: set[PackedKey] = set()
        self._ghosts: OrderedDict[PackedKey, None] = OrderedDict()

    def committed(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        again = [key for key in keys if key in self._ghosts]
        for key in again:
            del self._ghosts[key]
        self._once.update(set(keys).difference(again))
        return again

    def promoted(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        return keys

    def used(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        again = [key for key in keys if key in self._once]
        self._once.difference_update(again)
        return again

    def removed(self, key: PackedKey) -> bool:
        if key in self._once:
            self._once.discard(key)
            self._ghosts[key] = None
            if len(self._ghosts) > MAX_GHOSTS:
                self._ghosts.popitem(last=False)
        return False


class WriteBack(WritePolicy):
    """An object at its eviction from L1: `write_back`. The tier holds objects that L1 does not."""

    name = "write_back"

    def __init__(self) -> None:
        self._unwritten: set[PackedKey] = set()

    def committed(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        self._unwritten.update(keys)
        return ()

    promoted = committed

    def leaving(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        return [key for key in keys if key in self._unwritten]

    def written(self, keys: Iterable[PackedKey]) -> None:
        self._unwritten.difference_update(keys)

    def removed(self, key: PackedKey) -> bool:
        lost = key in self._unwritten
        self._unwritten.discard(key)
        return lost


class WriteNothing(WritePolicy):
    """No object: for tiers that are read only."""

    name = "none"
    watches_l1 = False

    def committed(self, keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
        return ()

    promoted = committed


WRITE_POLICIES: dict[str, type[WritePolicy]] = {
    policy.name: policy for policy in (WriteThrough, WriteThroughSelective, WriteBack)
}
