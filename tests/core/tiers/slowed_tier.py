"""A plugin whose tier is as slow as a file says: each call that reads takes so many seconds longer.
Runs in the server process, where a tier that nothing was loaded from is tried again after `PROBE_S` seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvframework import pricing
from kvframework.api.plugin import Options
from kvframework.api.tier import Outcome, PackedKey, TierProvider, hookimpl
from tests.core.storage.tier import MemoryTier

PROBE_S = 1.0


class SlowedOptions(Options, frozen=True):
    seconds: str


class SlowedTier(MemoryTier):
    """`seconds` is the file."""

    def __init__(self, seconds: Path) -> None:
        super().__init__()
        self.name = "slowed"
        self._seconds = seconds

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        time.sleep(float(self._seconds.read_text()))
        return super().get_into(keys, parts, deadline=deadline)


@hookimpl
def kvf_tiers() -> list[TierProvider[SlowedOptions]]:
    pricing.PROBE_S = PROBE_S
    return [
        TierProvider(
            name="slowed",
            summary="as slow as a file says",
            options=SlowedOptions,
            create=lambda options, _context: SlowedTier(Path(options.seconds)),
        )
    ]
