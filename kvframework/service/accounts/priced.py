"""`Priced`: what was decided about the load of a LOOKUP by its price."""

from __future__ import annotations

from typing import NamedTuple


class Priced(NamedTuple):
    """Of a hit of `found` chunks the first `chunks` are used. `load_s` and `compute_s` are the prices of the others,
    or, if there are none, of all that was not in L1; `saved_s` is what that spares, see `kvframework.pricing.cut`."""

    chunks: int
    found: int
    load_s: float
    compute_s: float
    saved_s: float

    @property
    def is_cut(self) -> bool:
        return self.chunks < self.found
