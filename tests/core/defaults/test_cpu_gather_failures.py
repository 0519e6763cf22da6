"""The transport `cpu_gather`: what it refuses, and that what fails beside it is a miss that leaves nothing behind."""

from __future__ import annotations

import logging

import msgspec
import pytest

from kvframework.api.futures import Future
from kvframework.api.layout import GroupDesc, MemoryLayoutDesc
from kvframework.api.transport import ArenaRange, LoadPlan, Registration
from kvframework.errors import BadLayout, DeadlineExceeded, LeaseUnknown, NotRegistered, ServerGone
from tests.core.defaults.gather_engine import CHUNK, Engine, both_ways

__all__ = ["both_ways"]
pytestmark = pytest.mark.torch


def test_a_transport_without_a_registration_refuses_transfers():
    engine = Engine()
    engine.transport.close()
    engine.transport.close()
    with pytest.raises(NotRegistered):
        engine.store()
    assert engine.link.calls == []


def test_objects_in_another_form_than_canonical_are_refused():
    engine = Engine()
    desc = MemoryLayoutDesc(CHUNK, (GroupDesc((64,), "uint8", form="packed"),))
    with pytest.raises(BadLayout, match="packed"):
        engine.transport.on_registered(Registration(1, 0, bytes(16), engine.registration.layout, desc), engine.layout)


@pytest.mark.parametrize("method", ["prepare_store", "commit_store"])
@pytest.mark.parametrize("error", [ServerGone("gone"), DeadlineExceeded("late"), LeaseUnknown("no lease")])
def test_a_failing_server_is_a_store_that_dropped(method, error, caplog):
    engine = Engine()
    engine.link.failing[method] = error
    with caplog.at_level(logging.WARNING, "kvf_cpu_gather"):
        for _ in range(5):
            future = engine.store()
            outcome = future.result()
            assert not outcome.ok
            assert (outcome.dropped + outcome.unknown, outcome.error) == (2, error.code)
    assert len(caplog.records) == 1
    assert error.code in caplog.text
    assert engine.link.open_leases == 0


@pytest.mark.parametrize("method", ["prepare_load", "commit_load"])
def test_a_failing_server_is_a_load_that_missed(method):
    engine = Engine()
    engine.store()
    engine.link.failing[method] = DeadlineExceeded("late")
    outcome = engine.load().result()
    assert (outcome.ok, outcome.error) == (False, DeadlineExceeded.code)


def test_a_miss_and_a_lost_pin_are_no_hit_and_logged_once(caplog):
    engine = Engine()
    assert not engine.load().result().ok
    engine.store()
    engine.link.held = False
    assert not engine.load().result().ok
    (record,) = caplog.records
    assert "was not loaded: missing" in record.getMessage()


def test_an_arena_that_is_not_mapped_is_a_miss_that_says_why(caplog):
    engine = Engine(path="arena")
    engine.link.mapped = None
    assert not engine.store().result().ok
    assert not engine.load().result().ok
    assert "[kvf_cpu_gather.no_arena]" in caplog.text
    assert engine.link.calls == []


def test_objects_that_are_gone_when_the_wire_is_free_are_a_miss_that_says_why(caplog):
    engine = Engine(path="wire")
    place = ArenaRange(0, 0, 0, engine.link.desc.groups[0].nbytes)
    given_back = []
    plan = LoadPlan(
        memoryview(b""),
        (place, msgspec.structs.replace(place, chunk=1)),
        commit=pytest.fail,
        abort=lambda: given_back.append("lease"),
        receive=lambda _: Future.resolved([]),
    )
    engine.link.prepare_load = lambda _: Future.resolved(plan)
    outcome = engine.load().result()
    assert (outcome.ok, outcome.error) == (False, "kvf_cpu_gather.pins_lost")
    assert "[kvf_cpu_gather.pins_lost]" in caplog.text
    assert given_back == ["lease"]


class Event:
    def __init__(self, error=None):
        self.waited = 0
        self.error = error

    def synchronize(self):
        self.waited += 1
        if self.error:
            raise self.error


def test_the_event_is_waited_for_before_memory_is_touched():
    engine, event = Engine(), Event()
    engine.store(event=event)
    engine.load(event=event)
    assert event.waited == 2
    failing = Engine()
    assert not failing.store(event=Event(RuntimeError("device lost"))).result().ok
    assert failing.link.calls == ["prepare_store", "abort_store"]
    with pytest.raises(KeyboardInterrupt):
        failing.store(event=Event(KeyboardInterrupt()))
    assert failing.link.open_leases == 0
