"""Names of content and of models, replaced by numbers that mean nothing outside of one trace."""

from __future__ import annotations

import hashlib
import secrets

from kvf_plan.trace.form import MAX_ID

DIGEST_BYTES = 32


class Anonymous:
    """The numbers of one trace. Chunk ids are 63 bits of BLAKE2b, keyed with 32 random bytes that are kept only here:
    without them a trace does not say whether it has a certain prompt, and two traces share no id. A model's number is
    its place in the order of appearance."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(32)
        self._models: dict[str, int] = {}

    def chunks(self, scope: bytes, digests: bytes) -> list[int]:
        """Return an id for each of the packed digests, of 32 bytes: equal ones have equal ids within a scope. About
        1 us each."""
        scoped = hashlib.blake2b(scope, digest_size=8, key=self._salt, person=b"kvf-trace")
        ids = []
        for at in range(0, len(digests), DIGEST_BYTES):
            each = scoped.copy()
            each.update(digests[at : at + DIGEST_BYTES])
            ids.append(int.from_bytes(each.digest(), "little") & MAX_ID)
        return ids

    def model(self, name: str) -> int:
        return self._models.setdefault(name, len(self._models))
