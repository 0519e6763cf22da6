"""The counts of the status document: who uses the cache, the hits of lookups, and what clients report."""

from __future__ import annotations

import hashlib
import heapq
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from kvframework.api.keys import NAMESPACE_BYTES
from kvframework.api.listener import RequestRecord
from kvframework.api.requests import ClientInfo
from kvframework.service.records import MAX_TEXT, RequestLog
from kvframework.storage.l1.entries import Account
from kvframework.storage.manager import StorageManager
from kvframework.text import visible
from kvframework.wire.messages import LOST_AMOUNTS, LOST_CALLS, MAX_LOST, MOST_LOST, Lost

# Prefixes that a cut keeps, and that are counted between two cuts: those make a cut's cost small for each.
ENTRIES, MOST = 256, 2048
SHOWN = 16
_SHOWN_BYTES = 4
_LOOKUP = 1 << 48


class HotPrefixes:
    """The prefixes that are asked for most, by their first chunk: a space-saving sketch. `model_of` names the model of
    a namespace. Thread-safe.

    Between two cuts it counts every prefix that it meets, exactly; a cut keeps those with a larger count than the
    `ENTRIES` largest have at least: this is the floor, as no prefix that is forgotten can have been asked for more
    often. A prefix that comes (again) starts there, and the floor is its error. So a count is never too small, and too
    large by the error at most.

    A prefix is shown as a keyed hash of its digest, of a secret of this start: it can be compared within a start, and
    says nothing of the tokens."""

    def __init__(self, model_of: Callable[[bytes], str]) -> None:
        self._model_of = model_of
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._floor = 0
        # By namespace and digest of the first chunk: lookups x `_LOOKUP` + the tokens that they found, one number since
        # that takes half the time of two.
        self._sums: dict[bytes, int] = {}
        # Of the prefixes that the last cut kept; that of all others is the floor.
        self._errors: dict[bytes, int] = {}

    def looked_up(self, prefix: bytes, hit_tokens: int) -> None:
        """Count a lookup; `prefix` is the namespace and the digest of the first chunk."""
        with self._lock:
            total = self._sums.get(prefix)
            if total is None:
                if len(self._sums) >= MOST:
                    self._cut()
                total = self._floor * _LOOKUP
            self._sums[prefix] = total + _LOOKUP + hit_tokens

    def _cut(self) -> None:
        floor = sorted(self._sums.values())[-ENTRIES - 1] // _LOOKUP
        least = (floor + 1) * _LOOKUP
        self._sums = {prefix: total for prefix, total in self._sums.items() if total >= least}
        self._errors = {prefix: self._errors.get(prefix, self._floor) for prefix in self._sums}
        self._floor = floor

    def status(self) -> list[dict[str, object]]:
        """Return the largest, `SHOWN` at most."""
        with self._lock:
            largest = heapq.nlargest(SHOWN, self._sums.items(), key=itemgetter(1))
            errors = [self._errors.get(prefix, self._floor) for prefix, _ in largest]
        return [
            {
                "model": self._model_of(prefix[:NAMESPACE_BYTES]),
                "prefix": hashlib.blake2b(prefix, digest_size=_SHOWN_BYTES, key=self._secret).hexdigest(),
                "hit_tokens": total % _LOOKUP,
                "count": total // _LOOKUP,
                "error": error,
            }
            for (prefix, total), error in zip(largest, errors, strict=True)
        ]


# Rows with a name of their own, of each kind.
MAX_ROWS = 64
OTHER = "other"
# The fields of a row, and those of an account.
_FIELDS = {
    "bytes": "nbytes",
    "objects": "objects",
    "lookups": "lookups",
    "asked_tokens": "asked_tokens",
    "hit_tokens": "hit_tokens",
    "stored_objects": "stored",
    "evicted_objects": "evicted",
}


class Use:
    """Who uses the cache: rows by model, tenant, namespace and engine, counted in the accounts of L1 and added up for
    each document. Hears the LOOKUPs among the records of `requests`. `begin_session` and `end_session` run on the
    serving thread, `status` on any."""

    def __init__(self, storage: StorageManager, requests: RequestLog) -> None:
        self._storage = storage
        self._tenants = requests.tenants.names
        self._tenant_numbers = {name: number for number, name in enumerate(self._tenants)}
        self._requests = requests
        requests.listeners.append(self.heard)
        self._hot = HotPrefixes(self._model_of)
        self._engines: dict[int, str] = {}

    def begin_session(self, client: ClientInfo) -> None:
        self._engines[client.session_id] = f"{client.name[:MAX_TEXT]} ({client.pid})"

    def end_session(self, session_id: int) -> None:
        self._engines.pop(session_id, None)

    def engine(self, session_id: int) -> str:
        return self._engines.get(session_id, OTHER)

    def heard(self, record: RequestRecord) -> None:
        if record.request != "LOOKUP":
            return
        subject, hit = record.subject, record.l1_tokens + record.l2_tokens
        namespace = record.prefix[:NAMESPACE_BYTES]
        if namespace:
            self._hot.looked_up(record.prefix, hit)
        tenant = self._tenant_numbers[subject.tenant]
        self._storage.table.account(subject.session_id, namespace, tenant).looked_up(subject.asked_tokens, hit)

    def status(self) -> dict[str, object]:
        self._requests.count()
        accounts = self._storage.table.accounts.items()
        names = self._tenants
        return {
            "models": _rows((self._model_of(key[1]) or OTHER, account) for key, account in accounts),
            # Configured tenants have a row from the start.
            "tenants": _rows(((names[key[2]] or OTHER, account) for key, account in accounts), [*names[1:], OTHER]),
            "namespaces": _rows((key[1].hex() or OTHER, account) for key, account in accounts),
            "engines": _rows((self._engines.get(key[0], OTHER), account) for key, account in accounts),
            "hot_prefixes": self._hot.status(),
        }

    def _model_of(self, namespace: bytes) -> str:
        return self._storage.records.model_of(namespace)[:MAX_TEXT]


def _rows(accounts: Iterable[tuple[str, Account]], first: Sequence[str] = ()) -> dict[str, dict[str, int]]:
    """Return the sums by name: `MAX_ROWS` names, and all that is left as `OTHER`."""
    rows = {name: dict.fromkeys(_FIELDS, 0) for name in first}
    for name, account in accounts:
        if name not in rows and len(rows) - (OTHER in rows) >= MAX_ROWS:
            name = OTHER
        row = rows.setdefault(name, dict.fromkeys(_FIELDS, 0))
        for shown, counted in _FIELDS.items():
            row[shown] += getattr(account, counted)
    return rows


# Models with counters of their own: their names come from clients.
MAX_MODELS = 64
OTHER_MODELS = "other"


class LookupCounts:
    """Counts of the LOOKUPs among the records of `requests`, by model and by reason of a miss; `reasons` are all that a
    miss can have. `model_of` names the model of a namespace."""

    def __init__(self, reasons: tuple[str, ...], requests: RequestLog, model_of: Callable[[bytes], str]) -> None:
        self.hit_tokens = self.unknown_namespace = 0
        self._models: dict[str, dict[str, int]] = {}
        self._misses = Counter(dict.fromkeys(reasons, 0))
        self._model_of = model_of
        self._requests = requests
        requests.listeners.append(self.heard)

    def heard(self, record: RequestRecord) -> None:
        """Count a lookup that has ended. A name of a model that is not registered gets no counters of its own."""
        if record.request != "LOOKUP":
            return
        model = self._model_of(record.prefix[:NAMESPACE_BYTES]) if record.prefix else record.subject.model
        counts = self._models.get(model)
        if counts is None:
            if not record.prefix or len(self._models) >= MAX_MODELS:
                model = OTHER_MODELS
            new = {"lookups": 0, "asked_tokens": 0, "l1_tokens": 0, "l2_tokens": 0}
            counts = self._models.setdefault(model, new)
        counts["lookups"] += 1
        counts["asked_tokens"] += record.subject.asked_tokens
        counts["l1_tokens"] += record.l1_tokens
        counts["l2_tokens"] += record.l2_tokens
        self.hit_tokens += record.l1_tokens + record.l2_tokens
        if record.why.reason:
            self._misses[record.why.reason] += 1
            self.unknown_namespace += not record.prefix

    def status(self) -> dict[str, Any]:
        self._requests.count()
        return {
            "hit_tokens": self.hit_tokens,
            "unknown_namespace": self.unknown_namespace,
            # `list` in one step: another thread may add a model meanwhile.
            "by_model": {model: dict(counts) for model, counts in list(self._models.items())},
            "misses": dict(self._misses),
        }


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
