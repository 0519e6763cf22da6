"""Who uses the cache: rows by model, tenant, namespace and engine, for the status document.

The numbers are counted in the accounts of L1, by the handlers that hold the facts, and added up for each document. A
LOOKUP costs 0.8 us.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvframework.api.keys import DIGEST_BYTES, CacheKey
from kvframework.api.requests import ClientInfo
from kvframework.service.accounts.finished import MAX_TEXT
from kvframework.service.accounts.hot_prefixes import HotPrefixes
from kvframework.service.keys import KeyGrid
from kvframework.service.tenant_names import TenantNames
from kvframework.storage.l1.entries import NO_NAMESPACE, Account
from kvframework.storage.manager import StorageManager

# Rows with a name of their own, of each kind.
MAX_ROWS = 64
OTHER = "other"
_FIELDS = ("bytes", "objects", "lookups", "asked_tokens", "hit_tokens", "stored_objects", "evicted_objects")


class Use:
    """`looked_up`, `begin_session` and `end_session` run on the serving thread, `status` on any."""

    def __init__(self, storage: StorageManager, tenants: TenantNames) -> None:
        self._storage = storage
        self._tenants = tenants
        self._hot = HotPrefixes(self._model_of)
        self._engines: dict[int, str] = {}

    def begin_session(self, client: ClientInfo) -> None:
        self._engines[client.session_id] = f"{client.name[:MAX_TEXT]} ({client.pid})"

    def end_session(self, client: ClientInfo) -> None:
        self._engines.pop(client.session_id, None)

    def engine(self, session_id: int) -> str:
        """Return the name of a session's client and its process."""
        return self._engines.get(session_id, OTHER)

    def looked_up(self, client: ClientInfo, key: CacheKey, grid: KeyGrid | None, asked: int, hit: int) -> None:
        """Count a lookup that has ended, of `asked` tokens of which `hit` were found; `grid` is None if its namespace
        is not known."""
        tenant, namespace = self._tenants.number(key.cache_salt), NO_NAMESPACE
        if grid is not None:
            namespace = key.namespace
            self._hot.looked_up(namespace + (key.digests[:DIGEST_BYTES] or grid.digests[0]), hit)
        self._storage.account(client.session_id, namespace, tenant).looked_up(asked, hit)

    def status(self) -> dict[str, object]:
        accounts = self._storage.accounts()
        names = self._tenants.names
        # Configured tenants have a row from the start.
        tenants = _rows(((names[key[2]] or OTHER, account) for key, account in accounts), [*names[1:], OTHER])
        return {
            "models": _rows((self._model_of(key[1]) or OTHER, account) for key, account in accounts),
            "tenants": tenants,
            "namespaces": _rows((key[1].hex() or OTHER, account) for key, account in accounts),
            "engines": _rows((self._engines.get(key[0], OTHER), account) for key, account in accounts),
            "hot_prefixes": self._hot.status(),
        }

    def _model_of(self, namespace: bytes) -> str:
        record = self._storage.records.get(namespace)
        return "" if record is None else record.model_name[:MAX_TEXT]


def _rows(accounts: Iterable[tuple[str, Account]], first: Sequence[str] = ()) -> dict[str, dict[str, int]]:
    """Return the sums by name: `MAX_ROWS` names, and all that is left as `OTHER`."""
    rows = {name: [0] * len(_FIELDS) for name in first}
    for name, account in accounts:
        row = rows.get(name)
        if row is None:
            if len(rows) - (OTHER in rows) >= MAX_ROWS:
                name = OTHER
            row = rows.setdefault(name, [0] * len(_FIELDS))
        amounts = (
            account.nbytes,
            account.objects,
            account.lookups,
            account.asked_tokens,
            account.hit_tokens,
            account.stored,
            account.evicted,
        )
        row[:] = map(sum, zip(row, amounts, strict=True))
    return {name: dict(zip(_FIELDS, row, strict=True)) for name, row in rows.items()}
