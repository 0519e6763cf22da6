"""The bytes of L1 that each client session keeps from eviction: the objects that it pins, each once however often it is
pinned, and the ranges that it has reserved. Pure; the storage lock serialises calls.

The bound on them applies only while another session needs room. Invariants, tested against a model:

* `held` is what the open leases of a session say, in whole ranges of the arena; `over` are those above `most`.
* Pins of the server itself, of session 0, count for none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from kvframework.storage.l1.allocator import rounded
from kvframework.storage.l1.leases import StoredObject

# For how long after a session found L1 full the bound applies to the others.
NEEDED_S = 30.0
# Of an object that several sessions pin.
SEVERAL = -1


class PinShares:
    """See the module. `most` is the bound of each session, in bytes; `cuts` counts, by session, the leases that it
    ended early or refused, `all_cuts` those of all sessions since the start."""

    def __init__(self) -> None:
        self.most = math.inf
        self.held: dict[int, int] = {}
        self.over: set[int] = set()
        self.cuts: Counter[int] = Counter()
        self.all_cuts = 0
        # Of each object that several sessions pin, the pins of each.
        self._several: dict[StoredObject, Counter[int]] = {}
        # The sessions in whose place another one counts.
        self._for: dict[int, int] = {}
        # The latest needs of two sessions: who, and when.
        self._needs: list[tuple[int, float]] = []

    def configure(self, most: float) -> None:
        """Change the bound."""
        self.most = most
        self.over = {payer for payer, nbytes in self.held.items() if nbytes > most}

    def payer(self, session: int) -> int:
        """Return the session for which a lease of this one counts."""
        return self._for.get(session, session)

    def work_for(self, session: int, payer: int) -> None:
        """Let the leases of a session count for another one of its engine, from the next lease on. What the session has
        needed until now, that engine has."""
        if session != payer:
            self._for[session] = payer
            since = dict(reversed(self._needs))
            if session in since:
                since[payer] = max(since.pop(session), since.get(payer, -math.inf))
                self._needs = sorted(since.items(), key=lambda need: -need[1])

    def end_session(self, session: int) -> None:
        """Forget a session, whose leases have ended."""
        self._needs = [each for each in self._needs if each[0] != session]
        self._for.pop(session, None)
        for worker in [worker for worker, payer in self._for.items() if payer == session]:
            del self._for[worker]
        self.cuts.pop(session, None)

    def pin(self, objects: Sequence[StoredObject], payer: int) -> None:
        """Pin each object once more."""
        if not payer:
            for stored in objects:
                stored.pins += 1
                stored.holds += 1
            return
        of = length = nbytes = 0
        for stored in objects:
            stored.pins += 1
            before = stored.payer
            if before == payer or (before and not self._is_new(stored, payer)):
                continue
            if not before:
                stored.payer = payer
            if stored.length != of:
                of, length = stored.length, rounded(stored.length)
            nbytes += length
        self.add(payer, nbytes)

    def unpin(self, objects: Sequence[StoredObject], payer: int) -> None:
        """End one pin of each object, of the session that it counts for."""
        if not payer:
            for stored in objects:
                stored.pins -= 1
                stored.holds -= 1
            return
        of = length = nbytes = 0
        for stored in objects:
            pins = stored.pins = stored.pins - 1
            if stored.payer != payer:
                if not self._was_last(stored, payer):
                    continue
            elif pins == stored.holds:
                stored.payer = 0
            else:
                continue
            if stored.length != of:
                of, length = stored.length, rounded(stored.length)
            nbytes += length
        self.add(payer, -nbytes)

    def add(self, payer: int, nbytes: int) -> None:
        """Add bytes to what a session holds, or take them away."""
        if not payer or not nbytes:
            return
        held = self.held.get(payer, 0) + nbytes
        if held:
            self.held[payer] = held
        else:
            del self.held[payer]
        if held > self.most:
            self.over.add(payer)
        else:
            self.over.discard(payer)

    def room(self, payer: int) -> float:
        """Return the bytes that a session may hold beyond what it holds."""
        return max(self.most - self.held.get(payer, 0), 0)

    def cut(self, payer: int) -> None:
        """Count a lease that ended early or was refused."""
        self.cuts[payer] += 1
        self.all_cuts += 1

    def need(self, payer: int, now: float) -> None:
        """Record that a session found L1 full."""
        if not self._needs or self._needs[0][0] != payer:
            self._needs = [(payer, now), *self._needs[:1]]
        else:
            self._needs[0] = payer, now

    def is_bound(self, payer: int, now: float) -> bool:
        """Whether another session needs room."""
        return payer != 0 and any(who != payer and now < since + NEEDED_S for who, since in self._needs)

    def _is_new(self, stored: StoredObject, payer: int) -> bool:
        """Add a pin on an object that another session pins; return whether it is the first of this one."""
        pins = self._several.get(stored)
        if pins is None:
            pins = self._several[stored] = Counter({stored.payer: stored.pins - stored.holds - 1})
            stored.payer = SEVERAL
        pins[payer] += 1
        return pins[payer] == 1

    def _was_last(self, stored: StoredObject, payer: int) -> bool:
        """End a pin on an object that several sessions pin; return whether it was the last one of this session."""
        pins = self._several[stored]
        pins[payer] -= 1
        if pins[payer]:
            return False
        del pins[payer]
        if len(pins) == 1:
            (stored.payer,) = pins
            del self._several[stored]
        return True
