"""The tenant of a request, by its salt. Serving thread, and threads of plugins."""

from __future__ import annotations

from collections.abc import Sequence

from kvframework.config import TenantConfig, tenant_digest

# Salts whose tenant is remembered, of 1 KB at most; for others a digest is computed, 1 us.
_MOST_SALTS = 4096


class TenantNames:
    """`names` are those of the tenants by number: 0 are the requests of no tenant, ""."""

    def __init__(self, tenants: Sequence[TenantConfig] = ()) -> None:
        self.names = ("", *(tenant.name for tenant in tenants))
        self._digests = {digest: number for number, tenant in enumerate(tenants, 1) for digest in tenant.keys.salts}
        self._known: dict[str, int] = {}

    def number(self, cache_salt: str) -> int:
        """Return the number of the tenant whose salt this is."""
        if not self._digests or not cache_salt:
            return 0
        known = self._known.get(cache_salt)
        if known is None:
            known = self._digests.get(tenant_digest(cache_salt), 0)
            if len(self._known) >= _MOST_SALTS:
                self._known.clear()
            self._known[cache_salt] = known
        return known

    def name(self, cache_salt: str) -> str:
        return self.names[self.number(cache_salt)]
