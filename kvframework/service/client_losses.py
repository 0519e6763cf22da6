"""Losses reported by clients: sums since the start, and each client's recent ones, including clients that have ended.

A report affects only its own session, within the bounds of `wire.messages.Lost`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvframework.api.requests import ClientInfo
from kvframework.text import visible
from kvframework.wire.messages import LOST_AMOUNTS, LOST_CALLS, MAX_LOST, MOST_LOST, Lost

# A loss is recent for this long; losses with shorter pauses between them are shown as one.
RECENT_S = 60.0
MAX_RECENT = 64


@dataclass
class _Recent:
    """Losses of one session since its last pause; the time is on the clock."""

    client: str
    pid: int
    last: float
    amounts: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)


class ClientLosses:
    """`heard` and `end_session` run on the serving thread, `status` on any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: dict[int, dict[str, Lost]] = {}
        self._totals: Counter[str] = Counter(dict.fromkeys(LOST_AMOUNTS, 0))
        self._recent: dict[int, _Recent] = {}

    def heard(self, client: ClientInfo, lost: Sequence[Lost]) -> None:
        """Take all losses of this session so far: only the growth of each counts, and a decrease is ignored."""
        if not lost:
            return
        before = self._heard.setdefault(client.session_id, {})
        amounts: Counter[str] = Counter()
        codes: Counter[str] = Counter()
        for each in lost:
            known = before.get(each.code)
            if known is None and len(before) >= MAX_LOST:
                continue
            known = known or Lost(each.code)
            grown = {name: max(getattr(each, name) - getattr(known, name), 0) for name in LOST_AMOUNTS}
            before[each.code] = Lost(each.code, **{name: getattr(known, name) + grown[name] for name in LOST_AMOUNTS})
            amounts.update(grown)
            codes[visible(each.code)] += sum(grown[name] for name in LOST_CALLS)
        if any(codes.values()):
            self._add(client, amounts, codes)

    def end_session(self, session_id: int) -> None:
        """Forget a session; its losses stay in the sums, and its id never recurs."""
        self._heard.pop(session_id, None)

    def status(self) -> dict[str, Any]:
        """Return the losses for the status document, the latest client first."""
        with self._lock:
            self._forget()
            now = self._clock()
            return {
                **{_shown(name): self._totals[name] for name in LOST_AMOUNTS},
                "recent": [
                    {
                        "session_id": session_id,
                        "client": each.client,
                        "pid": each.pid,
                        **{_shown(name): each.amounts[name] for name in LOST_AMOUNTS},
                        "codes": {code: calls for code, calls in each.codes.items() if calls},
                        "ago_s": round(now - each.last, 1),
                    }
                    for session_id, each in reversed(self._recent.items())
                ],
            }

    def _add(self, client: ClientInfo, amounts: Counter[str], codes: Counter[str]) -> None:
        with self._lock:
            self._forget()
            recent = self._recent.pop(client.session_id, None)
            if recent is None and len(self._recent) >= MAX_RECENT:
                del self._recent[next(iter(self._recent))]
            recent = self._recent[client.session_id] = recent or _Recent(client.name, client.pid, 0.0)
            recent.last = self._clock()
            for sums, added in ((self._totals, amounts), (recent.amounts, amounts), (recent.codes, codes)):
                for name, amount in added.items():
                    sums[name] = min(sums[name] + amount, MOST_LOST)

    def _forget(self) -> None:
        oldest = self._clock() - RECENT_S
        for session_id in [session_id for session_id, each in self._recent.items() if each.last < oldest]:
            del self._recent[session_id]


def _shown(name: str) -> str:
    return "bytes" if name == "nbytes" else name
