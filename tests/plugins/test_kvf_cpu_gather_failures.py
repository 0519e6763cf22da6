"""The transport `cpu_gather`: what it refuses, and that what fails beside it is a miss that leaves nothing behind."""

from __future__ import annotations

import logging

import msgspec
import pytest

torch = pytest.importorskip("torch")

from kvf_cpu_gather.throttle import ThrottledLog  # noqa: E402
from kvframework.api import (  # noqa: E402
    ArenaRange,
    GroupDesc,
    MemoryLayoutDesc,
    MessagingFuture,
    Registration,
    RetrievePlan,
)
from kvframework.errors import (  # noqa: E402
    BadBlockIds,
    BadLayout,
    BadRange,
    DeadlineExceeded,
    LeaseUnknown,
    NotRegistered,
    ServerGone,
)
from tests.plugins.gather_engine import BLOCKS, CHUNK, IDS, Engine, both_ways, key  # noqa: E402

__all__ = ["both_ways"]
pytestmark = pytest.mark.torch

BAD_IDS = {
    "too high": [[5, 2, 7, BLOCKS]],
    "negative": [[5, 2, -1, 8]],
    "too few": [[5, 2, 7]],
    "too many": [[5, 2, 7, 8, 9]],
    "no list for the group": [],
    "a list too many": [[5, 2, 7, 8], [1]],
    "no integers": [["a", "b", "c", "d"]],
}


@pytest.mark.parametrize("ids", BAD_IDS.values(), ids=BAD_IDS)
def test_bad_block_ids_are_refused_before_anything_is_reserved(ids):
    engine = Engine()
    for submit in (engine.store, engine.retrieve):
        with pytest.raises(BadBlockIds):
            submit(ids)
    assert engine.link.calls == []


def test_wrong_ranges_counts_and_order_of_calls_are_refused():
    engine = Engine()
    for start, end in ((0, CHUNK + 1), (1, CHUNK + 1), (CHUNK, CHUNK)):
        with pytest.raises(BadRange):
            engine.store(cache_key=key(start, end))
    for skip in (-1, 2 * CHUNK + 1):
        with pytest.raises(BadRange):
            engine.retrieve(skip=skip)
    with pytest.raises(BadBlockIds, match="blocks_in_chunk"):
        engine.transport.submit_store("r", key(), 1, engine.kv_caches, IDS, None, [3])
    engine.transport.close()
    engine.transport.close()
    with pytest.raises(NotRegistered):
        engine.store()
    assert engine.link.calls == []


def test_objects_in_another_form_than_canonical_are_refused():
    engine = Engine()
    desc = MemoryLayoutDesc(CHUNK, (GroupDesc((64,), "uint8", form="packed"),))
    with pytest.raises(BadLayout, match="packed"):
        engine.transport.register(Registration(1, 0, bytes(16), engine.registration.layout, desc), engine.layout)


@pytest.mark.parametrize("method", ["prepare_store", "commit_store"])
@pytest.mark.parametrize("error", [ServerGone("gone"), DeadlineExceeded("late"), LeaseUnknown("no lease")])
def test_a_failing_server_is_a_store_that_dropped(method, error, caplog):
    engine = Engine()
    engine.link.failing[method] = error
    with caplog.at_level(logging.WARNING, "kvf_cpu_gather"):
        for _ in range(5):
            future = engine.store()
            assert future.result() is False
            assert future.detail.dropped + future.detail.unknown == 2
            assert not future.detail.ok
    assert len(caplog.records) == 1
    assert error.code in caplog.text
    assert engine.link.open_leases == 0


def test_an_abort_that_fails_too_stays_silent():
    engine = Engine()
    engine.link.failing = {"commit_store": ServerGone("gone"), "abort_store": ServerGone("gone")}
    assert engine.store().result() is False


@pytest.mark.parametrize("method", ["prepare_retrieve", "commit_retrieve"])
def test_a_failing_server_is_a_load_that_missed(method):
    engine = Engine()
    engine.store()
    engine.link.failing[method] = DeadlineExceeded("late")
    assert engine.retrieve().result() is False


def test_a_miss_and_a_lost_pin_are_false_and_told_once(caplog):
    engine = Engine()
    assert engine.retrieve().result() is False
    engine.store()
    engine.link.held = False
    assert engine.retrieve().result() is False
    (record,) = caplog.records
    assert "was not loaded: the cache does not hold all of it, or the pin on it lapsed" in record.getMessage()


def test_an_arena_that_is_not_mapped_is_a_miss_that_says_why(caplog):
    engine = Engine(path="arena")
    engine.link.mapped = None
    assert engine.store().result() is False
    assert engine.retrieve().result() is False
    assert "[kvf_cpu_gather.no_arena]" in caplog.text
    assert engine.link.calls == []


def test_objects_that_are_gone_when_the_wire_is_free_are_a_miss_that_says_why(caplog):
    engine = Engine(path="wire")
    place = ArenaRange(0, 0, 0, engine.link.desc.groups[0].nbytes)
    ranges = (place, msgspec.structs.replace(place, chunk=1))
    engine.link.prepare_retrieve = lambda *_: MessagingFuture.resolved(RetrievePlan(True, "lease", ranges))
    engine.link.retrieve_chunks = lambda *_: MessagingFuture.resolved([])
    given_back = []
    engine.link.commit_retrieve = lambda lease: MessagingFuture.resolved(given_back.append(lease) is None)
    assert engine.retrieve().result() is False
    assert "[kvf_cpu_gather.pins_lost]" in caplog.text
    assert given_back == ["lease"]


def test_ranges_that_cannot_be_meant_are_a_failure_and_end_the_lease(caplog):
    engine = Engine()
    engine.store()
    for digest_and_group, place in list(engine.link.objects.items()):
        engine.link.objects[digest_and_group] = type(place)(place.chunk, 0, len(engine.link.mapped) - 8, place.length)
    before = engine.tokens(IDS[0]).clone()
    assert engine.retrieve().result() is False
    assert torch.equal(engine.tokens(IDS[0]), before)
    assert engine.link.open_leases == 0
    assert "the server names" in caplog.text


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
    engine.retrieve(event=event)
    assert event.waited == 2
    failing = Engine()
    assert failing.store(event=Event(RuntimeError("device lost"))).result() is False
    assert failing.link.calls == ["prepare_store", "abort_store"]
    with pytest.raises(KeyboardInterrupt):
        failing.store(event=Event(KeyboardInterrupt()))
    assert failing.link.open_leases == 0


def test_the_log_is_limited_per_reason_and_counts_what_it_left_out(caplog):
    now = [0.0]
    quiet = ThrottledLog(logging.getLogger("quiet"), interval_s=10.0, clock=lambda: now[0])
    for _ in range(3):
        quiet.warning("a", "first")
    quiet.warning("b", "second")
    now[0] = 10.0
    quiet.warning("a", "third")
    assert [record.getMessage() for record in caplog.records] == [
        "first",
        "second",
        "third (2 more since the last such line)",
    ]
