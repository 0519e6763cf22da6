"""A plan: what a trace needs, what settings do for it, and which one to take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvf_plan.errors import PlanError
from kvf_plan.planning.catalogue import Engine
from kvf_plan.planning.estimate import estimate, simulated
from kvf_plan.planning.goal import Figures, Goal, Row, Setting, cheapest
from kvf_plan.planning.lru_curve import LruCurve, lru_curve
from kvf_plan.planning.offers import Prices, TierOffer
from kvf_plan.planning.prompts import Prompts, prompts_of
from kvf_plan.planning.search import Combination, capacities, first_enough, search
from kvf_plan.trace.form import Trace
from kvf_plan.trace.summary import LiveSet
from kvframework.api.plugin import ByteSize
from kvframework.config.schema import WritePolicyName
from kvframework.pricing import EngineSpeed
from kvframework.text import short_duration

WRITE_POLICIES: tuple[WritePolicyName, ...] = ("write_through", "write_through_selective", "write_back")
EVICTIONS = ("lru", "two_queues")
# Without a word on how many: engines that compute this share of the time if nothing is ever found.
_BUSY = 0.9
# No cache is looked at that is larger than what has this share of the hits of an endless one.
_NEARLY_ALL = 0.99
_DAY_FROM_S = 600.0
# Of a simulation: seconds for each chunk of the trace, and how much longer it takes with a tier.
_CHUNK_S = 2e-5
_TIERED = 6


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for. `engines` 0: as many as the trace needs without a cache; `l1_bytes` (): what one would buy."""

    engine: Engine
    engines: int = 0
    tiers: tuple[TierOffer, ...] = ()
    prices: Prices
    goal: Goal
    evictions: tuple[str, ...] = EVICTIONS
    write_policies: tuple[WritePolicyName, ...] = WRITE_POLICIES
    l1_bytes: tuple[int, ...] = ()


class Point(msgspec.Struct, frozen=True):
    """Of the curve of LRU over capacities, without a tier: the share of tokens, and the estimated times."""

    l1_bytes: int
    hit: float
    ttft_s: dict[str, float]


class Chunks(msgspec.Struct, frozen=True):
    """The trace in chunks: the bytes of the live set, of all that was ever stored, and of the longest prompt; the share
    of tokens that an endless cache has, and the curve up to it."""

    chunk_tokens: int
    live: LiveSet
    live_bytes: int
    all_bytes: int
    longest_bytes: int
    endless_hit: float
    curve: list[Point]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`rows` in the order of cost. `chosen` None: no goal, or none that was tried meets it."""

    trace: str
    requests: int
    seconds: float
    tokens: int
    engine: Engine
    engines: int
    engines_by_load: bool
    prices: Prices
    goal: Goal
    chunks: Chunks
    rows: list[Row]
    chosen: Row | None

    @property
    def says_a_day(self) -> bool:
        """Whether the trace is long enough to say how much is written in a day."""
        return self.seconds >= _DAY_FROM_S


class _Sized(msgspec.Struct, frozen=True):
    """The prompts with all that is known of them, and the capacities that are looked at."""

    prompts: Prompts
    curve: LruCurve
    sizes: list[int]
    chunk_bytes: int


def make_plan(trace: Trace, wanted: Wanted, tell: Callable[[str], object] = lambda _: None) -> Plan:
    """Read the trace, and simulate settings: up to a minute each, after `tell` with how many there are, about how long
    they will take, and the next. Raises `PlanError`, and the errors of the trace and of the simulation."""
    prompts = prompts_of(trace, trace.header.chunk_tokens)
    if not prompts.uses:
        raise PlanError(
            f"no prompt of the trace fills a chunk of {prompts.chunk_tokens} tokens",
            where=trace.header.name,
            hint="a cache keeps whole chunks only",
        )
    engines = wanted.engines or _engines(prompts, wanted.engine)
    sized = _sized(prompts, wanted, engines)
    rows = list(_rows(sized, wanted, engines, tell))
    rows.sort(key=lambda row: (row.figures.cost, row.figures.ttft_s[wanted.goal.at]))
    return Plan(
        trace=trace.header.name,
        requests=len(prompts.prompts),
        seconds=prompts.seconds,
        tokens=prompts.tokens,
        engine=wanted.engine,
        engines=engines,
        engines_by_load=not wanted.engines,
        prices=wanted.prices,
        goal=wanted.goal,
        chunks=_chunks(sized, wanted, engines),
        rows=rows,
        chosen=cheapest(rows, wanted.goal) if wanted.goal.ttft_s is not None else None,
    )


def _engines(prompts: Prompts, engine: Engine) -> int:
    speed = EngineSpeed(engine.tokens_per_s, engine.attention_tokens)
    needed = sum(speed.prefill_s(0, prompt.tokens) for prompt in prompts.prompts)
    return max(math.ceil(needed / max(prompts.seconds, 1.0) / _BUSY), 1)


def _sized(prompts: Prompts, wanted: Wanted, engines: int) -> _Sized:
    chunk_bytes = prompts.chunk_tokens * wanted.engine.bytes_per_token
    # What is being loaded and stored is pinned: less than this would refuse prompts.
    least = engines * _longest(prompts) * chunk_bytes
    curve = lru_curve(prompts)
    enough = curve.chunks_for(_NEARLY_ALL * curve.token_hit_rate(len(curve.hits))) or 1
    sizes = sorted(set(wanted.l1_bytes)) or capacities(least, enough * chunk_bytes)
    return _Sized(prompts, curve, sizes, chunk_bytes)


def _longest(prompts: Prompts) -> int:
    return max((len(prompt.nodes) for prompt in prompts.prompts), default=0)


def _combinations(sized: _Sized, wanted: Wanted, engines: int) -> list[Combination]:
    made = []
    for tier in (None, *wanted.tiers):
        l2_bytes = _l2_bytes(sized, tier) if tier is not None else 0

        def good(l1_bytes: int, tier: TierOffer | None = tier, l2_bytes: int = l2_bytes) -> bool:
            ttft_s = wanted.goal.ttft_s
            return ttft_s is not None and (
                _estimate(sized, wanted, engines, l1_bytes, tier, l2_bytes)[wanted.goal.at] <= ttft_s
            )

        start = first_enough(sized.sizes, good)
        policies = wanted.write_policies if tier is not None else (None,)
        made += [
            Combination(sized.prompts.chunk_tokens, eviction, tier, l2_bytes, policy, start)
            for policy in policies
            for eviction in wanted.evictions
        ]
    return made


def _l2_bytes(sized: _Sized, tier: TierOffer) -> int:
    if tier.capacity is not None:
        return tier.capacity
    chunks = sized.curve.chunks_for(_NEARLY_ALL * sized.curve.token_hit_rate(len(sized.curve.hits)))
    return capacities(0, (chunks or 1) * sized.chunk_bytes)[-1]


def _estimate(
    sized: _Sized, wanted: Wanted, engines: int, l1_bytes: int, tier: TierOffer | None = None, l2_bytes: int = 0
) -> dict[str, float]:
    return estimate(
        sized.prompts,
        sized.curve,
        wanted.engine,
        engines,
        l1_bytes // sized.chunk_bytes,
        l2_bytes // sized.chunk_bytes,
        tier.read_bytes_per_s if tier is not None else 0.0,
    )


def _rows(sized: _Sized, wanted: Wanted, engines: int, tell: Callable[[str], object]) -> Iterator[Row]:
    combinations = _combinations(sized, wanted, engines)
    progress = _Progress(combinations, sized.prompts.uses)

    def of(setting: Setting) -> Figures:
        tell(f"{progress.next(setting)}: {_word(setting)}")
        return simulated(sized.prompts, setting, wanted.engine, engines, wanted.prices)

    return search(combinations, sized.sizes, wanted.goal, wanted.prices, of)


class _Progress:
    """How many simulations there will be, each combination of policies and tier as many as those before it, and how
    long they will take: by the time of those before, at first by the number of chunks."""

    def __init__(self, combinations: Sequence[Combination], uses: int) -> None:
        self._count = len(combinations)
        self._tiered = sum(each.tier is not None for each in combinations)
        self._uses = uses
        self._began = time.monotonic()
        self._begun: set[tuple[str, TierOffer | None, str | None]] = set()
        # Of simulations before the next: how many, and their work; one with a tier takes about six times as long.
        self._done, self._work, self._coming = 0, 0, 0

    def next(self, setting: Setting) -> str:
        """Return a word on all, as the simulation of `setting` begins."""
        self._work += self._coming
        self._coming = 1 if setting.tier is None else _TIERED
        self._begun.add((setting.eviction, setting.tier, setting.write_policy))
        self._done += 1
        each = self._done / len(self._begun)
        work = each * (self._count + (_TIERED - 1) * self._tiered)
        took = (time.monotonic() - self._began) / self._work if self._work else _CHUNK_S * self._uses
        left_s = max(work - self._work, self._coming) * took
        return f"simulation {self._done} of about {math.ceil(each * self._count)}, about {short_duration(left_s)} left"


def _word(setting: Setting) -> str:
    tier = f", {setting.tier.name} {setting.write_policy}" if setting.tier is not None else ""
    return f"{ByteSize(setting.l1_bytes)}, {setting.eviction}{tier}"


def _chunks(sized: _Sized, wanted: Wanted, engines: int) -> Chunks:
    live = sized.prompts.live_set()
    endless = sized.curve.token_hit_rate(len(sized.curve.hits))
    points = []
    for size in sized.sizes:
        hit = sized.curve.token_hit_rate(size // sized.chunk_bytes)
        points.append(Point(size, hit, _estimate(sized, wanted, engines, size)))
    return Chunks(
        sized.prompts.chunk_tokens,
        live,
        live.most * sized.chunk_bytes,
        live.stored * sized.chunk_bytes,
        _longest(sized.prompts) * sized.chunk_bytes,
        endless,
        points,
    )
