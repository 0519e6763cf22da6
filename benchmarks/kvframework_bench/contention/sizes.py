"""The sizes and targets of `kvframework bench contention`. Pure."""

from __future__ import annotations

import msgspec

from kvframework_bench.workload import SHAPES, Shape

# The share of `copy`'s quiet ratio that spinners leave.
SPINNING_RATIO = 0.5
# LOOKUP's p99 next to stores, in units of its quiet p99.
STORING_P99_RATIO = 3.0
HIT_US = 300.0


class Sizes(msgspec.Struct, frozen=True):
    """The sizes of all parts. The other client stores prompts of `storing`, with room for `storing_prompts` of them in
    L1; lookups are `lookup_calls` a round, of each length, quiet and next to it. `hits` are of shape and number; the
    first shape is profiled, `profiled` hits of it."""

    shapes: tuple[Shape, ...] = tuple(SHAPES.values())
    lookup_tokens: tuple[int, ...] = (1024, 32768)
    lookup_rounds: int = 60
    lookup_calls: int = 100
    storing: Shape = SHAPES["llama-3-8b"]
    storing_prompts: int = 3
    hits: tuple[tuple[Shape, int], ...] = ((SHAPES["1kb"], 500), (SHAPES["llama-3-8b"], 100))
    profiled: int = 500


FULL = Sizes()
QUICK = Sizes(
    shapes=(SHAPES["1kb"].quick(),),
    lookup_tokens=(1024,),
    lookup_rounds=2,
    lookup_calls=10,
    storing=SHAPES["1kb"].quick(),
    hits=((SHAPES["1kb"].quick(), 5),),
    profiled=10,
)
