"""The bound on a plugin's call is of its own time: a call that waits for a core is not one that hangs."""

from __future__ import annotations

import threading
import time

import pytest

from kvframework import overdue
from kvframework.errors import PluginBroken
from kvframework.overdue import bounded, timed
from tests.support.waiting import wait_until

BOUND_S = 0.3


class Starved:
    """What the kernel says of a thread that gets a core for a part of its time."""

    def __init__(self, share: float) -> None:
        self.share, self.began = share, time.monotonic()

    def __call__(self, _thread: int) -> float:
        return (time.monotonic() - self.began) * (1 - self.share)


def overdue_after(monkeypatch: pytest.MonkeyPatch, share: float) -> float:
    """Return the seconds after which a call that does not return is overdue."""
    monkeypatch.setattr(overdue, "QUICK_S", BOUND_S)
    monkeypatch.setattr(overdue, "runnable_s", Starved(share))
    said: list[PluginBroken] = []
    began = time.monotonic()
    with bounded(said.append), timed("codec.stuck", "its probe"):
        wait_until(lambda: bool(said), 30, "the end of its time")
    assert "its probe has not returned within 0.3 s" in str(said[0])
    return time.monotonic() - began


def test_a_call_that_waits_for_a_core_has_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert overdue_after(monkeypatch, 1.0) >= BOUND_S
    assert overdue_after(monkeypatch, 0.25) >= 4 * BOUND_S * 0.9


def test_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    assert overdue_after(monkeypatch, 0.0) >= overdue.MOST_TIMES * BOUND_S


def test_a_call_that_returned_is_never_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overdue, "QUICK_S", BOUND_S)
    monkeypatch.setattr(overdue, "runnable_s", Starved(0.5))
    said: list[PluginBroken] = []
    with bounded(said.append), timed("codec.slow", "its probe"):
        end = time.monotonic() + 1.5 * BOUND_S
        wait_until(lambda: time.monotonic() > end, 30, "three quarters of its time")
    wait_until(lambda: not any(each.name == "kvf-overdue" for each in threading.enumerate()), 30, "its end")
    assert not said


def test_what_the_kernel_says() -> None:
    assert overdue.runnable_s(threading.get_native_id()) >= 0.0
    assert overdue.runnable_s(0) == 0.0
