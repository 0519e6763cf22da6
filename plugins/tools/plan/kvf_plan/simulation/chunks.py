"""The chunks of a trace as digests of the server's chunks, which may be of another size. Pure."""

from __future__ import annotations

from kvf_plan.errors import SimulationError
from kvf_plan.trace.form import Request
from kvframework.api.keys import DIGEST_BYTES


class Chunks:
    """Server's chunks of `ours` tokens, of a trace whose chunks have `theirs`. Several of its chunks make one of ours,
    or one of its makes several: parts of one chunk are found together or not at all, as far as the trace tells.

    `whole`: the last chunk counts only if the prompt fills it. Raises `SimulationError` if neither size divides the
    other.
    """

    def __init__(self, ours: int, theirs: int, *, whole: bool) -> None:
        if ours % theirs and theirs % ours:
            raise SimulationError(
                f"the trace has chunks of {theirs} tokens, the simulated server chunks of {ours}",
                where="[server] chunk_size",
                available=f"multiples and divisors of {theirs}",
                hint=f"simulate chunks as in the trace: --set server.chunk_size={theirs}",
            )
        self.tokens = ours
        self._whole = whole
        self._merged = max(ours // theirs, 1)
        self._parts = max(theirs // ours, 1)

    def digests(self, prompt: Request) -> list[bytes]:
        """Return the digests of a prompt's chunks, in order."""
        ids, merged, parts = prompt.chunks, self._merged, self._parts
        if self._whole:
            end = prompt.tokens // self.tokens
        elif merged == parts:
            end = len(ids)
        else:
            end = -(-min(prompt.tokens, len(ids) * self.tokens * parts // merged) // self.tokens)
        if merged > 1:
            # A chunk's id stands for all before it, too.
            return [ids[min((n + 1) * merged, len(ids)) - 1].to_bytes(DIGEST_BYTES, "big") for n in range(end)]
        if parts > 1:
            return [(ids[n // parts] * parts + n % parts).to_bytes(DIGEST_BYTES, "big") for n in range(end)]
        return [each.to_bytes(DIGEST_BYTES, "big") for each in ids[:end]]
