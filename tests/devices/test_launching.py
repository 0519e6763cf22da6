"""What is launched when, on a driver whose copies end as the test says."""

from __future__ import annotations

import array
import os
import socket
import sys
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvf_devices.copier import Job, Launcher, Pinning
from kvf_devices.messages import Start
from kvf_devices.supervisor import CopierSupervisor
from kvframework.api.copy_plans import CopyBatch
from kvframework.errors import DeviceError, DeviceLost
from kvframework.supervise.child import NamedCall
from tests.devices.test_planning import DESC, LAYOUT
from tests.support.waiting import wait_until

LIMIT = 100


class Event:
    def __init__(self) -> None:
        self.done = False
        self.error: DeviceError | None = None


class Driver:
    """Streams in order: `finish` ends the oldest copy of a stream. Only what the launcher calls."""

    def __init__(self) -> None:
        self.streams: dict[str, list[object]] = {"loads": [], "stores": []}
        self.copied: list[tuple[str, int]] = []
        self.waits: list[tuple[str, Event]] = []
        self.fail_copy: DeviceError | None = None
        self.created = 0

    def create_stream(self, *, loads: bool) -> str:
        return "loads" if loads else "stores"

    def create_event(self) -> Event:
        self.created += 1
        return Event()

    def wait(self, stream: str, event: Event) -> None:
        assert event.done, "only what was reached is launched"
        self.waits.append((stream, event))

    def copy(self, stream: str, batch: CopyBatch, *, to_arena: bool) -> None:
        assert to_arena == (stream == "stores")
        if self.fail_copy is not None:
            error, self.fail_copy = self.fail_copy, None
            raise error
        self.copied.append((stream, batch.nbytes))
        self.streams[stream].append(batch.nbytes)

    def record(self, event: Event, stream: str) -> None:
        event.done, event.error = False, None
        self.streams[stream].append(event)

    def reached(self, event: Event) -> bool:
        if event.error is not None:
            raise event.error
        return event.done

    def in_flight(self, stream: str) -> int:
        return sum(each for each in self.streams[stream] if isinstance(each, int))

    def finish(self, stream: str, error: DeviceError | None = None) -> None:
        """The stream comes to its next event."""
        while self.streams[stream]:
            each = self.streams[stream].pop(0)
            if isinstance(each, Event):
                each.done, each.error = True, error
                return


def batches(*sizes: int) -> Iterator[CopyBatch]:
    one = array.array("Q", [0])
    return iter([CopyBatch(one, one, one, one, (), size) for size in sizes])


class Setting:
    def __init__(self) -> None:
        self.driver = Driver()
        self.done: list[Job] = []
        self.now = 0.0
        self.usable = 1000
        self.launcher = Launcher(
            self.driver, limit=LIMIT, usable=lambda: self.usable, done=self.done.append, clock=lambda: self.now
        )  # type: ignore[arg-type]

    def job(self, number: int, *sizes: int, is_store: bool = True, event: Event | None = None, end: int = 0) -> Job:
        job = Job(number, number, is_store, batches(*sizes), event, end)
        self.launcher.add(job)
        return job


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_bytes_in_flight_are_bounded_each_way(setting: Setting) -> None:
    setting.job(1, 60, 60, 60)
    setting.job(2, 30, is_store=False)
    setting.launcher.step()
    # The one that reaches the bound is the last.
    assert setting.driver.in_flight("stores") == 120
    assert setting.driver.in_flight("loads") == 30, "loads do not wait for stores"
    setting.driver.finish("loads")
    setting.driver.finish("stores")
    setting.launcher.step()
    assert [job.number for job in setting.done] == [2]
    assert setting.driver.in_flight("stores") == 120
    for _ in range(2):
        setting.driver.finish("stores")
    setting.launcher.step()
    assert [job.number for job in setting.done] == [2, 1]
    assert not setting.launcher.busy
    assert setting.driver.created <= 4, "events are used again"


def test_a_job_whose_event_is_not_reached_holds_up_nobody(setting: Setting) -> None:
    event = Event()
    setting.job(1, 500, event=event)
    setting.job(2, 10)
    setting.launcher.step()
    assert setting.driver.copied == [("stores", 10)]
    event.done = True
    setting.driver.finish("stores")
    setting.launcher.step()
    assert setting.driver.copied == [("stores", 10), ("stores", 500)]
    assert setting.driver.waits == [("stores", event)]


def test_a_job_waits_until_its_part_of_the_arena_is_pinned(setting: Setting) -> None:
    setting.usable = 10
    setting.job(1, 5, end=11)
    setting.launcher.step()
    assert setting.driver.copied == []
    setting.usable = 11
    setting.launcher.step()
    assert setting.driver.copied == [("stores", 5)]


def test_a_cancelled_job_ends_with_what_was_launched(setting: Setting) -> None:
    job = setting.job(1, 60, 60, 60)
    setting.launcher.step()
    setting.launcher.cancel(number=1)
    setting.launcher.step()
    assert setting.done == []
    setting.driver.finish("stores")
    setting.launcher.step()
    assert setting.done == [], "one launch is still under way"
    setting.driver.finish("stores")
    setting.launcher.step()
    assert setting.done == [job]
    assert (len(setting.driver.copied), job.cancelled, job.exhausted) == (2, True, False)


def test_an_error_ends_its_job_once_the_stream_is_past_it(setting: Setting) -> None:
    setting.driver.fail_copy = DeviceError("no")
    failed, other = setting.job(1, 10, 10), setting.job(2, 10)
    setting.launcher.step()
    assert setting.done == []
    setting.driver.finish("stores")
    setting.launcher.step()
    assert setting.done == [failed]
    setting.driver.finish("stores", DeviceError("later"))
    setting.launcher.step()
    assert [str(job.error.fact) for job in (failed, other) if job.error] == ["no", "later"]


def test_a_lost_device_ends_everything(setting: Setting) -> None:
    setting.driver.fail_copy = DeviceLost("gone")
    setting.job(1, 10)
    with pytest.raises(DeviceLost):
        setting.launcher.step()


def test_the_oldest_launch_is_known(setting: Setting) -> None:
    setting.job(1, 10)
    setting.launcher.step()
    setting.now = 3.0
    setting.job(2, 10, is_store=False)
    setting.launcher.step()
    setting.now = 4.0
    assert setting.launcher.oldest_s() == 4.0
    setting.driver.finish("stores")
    setting.launcher.step()
    assert setting.launcher.oldest_s() == 1.0


class Launching(RuleBasedStateMachine):
    """Every job ends exactly once, never while a launch of it is under way, and the bounds hold."""

    @initialize()
    def begin(self) -> None:
        self.setting = Setting()
        self.jobs: list[Job] = []

    @rule(sizes=st.lists(st.integers(1, 90), max_size=5), is_store=st.booleans(), has_event=st.booleans())
    def add(self, sizes: list[int], is_store: bool, has_event: bool) -> None:
        event = Event() if has_event else None
        self.jobs.append(self.setting.job(len(self.jobs), *sizes, is_store=is_store, event=event))

    @rule(data=st.data())
    @precondition(lambda self: self.jobs)
    def cancel(self, data: st.DataObject) -> None:
        self.setting.launcher.cancel(number=data.draw(st.integers(0, len(self.jobs) - 1)))

    @rule(data=st.data())
    @precondition(lambda self: self.jobs)
    def reach(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.jobs))
        if job.event is not None:
            job.event.done = True

    @rule(stream=st.sampled_from(["loads", "stores"]), fails=st.booleans())
    def finish(self, stream: str, fails: bool) -> None:
        self.setting.driver.finish(stream, DeviceError("failed") if fails else None)

    @rule()
    def step(self) -> None:
        self.setting.launcher.step()

    @invariant()
    def bounds_hold(self) -> None:
        for stream in ("loads", "stores"):
            assert self.setting.driver.in_flight(stream) < LIMIT + 90
        done = self.setting.done
        assert len(done) == len({job.number for job in done})
        assert all(not job.launched and job.stopped for job in done)

    def teardown(self) -> None:
        for job in self.jobs:
            if job.event is not None:
                job.event.done = True
        for _ in range(2000):
            if not self.setting.launcher.busy:
                break
            self.setting.launcher.step()
            self.setting.driver.finish("loads")
            self.setting.driver.finish("stores")
        assert {job.number for job in self.setting.done} == {job.number for job in self.jobs}


TestLaunching = Launching.TestCase
TestLaunching.settings = settings(max_examples=60, stateful_step_count=40)


class Unpinnable(Driver):
    def pin(self, offset: int, nbytes: int) -> None:
        raise ValueError("a bug in the plugin")


def test_whatever_fails_at_pinning_ends_the_copier_and_lets_no_copy_wait() -> None:
    pinning = Pinning(Unpinnable(), 4096)  # type: ignore[arg-type]
    pinning.start()

    def failed() -> bool:
        try:
            pinning.check()
        except DeviceError as error:
            return "a bug in the plugin" in str(error)
        return False

    wait_until(failed, what="the failure")
    assert pinning.usable() == 0


def test_a_descriptor_that_could_not_be_sent_is_kept_to_be_closed() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    reading, writing = os.pipe()
    os.close(reading)
    outbox = deque([(b"message", writing)])
    with ours:
        assert not CopierSupervisor._send_some(SimpleNamespace(_outbox=outbox), ours, bytearray(), True)  # type: ignore[arg-type]
    assert list(outbox) == [(b"message", writing)]
    os.close(writing)


def test_a_copier_that_can_not_be_started_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path, object()])
    supervisor = CopierSupervisor(Start(NamedCall("m:create", "m:Options", b""), "gpu-1"), 0, stall_s=60.0)
    try:
        for _ in range(2):
            with pytest.raises(DeviceLost, match="cannot be started"):
                supervisor.open(LAYOUT, DESC, (), None).opened.result(20.0)
    finally:
        supervisor.stop()
        assert supervisor.join(20.0)
