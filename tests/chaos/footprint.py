"""Owns what a process takes of the machine."""

from __future__ import annotations

from tests.support.processes import descriptors, own_bytes

# Connections of the tiers come and go; what leaks with every client or request is more than this.
SPARE_DESCRIPTORS = 24
SPARE_BYTES = 48 << 20


class Footprint:
    """Of a process: its descriptors, and the memory that is its own (the arena is shared)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.descriptors = len(descriptors(pid))
        self.bytes = own_bytes(pid)

    def check_flat(self, warm: Footprint, *, descriptors: int) -> None:
        """`warm` is of the same process, some time ago; `descriptors` those of a server that nobody used yet."""
        grown = self.bytes - warm.bytes
        assert grown < SPARE_BYTES, f"the server grew by {grown >> 20} MiB from {warm.bytes >> 20} MiB"
        more = self.descriptors - descriptors
        assert more < SPARE_DESCRIPTORS, f"the server has {self.descriptors} descriptors, {more} more than at its start"
