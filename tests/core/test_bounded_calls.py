"""The bound on a plugin's call."""

from __future__ import annotations

import sys
import threading

import pytest

from kvframework import bounded_calls
from kvframework.bounded_calls import bounded, named_at, timed
from kvframework.errors import PluginBroken
from tests.support.processes import ran
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_calls, "BOUND_S", 0.3)


def test_a_call_that_does_not_return_is_overdue() -> None:
    said: list[PluginBroken] = []
    with bounded(said.append), named_at("kvf.toml: [hasher]"), timed("hasher.stuck", "its probe"):
        wait_until(lambda: bool(said), 30, "the end of its time")
    assert "kvf.toml: [hasher]: hasher.stuck: its probe has not returned within 0.3 s" in str(said[0])


def test_a_call_that_returned_is_never_overdue() -> None:
    said: list[PluginBroken] = []
    before = threading.active_count()
    with bounded(said.append), timed("codec.quick", "its probe"):
        pass
    with timed("codec.slow", "its probe"):  # of a thread without a bound
        assert threading.active_count() <= before + 1
    wait_until(lambda: threading.active_count() <= before, 30, "its end")
    assert not said


def test_a_process_that_a_call_forked_does_not_return_from_it() -> None:
    program = (
        "import os; from kvframework.bounded_calls import bounded, timed\n"
        "with bounded(print), timed('tier.forks', 'create'): child = os.fork()\n"
        "print('here', os.waitpid(child, 0)[1] != 0)"
    )
    done = ran(sys.executable, "-c", program)
    assert done.stdout == "here True\n"
    assert done.stderr.endswith("error: tier.forks: create returned in a process that it has forked, which ends\n")


OVERLAPPING = """
import os
from threading import Event, Thread
from kvframework.bounded_calls import bounded, timed
inside, ended = Event(), Event()
def other():
    with bounded(print), timed("other", "create"):
        inside.set(); ended.wait(); print("of a plugin")
with bounded(print), timed("first", "create"):
    thread = Thread(target=other); thread.start(); inside.wait()
print("of the command")
ended.set(); thread.join()
print("at the end", flush=True)
os._exit(7)
"""


def test_overlapping_calls_leave_the_process_its_output_and_free_to_end() -> None:
    done = ran(sys.executable, "-c", OVERLAPPING, code=7)
    assert (done.stdout, done.stderr) == ("of the command\nat the end\n", "of a plugin\n")
