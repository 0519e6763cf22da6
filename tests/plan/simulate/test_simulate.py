"""What a simulation says of traces whose outcome is known, of chunks of other sizes, and of settings that cannot be
met."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_plan.errors import SimulationError
from kvf_plan.simulation import Engines, Outcome, Settings, SlowTime, TierSpeed, simulate
from kvf_plan.simulation.chunks import Chunks
from kvf_plan.simulation.engines import Fleet
from kvf_plan.simulation.events import VirtualTime
from kvf_plan.simulation.node import TICK_S
from kvf_plan.simulation.requests import Requests
from kvf_plan.simulation.run import START
from kvf_plan.simulation.sizes import Sizes
from kvf_plan.trace.form import Request
from kvframework.config.load import load_config
from kvframework.errors import ConfigFieldError, PluginError, TierError
from kvframework.pricing import EngineSpeed
from kvframework.service.cache_service import CacheService
from tests.plan.planning.traces import MadeTrace
from tests.plan.simulate.made import made_trace

CHUNK = 16
MIB = 1 << 20
# Two prompts that fill an L1 of 8 MiB.
FIRST, OTHERS = list(range(8)), list(range(100, 108))
REDIS = ("l2.0.use=redis", "l2.0.url=redis://nowhere")


def settings_of(*overrides: str, capacity: str = "256MiB", **fields: Any) -> Settings:
    """L1 of 256 objects by default: 16 tokens of 64 KiB."""
    common = (f"server.chunk_size={CHUNK}", f"l1.capacity={capacity}", "l1.eviction.use=lru")
    config = load_config(overrides=(*common, *overrides), environ={})
    return Settings(config, **{"bytes_per_token": 64 << 10, **fields})


def trace_of(*prompts: tuple[float, list[int]], chunk_tokens: int = CHUNK) -> MadeTrace:
    requests = [Request(at, chunk_tokens * len(chunks), 0, chunks) for at, chunks in prompts]
    return MadeTrace(requests, chunk_tokens)


def test_a_prompt_that_comes_again_hits_in_l1() -> None:
    outcome = simulate(trace_of((0, [1, 2, 3]), (1, [1, 2, 4]), (2, [5])), settings_of())
    assert (outcome.requests, outcome.blocks, outcome.l1_blocks, outcome.l2_blocks) == (3, 7, 2, 0)
    assert (outcome.tokens, outcome.asked_tokens, outcome.l1_tokens) == (7 * CHUNK, 7 * CHUNK, 2 * CHUNK)
    assert (outcome.l1_bytes, outcome.l1_capacity_bytes, outcome.evicted) == (5 * MIB, 256 * MIB, 0)
    assert outcome.misses == {"never_stored": 3}
    assert (outcome.ttft_s, outcome.engine_s, outcome.tiers) == (None, None, [])


@pytest.mark.parametrize(("capacity", "objects"), [("8GiB", 2), ("1GiB", 16)])
def test_one_object_stands_for_a_chunk_of_the_trace_where_l1_has_room_for_many(capacity: str, objects: int) -> None:
    settings = settings_of("server.chunk_size=0", capacity=capacity, bytes_per_token=128 << 10)
    outcome = simulate(trace_of((0, [1, 2]), (1, [1, 3]), chunk_tokens=512), settings)
    assert (outcome.blocks, outcome.l1_blocks, outcome.l1_tokens) == (objects * 2, objects // 2, 512)


def test_the_same_input_gives_the_same_outcome() -> None:
    settings = settings_of(*REDIS, capacity="64MiB", tiers=[TierSpeed("redis", 1e9)], engines=Engines(2, 2000))
    outcomes = [simulate(made_trace(60, CHUNK, every_s=0.05), settings) for _ in range(2)]
    first, second = [msgspec.structs.replace(each, status={}) for each in outcomes]
    assert first == second
    assert first.l2_tokens > 0


def test_engines_take_their_time() -> None:
    """100 tokens a second, and half a chunk that fills none is computed each time."""
    prompt = Request(0.0, CHUNK + 9, 0, [1])
    again = Request(10.0, CHUNK + 9, 0, [1])
    outcome = simulate(MadeTrace([prompt, again], CHUNK), settings_of(engines=Engines(1, 100.0)))
    assert (outcome.ttft_s.p99, outcome.ttft_s.mean) == (pytest.approx(0.25), pytest.approx(0.17))
    assert outcome.engine_s == pytest.approx(0.34)
    assert outcome.seconds == pytest.approx(10.09)


def test_a_prompt_that_is_all_there_still_needs_its_last_token() -> None:
    outcome = simulate(trace_of((0, [1]), (10, [1])), settings_of(engines=Engines(1, 16.0)))
    assert outcome.engine_s == pytest.approx(1 + 1 / 16)


def test_what_an_engine_had_itself_is_neither_asked_for_nor_computed_nor_stored() -> None:
    requests = [
        Request(0.0, 2 * CHUNK, 0, [1, 2]),
        Request(10.0, 3 * CHUNK, 0, [1, 2, 3], start=CHUNK),
        Request(20.0, 2 * CHUNK, 0, [8, 9], start=CHUNK),
        Request(30.0, 2 * CHUNK, 0, [8, 9]),
        Request(40.0, CHUNK, 0, [7], start=CHUNK),
    ]
    outcome = simulate(MadeTrace(requests, CHUNK), settings_of(engines=Engines(1, float(CHUNK))))
    assert (outcome.asked_tokens, outcome.l1_tokens, outcome.blocks) == (7 * CHUNK, CHUNK, 7)
    # The last token of each prompt is always computed.
    assert outcome.engine_s == pytest.approx(2 + 1 + 1 + 2 + 1 / CHUNK)
    assert outcome.l1_bytes == 5 * MIB


def test_prompts_wait_for_the_engine_that_is_free_first() -> None:
    prompts = [(0.0, [number]) for number in range(4)]
    for count, mean in ((1, 2.5), (2, 1.5), (4, 1.0)):
        outcome = simulate(trace_of(*prompts), settings_of(engines=Engines(count, 16.0)))
        assert outcome.ttft_s.mean == pytest.approx(mean)


def test_a_tier_takes_the_time_of_its_bytes() -> None:
    """L1 holds 8 objects; 8 others come, then the first ones again: 8 MiB at 1 MiB a second."""
    trace = trace_of((0, FIRST), (100, OTHERS), (200, FIRST))
    speed = TierSpeed("redis", MIB, write_bytes_per_s=8 * MIB)
    fields: dict[str, Any] = {"engines": Engines(1, 1e9), "capacity": "8MiB"}
    outcome = simulate(trace, settings_of(*REDIS, "l2.0.timeout_s=60", tiers=[speed], **fields))
    (tier,) = outcome.tiers
    assert (outcome.l1_blocks, outcome.l2_blocks) == (0, 8)
    assert (tier.read_bytes, tier.written_bytes, tier.used_bytes, tier.dropped) == (8 * MIB, 16 * MIB, 16 * MIB, 0)
    assert outcome.ttft_s.p99 == pytest.approx(8.0, abs=1e-3)
    # With a quarter of its speed.
    slowed = TierSpeed("redis", MIB, 8 * MIB, slow=[SlowTime(200, 1000, 0.25)])
    outcome = simulate(trace, settings_of(*REDIS, "l2.0.timeout_s=60", tiers=[slowed], **fields))
    assert outcome.ttft_s.p99 == pytest.approx(32.0, abs=1e-3)


def test_a_tier_that_is_too_slow_is_a_miss_after_its_timeout() -> None:
    down = TierSpeed("redis", 100 * MIB, slow=[SlowTime(150, 1000, 0.0)])
    settings = settings_of(*REDIS, "l2.0.timeout_s=3", capacity="8MiB", tiers=[down], engines=Engines(1, 1e9))
    outcome = simulate(trace_of((0, FIRST), (100, OTHERS), (200, FIRST)), settings)
    assert outcome.l2_blocks == 0
    assert outcome.misses["tier_down"] == 1
    assert 3.0 <= outcome.ttft_s.p99 < 10.0


def test_a_tier_that_has_all_is_never_written() -> None:
    speed = TierSpeed("redis", 100 * MIB, has_all=True)
    outcome = simulate(
        trace_of((0, FIRST), (1, OTHERS), (2, FIRST)), settings_of(*REDIS, capacity="8MiB", tiers=[speed])
    )
    (tier,) = outcome.tiers
    assert (outcome.l2_blocks, tier.written_bytes, tier.used_bytes) == (8, 0, 16 * MIB)


def test_a_full_tier_forgets_what_was_used_longest_ago() -> None:
    prompts = [(float(number), [100 * number + chunk for chunk in range(8)]) for number in range(10)]
    speed = TierSpeed("redis", 100 * MIB, capacity_bytes=40 * MIB)
    outcome = simulate(trace_of(*prompts), settings_of(*REDIS, capacity="8MiB", tiers=[speed]))
    (tier,) = outcome.tiers
    assert 0 < tier.used_bytes <= 40 * MIB
    assert tier.evicted >= 40


def test_what_is_dear_to_load_is_computed() -> None:
    """A tier of 1 MiB a second before an engine that computes an object's tokens in a hundredth of one."""
    trace = made_trace(80, CHUNK, every_s=2.0)
    speed = TierSpeed("redis", MIB, has_all=True)
    fields: dict[str, Any] = {"tiers": [speed], "engines": Engines(1, 1600.0), "capacity": "16MiB"}
    always, priced = [
        simulate(trace, settings_of(*REDIS, f"server.price={price}", **fields)) for price in ("false", "true")
    ]
    assert priced.misses["priced"] > 0
    assert priced.ttft_s.mean < always.ttft_s.mean / 2


@given(st.integers(0, 300), st.sampled_from([4, 8, 16, 32, 64]))
def test_a_prompt_has_as_many_chunks_as_it_fills(tokens: int, ours: int) -> None:
    prompt = Request(0.0, tokens, 0, list(range(-(-tokens // 16))))
    whole = Chunks(ours, 16, whole=True).digests(prompt)
    assert len(whole) == tokens // ours
    assert len(set(whole)) == len(whole)
    all_of_them = Chunks(ours, 16, whole=False).digests(prompt)
    assert all_of_them[: len(whole)] == whole
    assert len(all_of_them) == -(-tokens // ours)


@given(st.integers(0, 12), st.integers(1, 12), st.sampled_from([4, 8, 16, 32, 64]))
def test_prompts_share_the_chunks_that_they_share_in_the_trace(shared: int, more: int, ours: int) -> None:
    first = Request(0.0, 16 * (shared + more), 0, [*range(shared), *range(100, 100 + more)])
    second = Request(0.0, 16 * (shared + more), 0, [*range(shared), *range(200, 200 + more)])
    one, other = (Chunks(ours, 16, whole=True).digests(each) for each in (first, second))
    same = [mine == theirs for mine, theirs in zip(one, other, strict=True)]
    assert same == [True] * (16 * shared // ours) + [False] * (len(one) - 16 * shared // ours)


BAD: dict[str, tuple[Settings, str]] = {
    "a chunk is larger than L1": (
        settings_of(capacity="1MiB", bytes_per_token=128 << 10),
        r"L1 has 1.0 MiB, and one chunk of 16 tokens takes 2.0 MiB",
    ),
    "a tier that is not configured": (
        settings_of(tiers=[TierSpeed("disk", 1e9)]),
        r"unknown tier 'disk'\n  expected: no \[\[l2\]\] is configured",
    ),
    "another tier than the configured one": (
        settings_of(*REDIS, tiers=[TierSpeed("disk", 1e9)]),
        r"unknown tier 'disk'\n  expected: redis",
    ),
    "a tier of other nodes": (
        settings_of("l2.0.use=peers", tiers=[TierSpeed("peers", 1e9)]),
        r"the tier 'peers' reads from other nodes.*\n  hint: leave out this",
    ),
    "the tier's speed is missing": (
        settings_of(*REDIS),
        r"the speed of the tier 'redis' is missing.*\n.*\n  hint: .*--tier redis=3GB/s",
    ),
    "two speeds of a tier": (settings_of(*REDIS, tiers=[TierSpeed("redis", 1e9)] * 2), "a tier has more than one"),
    "a tier that stands still": (settings_of(*REDIS, tiers=[TierSpeed("redis", 0.0)]), "read_bytes_per_s: 0.0"),
    "a tier that writes backwards": (
        settings_of(*REDIS, tiers=[TierSpeed("redis", 1.0, -1.0)]),
        "write_bytes_per_s: -1",
    ),
    "no latency": (settings_of(*REDIS, tiers=[TierSpeed("redis", 1.0, latency_s=-1)]), "latency_s: -1"),
    "a slow time that ends first": (
        settings_of(*REDIS, tiers=[TierSpeed("redis", 1.0, slow=[SlowTime(2, 1, 0.5)])]),
        "slow: .*out of bounds",
    ),
    "a tier without room": (
        settings_of(*REDIS, tiers=[TierSpeed("redis", 1.0, capacity_bytes=0)]),
        "capacity_bytes: 0",
    ),
    "no engine": (settings_of(engines=Engines(0)), "engines: count: 0"),
    "engines that compute nothing": (settings_of(engines=Engines(1, 0.0)), "tokens_per_s: 0.0"),
    "engines beyond all numbers": (settings_of(engines=Engines(1, 1e13)), "tokens_per_s: 1"),
    "engines that look less than nothing ahead": (settings_of(engines=Engines(lookahead=-1)), "lookahead: -1"),
    "more memory than addresses": (settings_of(capacity="999999999999999999GiB"), "L1 is too large to be simulated"),
    "a wrong attention term": (settings_of(engines=Engines(1, 1.0, -1.0)), "attention_tokens: -1"),
    "tokens without bytes": (settings_of(bytes_per_token=0), "bytes_per_token: 0"),
    "a chunk that neither divides nor is divided": (
        settings_of("server.chunk_size=24"),
        r"chunks of 16 tokens, the simulated server chunks of 24\n.*\n  hint: .*--set server.chunk_size=16",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_settings_that_cannot_be_met(what: str) -> None:
    settings, text = BAD[what]
    with pytest.raises(SimulationError, match=text):
        simulate(made_trace(1, CHUNK), settings)


def test_a_plugin_that_is_not_installed_and_an_option_that_is_none() -> None:
    with pytest.raises(PluginError, match="nosuch"):
        simulate(made_trace(1, CHUNK), settings_of("l1.eviction.use=nosuch"))
    with pytest.raises(ConfigFieldError, match="nosuch"):
        simulate(made_trace(1, CHUNK), settings_of("l1.eviction.nosuch=1"))


def test_an_empty_trace_has_an_outcome() -> None:
    outcome: Outcome = simulate(trace_of(), settings_of(engines=Engines(1, 1.0)))
    assert (outcome.requests, outcome.seconds, outcome.ttft_s) == (0, 0.0, None)


@pytest.mark.parametrize("tiers", [(), (TierSpeed("redis", 1e9, latency_s=0.001),)])
def test_a_time_without_requests_takes_none(monkeypatch: pytest.MonkeyPatch, tiers: tuple[TierSpeed, ...]) -> None:
    """Nine years between two requests, which would be 3e9 ticks of a server and 6e7 questions whether its tier answers,
    and prompts that take a night."""
    events, happen = itertools.count(1), VirtualTime.happen

    def counted(time: VirtualTime) -> None:
        assert next(events) < 10_000
        happen(time)

    monkeypatch.setattr(VirtualTime, "happen", counted)
    nine_years = 9 * 366 * 86400.0
    settings = settings_of(*(REDIS if tiers else ()), engines=Engines(1, 1e-3), tiers=tiers)
    outcome = simulate(trace_of((0, [1, 2, 3]), (nine_years, [1, 2, 3])), settings)
    assert outcome.l1_tokens == 3 * CHUNK
    assert outcome.seconds >= nine_years
    assert [tier.written_bytes for tier in outcome.tiers] == [3 * MIB] * len(tiers)


def test_prompts_are_looked_up_near_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six prompts of a second each come at once, for one engine."""
    asked: list[float] = []
    ask = Requests._ask

    def told(requests: Requests, request: Any) -> None:
        asked.append(requests._node.time.now - START)
        ask(requests, request)

    monkeypatch.setattr(Requests, "_ask", told)
    prompts = [(0.0, [number]) for number in range(6)]
    for lookahead, at in ((None, [0.0] * 6), (0, [0, 1, 2, 3, 4, 5]), (2, [0, 0, 0, 1, 2, 3]), (9, [0.0] * 6)):
        asked.clear()
        outcome = simulate(trace_of(*prompts), settings_of(engines=Engines(1, 16.0, lookahead=lookahead)))
        assert asked == pytest.approx(at)
        assert outcome.ttft_s.mean == pytest.approx(3.5)


def test_an_engine_without_work_asks_on_while_loads_are_under_way() -> None:
    """L1 holds 8 objects; two prompts are in the tier only, at a second for each object, and a third one is nowhere."""
    first, second, others = [1, 2, 3], [4, 5], list(range(100, 108))
    speed = TierSpeed("redis", MIB, write_bytes_per_s=100 * MIB)
    again = [(100.0, first), (100.0, second), (100.0, [9])]
    trace = trace_of((0, first), (0, second), (50, others), *again)
    engines = Engines(1, 1e3, lookahead=0)
    outcome = simulate(trace, settings_of(*REDIS, "l2.0.timeout_s=60", tiers=[speed], engines=engines, capacity="8MiB"))
    assert outcome.l2_blocks == 5
    # The last one waits for no load, and loads of two prompts take turns.
    assert outcome.ttft_s.p50 < 0.2
    assert outcome.ttft_s.p99 == pytest.approx(5.0, abs=0.2)


def test_an_engine_says_what_waits_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what it has not looked up yet: four prompts of a second each come at once."""
    said: list[float] = []
    speed = Fleet.speed

    def told(fleet: Fleet, *arguments: Any) -> EngineSpeed:
        said.append(speed(fleet, *arguments).queued_s)
        return speed(fleet, *arguments)

    monkeypatch.setattr(Fleet, "speed", told)
    prompts = [(0.0, [number]) for number in range(4)]
    for lookahead, queued in ((None, [0, 1, 2, 3]), (0, [0, 2, 1, 0])):
        said.clear()
        simulate(trace_of(*prompts), settings_of(engines=Engines(1, 16.0, lookahead=lookahead)))
        assert said == pytest.approx(queued)


def test_what_a_quiet_node_left_out_is_done_before_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock is never seen to be late: the server has had a tick in the 0.1 s before each request."""
    ticked, late = [0.0], []
    tick, look_up = CacheService.tick, Requests.arrived

    def told(service: CacheService) -> None:
        ticked.append(service.storage.clock())
        tick(service)

    def arrived(requests: Requests, prompt: Request) -> None:
        look_up(requests, prompt)
        late.append(START + prompt.at - ticked[-1])

    monkeypatch.setattr(CacheService, "tick", told)
    monkeypatch.setattr(Requests, "arrived", arrived)
    simulate(trace_of(*((at, [1, 2]) for at in (1.0, 50.0, 1000.0, 1000.05, 9e6, 9e6 + 1))), settings_of())
    assert max(late) <= 2 * TICK_S


@pytest.mark.parametrize("price", ["true", "false"])
def test_what_is_over_takes_no_memory(monkeypatch: pytest.MonkeyPatch, price: str) -> None:
    """The collector of garbage hardly runs in a simulation: a circle that each lookup leaves would fill the memory."""
    circles: list[int] = []
    arrived = Requests.arrived

    def counted(requests: Requests, prompt: Request) -> None:
        circles.append(gc.collect() if prompt.at in (0.0, 59.5) else 0)
        arrived(requests, prompt)

    monkeypatch.setattr(Requests, "arrived", counted)
    tiers = [TierSpeed("redis", 2e9)]
    settings = settings_of(*REDIS, f"server.price={price}", capacity="64MiB", tiers=tiers, engines=Engines(2, 2000))
    outcome = simulate(made_trace(120, CHUNK), settings)
    assert outcome.l2_tokens > 0
    assert circles[-1] < 60, "fewer than there are requests"
    assert len(circles) == 120


def test_calls_that_failed_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error refers to the frames that it came through, and none of them to it once it is over."""
    left: list[int] = []
    outcome_of = Requests.outcome

    def counted(requests: Requests, sizes: Sizes) -> Outcome:
        left.append(sum(issubclass(type(each), TierError) for each in gc.get_objects()))
        return outcome_of(requests, sizes)

    monkeypatch.setattr(Requests, "outcome", counted)
    monkeypatch.setattr("kvf_plan.simulation.run.gc.collect", lambda: 0)
    down = TierSpeed("redis", 50 * MIB, slow=[SlowTime(5, 8, 0.0), SlowTime(20, 30, 0.0)], has_all=True)
    settings = settings_of(*REDIS, "l2.0.timeout_s=1", capacity="16MiB", tiers=[down], engines=Engines(2, 2000))
    before = sum(issubclass(type(each), TierError) for each in gc.get_objects())
    gc.disable()
    try:
        outcome = simulate(made_trace(120, CHUNK), settings)
    finally:
        gc.enable()
    assert outcome.status["l2"][0]["errors"] > 1  # type: ignore[index]
    assert left == [before]
