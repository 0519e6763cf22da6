"""A plugin whose tier serves until a file is there: then its writes hang, whatever their deadline, as those of a disk
that does not answer."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from kvframework.api.plugin import Options
from kvframework.api.tier import Outcome, PackedKey, TierProvider, hookimpl
from tests.core.storage.tier import MemoryTier


class HangingOptions(Options, frozen=True):
    while_there: str


class HangingTier(MemoryTier):
    name = "hanging"

    def __init__(self, while_there: str) -> None:
        super().__init__()
        self._while_there = while_there

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        while os.path.exists(self._while_there):
            time.sleep(0.02)
        return super().put(keys, parts, deadline=time.monotonic() + 5.0)


@hookimpl
def kvf_tiers() -> list[TierProvider[HangingOptions]]:
    return [
        TierProvider(
            name="hanging",
            summary="its writes hang",
            options=HangingOptions,
            create=lambda options, _context: HangingTier(options.while_there),
        )
    ]
