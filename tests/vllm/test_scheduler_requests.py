"""The scheduler side of the connector as a state machine: which requests are left out or kept apart, and what it does
before workers and server have spoken."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvf_vllm.requests import wish_of
from kvf_vllm.scheduler import SchedulerSide
from kvf_vllm.step_messages import StepReport
from kvframework.api.keys import MAX_RETAINS, Retain, retain_of
from tests.vllm import stand_ins
from tests.vllm.stand_ins import FakeRequest, FakeServer, computed, scene

TRACE = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_embeds": object()}, "prompt_embeds"),
        ({"pooling_params": object()}, "pooling"),
        ({"resumable": True}, "streaming_input"),
        ({"kv_transfer_params": {"kvframework.laod": False}}, "kv_transfer_params"),
        ({"kv_transfer_params": {"kvframework.load": "no"}}, "kv_transfer_params"),
        ({"kv_transfer_params": "kvframework.load"}, "kv_transfer_params"),
        ({"kv_transfer_params": ["kvframework.load"]}, "kv_transfer_params"),
        ({"kv_transfer_params": 7}, "kv_transfer_params"),
        ({"kv_transfer_params": {"kvframework.load": False, "kvframework.store": False}}, "opted_out"),
        # Of an engine whose prefill reads no earlier KV: it waits for no name of an adapter either.
        ({"lora_request": object()}, "no_prefix_caching"),
    ],
)
def test_requests_that_are_left_out(fields: dict[str, Any], reason: str) -> None:
    server, side, request = scene(16, held=16, asked=fields, unread=reason == "no_prefix_caching")
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated(request, stand_ins.table(16), 0)
    assert not computed(side, request, 16).stores
    assert not server.asked
    assert dict(side.tally.counts) == {f"miss_requests|{reason}": 1}


def test_a_prompt_without_a_whole_chunk_is_not_looked_up() -> None:
    server, side, request = scene(stand_ins.CHUNK - 1)
    for _ in range(3):
        assert side.matched_tokens(request, 0) == (0, False)
    side.allocated(request, stand_ins.table(stand_ins.CHUNK), 0)
    assert not server.asked
    assert dict(side.tally.counts) == {"miss_requests|too_short": 1}


@pytest.mark.parametrize(
    ("asked", "role", "loads"),
    [
        ({"kv_transfer_params": {"kvframework.store": False}}, {}, True),
        ({"kv_transfer_params": {"kvframework.load": False}}, {}, False),
        # Log probabilities of the prompt need it computed.
        ({"skip_reading_prefix_cache": True}, {}, False),
        ({}, {"stores": False}, True),
        ({}, {"loads": False}, False),
    ],
)
def test_a_request_or_an_engine_of_one_direction(asked: dict[str, Any], role: dict[str, bool], loads: bool) -> None:
    _, side, request = scene(16, held=16, asked=asked, **role)
    assert side.matched_tokens(request, 0) == ((16, True) if loads else (0, False))
    assert bool(computed(side, request, 16).stores) is not loads


def test_a_lookup_without_an_answer_is_counted_as_that() -> None:
    server, side, request = scene(16, held=16)
    server.silent = True
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated(request, stand_ins.table(16), 0)
    assert dict(side.tally.counts) == {"miss_requests|no_answer": 1}


def test_salts_keep_requests_apart() -> None:
    server = FakeServer()
    stand_ins.filled(server, list(range(16)), cache_salt="tenant")
    side = stand_ins.scheduler(server)
    same = {"cache_salt": "tenant"}
    by_parameter = {"kv_transfer_params": {"kvframework.salt": "tenant"}}
    both = {"cache_salt": "tenant", "kv_transfer_params": {"kvframework.salt": "more"}}
    found = {
        name: side.matched_tokens(FakeRequest(name, list(range(16)), **fields), 0)[0]
        for name, fields in {"none": {}, "same": same, "by parameter": by_parameter, "both": both}.items()
    }
    assert found == {"none": 0, "same": 16, "by parameter": 16, "both": 0}


@pytest.mark.parametrize(
    ("headers", "carried"),
    [
        ({"traceparent": TRACE, "tracestate": "a=b"}, TRACE),
        ({"traceparent": TRACE[:-2] + "00"}, ""),
        ({"traceparent": "x"}, ""),
        ({"traceparent": 7}, ""),
        ({}, ""),
        (None, ""),
        ("traceparent", ""),
    ],
)
def test_the_trace_of_a_sampled_request_goes_to_the_workers(headers: Any, carried: str) -> None:
    _, side, request = scene(24, held=16, asked={"trace_headers": headers})
    assert side.matched_tokens(request, 0) == (16, True)
    side.allocated(request, stand_ins.table(24), 16)
    request.num_computed_tokens = 16
    plan = computed(side, request, 8, stand_ins.table(24))
    assert [op.trace for op in (*plan.loads, *plan.stores)] == [carried, carried]


@pytest.mark.engine_feature("vLLM", "images", "stand-ins")
def test_images_are_part_of_what_a_chunk_is_called() -> None:
    def with_image(identifier: str, offset: int) -> dict[str, Any]:
        place = SimpleNamespace(offset=offset, length=3)
        return {"mm_features": [SimpleNamespace(identifier=identifier, mm_position=place)]}

    server = FakeServer()
    stand_ins.filled(server, list(range(24)), **with_image("cat", 9))
    side = stand_ins.scheduler(server)
    found = [
        side.matched_tokens(FakeRequest(str(index), list(range(24)), **fields), 0)[0]
        for index, fields in enumerate([with_image("cat", 9), with_image("dog", 9), with_image("cat", 10), {}])
    ]
    assert found == [24, 8, 8, 8]


def test_nothing_is_found_after_a_reset() -> None:
    server, side, request = scene(16, held=16)
    running = FakeRequest("running", list(range(80, 96)))
    side.matched_tokens(running, 0)
    side.reset()
    assert not computed(side, running, 16).stores, "its KV may be of both kinds"
    assert side.matched_tokens(request, 0) == (0, False)
    for op in computed(side, request, 16).stores:
        server.stored(op)
    assert side.matched_tokens(FakeRequest("b", list(range(16))), 0) == (16, True)
    assert stand_ins.scheduler(server).matched_tokens(FakeRequest("c", list(range(16))), 0) == (16, True)


def test_before_the_workers_have_spoken_requests_wait_a_moment() -> None:
    clock = stand_ins.Clock()
    server, accepted, request = scene(16, held=16)
    side = SchedulerSide(server, stand_ins.WINDOWED[:1], accepted._options, workers=2, clock=clock)
    assert side.matched_tokens(request, 0) == (None, False)
    side.heard(StepReport(served={0: stand_ins.SERVED}))
    assert side.matched_tokens(request, 0) == (None, False)
    side.heard(StepReport(served={1: stand_ins.SERVED}))
    assert side.matched_tokens(request, 0) == (16, True)
    late = SchedulerSide(server, stand_ins.WINDOWED[:1], side._options, clock=clock)
    assert late.matched_tokens(request, 0) == (None, False)
    clock.now += 10
    assert late.matched_tokens(request, 0) == (0, False)


def test_a_producers_first_request_is_stored_even_if_it_takes_one_step() -> None:
    side = SchedulerSide(
        FakeServer(),
        stand_ins.WINDOWED[:1],
        stand_ins.scheduler(FakeServer())._options,
        loads=False,
        clock=stand_ins.Clock(),
    )
    request = FakeRequest("a", list(range(16)))
    assert side.matched_tokens(request, 0) == (None, False)
    side.heard(StepReport(served={0: stand_ins.SERVED}))
    assert side.matched_tokens(request, 0) == (0, False)
    assert computed(side, request, 16).stores


def test_without_a_server_requests_are_computed_and_found_once_it_is_there() -> None:
    clock = stand_ins.Clock()
    server, accepted, request = scene(16, held=16)
    side = SchedulerSide(server, stand_ins.WINDOWED[:1], accepted._options, clock=clock)
    side.heard(StepReport(served={0: None}))
    assert side.matched_tokens(request, 0) == (0, False)
    assert not computed(side, request, 16).stores
    side.heard(StepReport(served={0: stand_ins.SERVED}))
    assert side.matched_tokens(FakeRequest("b", list(range(16))), 0) == (16, True)
    server.reachable = False
    assert side.matched_tokens(FakeRequest("c", list(range(16))), 0) == (None, False), "it may be connecting"
    clock.now += 10
    assert side.matched_tokens(FakeRequest("c", list(range(16))), 0) == (0, False)


HINTS = [{"end": 8, "priority": 90, "duration": 600}, {"start": 8, "retain": "done"}]


def test_what_a_request_says_of_its_future_goes_with_its_lookup_loads_and_stores() -> None:
    server, side, request = scene(24, held=16, asked={"kv_transfer_params": {"kvframework.retain": HINTS}})
    assert side.matched_tokens(request, 0) == (16, True)
    side.allocated(request, stand_ins.table(24), 16)
    plan = side.plan_step({}, {"a": stand_ins.table(24)}.get)
    assert [load.retain for load in plan.loads] == [retain_of(HINTS)]
    assert [asked.retain for asked in server.requests] == [retain_of(HINTS)]
    other = FakeRequest("b", list(range(100, 116)), kv_transfer_params={"kvframework.retain": "done"})
    side.matched_tokens(other, 0)
    stores = computed(side, other, 16).stores
    assert {store.retain for store in stores} == {retain_of("done")}


@dataclass
class Action:
    """vLLM's `KvHintAction`."""

    payload: object
    action_type: str = "kv.retain"
    action_version: str = "1.0"
    action_id: str = "a"


def envelope(*actions: Action) -> SimpleNamespace:
    return SimpleNamespace(protocol_version="0.1", message_id="m", actions=list(actions))


def test_vllms_own_hints_say_the_same() -> None:
    first, second = {"end": 8, "priority": 90, "duration": 600}, {"start": 8, "end": 16, "priority": 0}
    for_ever = {"start": 16, "end": 24, "priority": 7, "duration": None}
    answer = {"covers_output": True, "priority": 1, "duration": 1e9}
    hints = envelope(
        Action({"anything": 1}, action_type="kv.prefetch"),
        Action({"scope": None, "directives": [first, second]}),
        Action({"directives": [for_ever, answer]}, action_version="1.4"),
    )
    wish = wish_of(FakeRequest("a", list(range(24)), kv_hints=hints))
    assert wish.ignored == ""
    assert wish.retain == (
        Retain("keep", 600.0, 90, 0, 8),
        Retain("done", start=8, end=16),
        Retain("keep", 3600.0, 7, 16, 24),
        Retain("keep", 3600.0, 1, 24, tiers_s=30 * 86400.0),
    )
    many = envelope(*[Action({"directives": [first] * 10})] * 9)
    assert len(wish_of(FakeRequest("a", [1], kv_hints=many)).retain) == MAX_RETAINS
    # The connector's own word goes before.
    params = {"kvframework.retain": "done"}
    assert wish_of(FakeRequest("a", [1], kv_hints=hints, kv_transfer_params=params)).retain == retain_of("done")
    assert wish_of(FakeRequest("a", [1], kv_hints=envelope())).retain == ()


@pytest.mark.parametrize(
    "action",
    [
        Action({}),
        Action(None),
        Action({"directives": {}}),
        Action({"directives": [3]}),
        Action({"directives": [{"start": 0}]}),
        Action({"directives": [{"priority": 101}]}),
        Action({"directives": [{"priority": 1, "duration": float("nan")}]}),
        Action({"directives": [{"priority": 1, "end": 0}]}),
        Action({"directives": [{"priority": 1, "unknown": 1}]}),
        Action({"directives": []}, action_version="2.0"),
    ],
)
def test_vllms_own_hints_that_are_wrong_are_ignored(action: Action) -> None:
    wish = wish_of(FakeRequest("a", list(range(24)), kv_hints=envelope(action)))
    assert (wish.load, wish.store, wish.retain) == (True, True, ())
    assert "docs/hints.md" in wish.ignored


@pytest.mark.parametrize(
    "hint", ["later", -1, float("nan"), True, {"ttl": 5}, [{"start": 0}], ["done"] * 100, {"retain": {}}, object()]
)
def test_a_wrong_hint_is_told_once_and_ignored(hint: object, caplog: pytest.LogCaptureFixture) -> None:
    server, side, _ = scene(24, held=16)
    for name in "abc":
        request = FakeRequest(name, list(range(24)), kv_transfer_params={"kvframework.retain": hint})
        assert side.matched_tokens(request, 0) == (16, True)
        side.finished(request)
    (line,) = [record for record in caplog.records if "kvframework.retain" in record.message]
    assert (line.levelname, line.args[0]) == ("WARNING", "a")  # type: ignore[index]
    assert "docs/hints.md" in line.message
    assert {asked.retain for asked in server.requests} == {()}
