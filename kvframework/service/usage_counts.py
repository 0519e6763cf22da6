"""The counts of the status document: who uses the cache, the hits of lookups, and what clients report."""

from __future__ import annotations

import hashlib
import heapq
import math
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from kvframework.api.keys import NAMESPACE_BYTES
from kvframework.api.listener import RequestRecord
from kvframework.api.requests import ClientInfo
from kvframework.service.records import MAX_TEXT, RequestLog
from kvframework.status import REASONS
from kvframework.storage.l1.entries import Account
from kvframework.storage.manager import StorageManager
from kvframework.text import visible
from kvframework.wire.messages import LOST_AMOUNTS, LOST_CALLS, MAX_LOST, MOST_LOST, Lost

# Prefixes that a cut keeps, and that are counted between two cuts: those make a cut's cost small for each.
ENTRIES, MOST = 256, 2048
HOUR_S, MINUTE_S = 3600, 60
SHOWN = 16
_SHOWN_BYTES = 4


class HotPrefixes:
    """The prefixes that are asked for most, by their first chunk: a space-saving sketch. `model_of` names the model of
    a namespace. One thread counts, any may ask for the `status`.

    Between two cuts it counts every prefix exactly; a cut keeps those with a larger count than the `ENTRIES` largest
    have at least: this is the floor, as no prefix that is forgotten can have been asked for more often. A prefix that
    comes (again) starts there, and the floor is its error. No count is too small, or too large by more.

    A prefix is shown as a hash of its digest, keyed for this start, which says nothing of the tokens."""

    def __init__(self, model_of: Callable[[bytes], str]) -> None:
        self._model_of = model_of
        self._secret = secrets.token_bytes(32)
        self.floor = 0
        # By namespace and digest of the first chunk: lookups, the error of that, and the tokens that they found.
        self.rows: dict[bytes, list[int]] = {}

    def looked_up(self, prefix: bytes, hit_tokens: int) -> None:
        """Count a lookup; `prefix` is the namespace and the digest of the first chunk."""
        row = self.rows.get(prefix)
        if row is None:
            if len(self.rows) >= MOST:
                self.floor = sorted([row[0] for row in self.rows.values()])[-ENTRIES - 1]
                self.rows = {prefix: row for prefix, row in self.rows.items() if row[0] > self.floor}
            row = self.rows[prefix] = [self.floor, self.floor, 0]
        row[0] += 1
        row[2] += hit_tokens

    def status(self) -> list[dict[str, object]]:
        # `list` in one step: another thread may add a prefix meanwhile.
        largest = heapq.nlargest(SHOWN, list(self.rows.items()), key=itemgetter(1))
        return [
            {
                "model": self._model_of(prefix[:NAMESPACE_BYTES]),
                "prefix": hashlib.blake2b(prefix, digest_size=_SHOWN_BYTES, key=self._secret).hexdigest(),
                "hit_tokens": hit_tokens,
                "count": count,
                "error": error,
            }
            for prefix, (count, error, hit_tokens) in largest
        ]


class LastHour:
    """The growth of totals in the last hour, to a minute: their values before the first lookup of each minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._before: deque[tuple[float, dict[str, float]]] = deque(maxlen=HOUR_S // MINUTE_S + 1)
        self._next_at = -math.inf

    def lookup(self, now: float, totals: Callable[[], dict[str, float]]) -> None:
        if now >= self._next_at:
            self._next_at = now + MINUTE_S
            self._before.append((now, totals()))

    def status(self, totals: dict[str, float]) -> dict[str, float]:
        since = self._clock() - HOUR_S
        before = next((each for at, each in list(self._before) if at >= since), totals)
        return {name: total - before[name] for name, total in totals.items()}


# Rows with a name of their own, of each kind: names come from clients.
MAX_ROWS = 64
OTHER = "other"
# The fields of rows, and those of an account.
_USE = {
    "bytes": "nbytes",
    "objects": "objects",
    "lookups": "lookups",
    "asked_tokens": "asked_tokens",
    "hit_tokens": "hit_tokens",
    "stored_objects": "stored",
    "evicted_objects": "evicted",
    "prefill_saved_s": "saved_s",
    "limited": "limited",
}
_LOOKUPS = {name: name for name in ("lookups", "asked_tokens", "l1_tokens", "l2_tokens")}


class Use:
    """Who uses the cache, and what lookups found: rows by model, tenant, namespace and engine, counted in the accounts
    of L1 and added up for each document. Hears the LOOKUPs among the records of `requests`. `begin_session` and
    `end_session` run on the serving thread, `status` and `lookups` on any."""

    def __init__(self, storage: StorageManager, requests: RequestLog) -> None:
        self._storage = storage
        self._tenants = requests.tenants.names
        self._tenant_numbers = {name: number for number, name in enumerate(self._tenants)}
        self._requests = requests
        requests.listeners.append(self.heard)
        self._hot = HotPrefixes(self._model_of)
        self._engines: dict[int, str] = {}
        self.hit_tokens = self._unknown = 0
        self.saved_s = 0.0
        self._misses = Counter(dict.fromkeys(REASONS, 0))

    def begin_session(self, client: ClientInfo) -> None:
        self._engines[client.session_id] = f"{client.name[:MAX_TEXT]} ({client.pid})"

    def end_session(self, session_id: int) -> None:
        self._engines.pop(session_id, None)

    def heard(self, record: RequestRecord) -> None:
        if record.reason == "bandwidth":  # also of a RETRIEVE
            self._account(record, record.prefix[:NAMESPACE_BYTES]).limited += 1
        if record.request != "LOOKUP":
            return
        hit, namespace = record.l1_tokens + record.l2_tokens, record.prefix[:NAMESPACE_BYTES]
        self.hit_tokens += hit
        self.saved_s += record.saved_s
        if record.reason:
            self._misses[record.reason] += 1
            self._unknown += not namespace
        if namespace:
            self._hot.looked_up(record.prefix, hit)
        account = self._account(record, namespace)
        account.looked_up(record.asked_tokens, record.l1_tokens, record.l2_tokens, record.saved_s)

    def _account(self, record: RequestRecord, namespace: bytes) -> Account:
        return self._storage.table.account(record.session_id, namespace, self._tenant_numbers[record.tenant])

    def lookups(self) -> dict[str, object]:
        """Return what the lookups that have ended found, for the status document."""
        self._requests.count()
        accounts = self._storage.table.accounts.items()
        models = ((self._model_of(key[1]) or OTHER, account) for key, account in accounts if account.lookups)
        return {"unknown_namespace": self._unknown, "by_model": _rows(models, _LOOKUPS), "misses": dict(self._misses)}

    def status(self) -> dict[str, object]:
        self._requests.count()
        accounts = self._storage.table.accounts.items()
        names = self._tenants
        return {
            "models": _rows(((self._model_of(key[1]) or OTHER, account) for key, account in accounts)),
            # Configured tenants have a row from the start.
            "tenants": _rows(
                ((names[key[2]] or OTHER, account) for key, account in accounts), first=[*names[1:], OTHER]
            ),
            "namespaces": _rows(((key[1].hex() or OTHER, account) for key, account in accounts)),
            "engines": _rows(((self._engines.get(key[0], OTHER), account) for key, account in accounts)),
            "hot_prefixes": self._hot.status(),
        }

    def _model_of(self, namespace: bytes) -> str:
        return self._storage.records.model_of(namespace)[:MAX_TEXT]


def _rows(
    accounts: Iterable[tuple[str, Account]], fields: Mapping[str, str] = _USE, first: Sequence[str] = ()
) -> dict[str, dict[str, float]]:
    """Return the sums by name: `MAX_ROWS` names, and all that is left as `OTHER`."""
    rows: dict[str, dict[str, float]] = {name: dict.fromkeys(fields, 0) for name in first}
    for name, account in accounts:
        if name not in rows and len(rows) - (OTHER in rows) >= MAX_ROWS:
            name = OTHER
        row = rows.setdefault(name, dict.fromkeys(fields, 0))
        for shown, counted in fields.items():
            row[shown] += getattr(account, counted)
    return rows


# A loss is recent for this long; losses with shorter pauses between them are shown as one.
RECENT_S = 60.0
MAX_RECENT = 64


@dataclass
class _Recent:
    """Losses of one session since its last pause; the time is on the clock."""

    client: ClientInfo
    last: float
    amounts: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)


class ClientLosses:
    """Losses reported by clients: sums since the start, and each client's recent ones, including clients that have
    ended. A report affects only its own session, within the bounds of `wire.messages.Lost`. `heard` and `end_session`
    run on the serving thread, `status` on any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: dict[int, dict[str, dict[str, int]]] = {}
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
            if each.code not in before and len(before) >= MAX_LOST:
                continue
            known = before.setdefault(each.code, dict.fromkeys(LOST_AMOUNTS, 0))
            for name in LOST_AMOUNTS:
                grown = max(getattr(each, name) - known[name], 0)
                known[name] += grown
                amounts[name] += grown
                if name in LOST_CALLS:
                    codes[visible(each.code)] += grown
        if any(codes.values()):
            self._add(client, amounts, codes)

    def end_session(self, session_id: int) -> None:
        """Forget a session; its losses stay in the sums, and its id never recurs."""
        self._heard.pop(session_id, None)

    def status(self) -> dict[str, Any]:
        with self._lock:
            self._forget()
            now = self._clock()
            return {
                **{_shown(name): self._totals[name] for name in LOST_AMOUNTS},
                "recent": [
                    {
                        "session_id": session_id,
                        "client": each.client.name,
                        "pid": each.client.pid,
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
            recent = self._recent[client.session_id] = recent or _Recent(client, 0.0)
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
