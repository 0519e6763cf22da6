"""A server whose prices cut each hit behind as many tokens as a file says, whatever a tier or an engine is like.

Run as `python -m tests.vllm.cutting_server FILE serve ...`; for the tests of cut hits.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvframework.cli.main import main
from kvframework.pricing import EngineSpeed, Priced
from kvframework.service.pricing import Pricing
from kvframework.service.records import PendingLookup
from kvframework.storage.l2.sealed_tier import L2Store

FILE = Path(sys.argv.pop(1))
# A LOOKUP without a speed is never cut, and an engine is quick to ask before it knows its own.
_SPEED = EngineSpeed(1000.0, 0.0)


class FixedCut(Pricing):
    def located(self, asked: PendingLookup, here: Sequence[bool], source: Mapping[int, L2Store]) -> None:
        if not source:
            return
        found = asked.grid.hit([there or index in source for index, there in enumerate(here)])
        cut = int(FILE.read_text()) // asked.grid.desc.chunk_tokens
        asked.priced = Priced(min(cut, found), found, 2.0, 1.0, 1.0)


def _asked(self: PendingLookup, *given: object) -> None:
    _init(self, *given)  # type: ignore[arg-type]
    self.speed = self.speed or _SPEED


_init = PendingLookup.__init__
PendingLookup.__init__ = _asked  # type: ignore[method-assign]
Pricing.located = FixedCut.located  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
