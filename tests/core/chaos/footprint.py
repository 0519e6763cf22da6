"""The descriptors and the memory of a process."""

from __future__ import annotations

import re

from tests.support.processes import descriptors, own_bytes

# Connections of the tiers open and close; a leak with every client or request exceeds this.
SPARE_DESCRIPTORS = 24
SPARE_BYTES = 48 << 20


class Footprint:
    """The descriptors of a process, and its private memory (the arena is shared)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        open_files = descriptors(pid).values()
        # The filesystem tier keeps one of each of its 256 folders.
        folders = {file for file in open_files if re.search("/[0-9a-f]{2}$", file)}
        self.descriptors = len(open_files) - len(folders)
        self.bytes = own_bytes(pid)

    def check_flat(self, warm: Footprint, *, descriptors: int) -> None:
        """Compare with `warm`, an earlier footprint of the same process, and with `descriptors`, the number in an
        unused server."""
        grown = self.bytes - warm.bytes
        assert grown < SPARE_BYTES, f"the server grew by {grown >> 20} MiB from {warm.bytes >> 20} MiB"
        more = self.descriptors - descriptors
        assert more < SPARE_DESCRIPTORS, f"the server has {self.descriptors} descriptors, {more} more than at its start"
