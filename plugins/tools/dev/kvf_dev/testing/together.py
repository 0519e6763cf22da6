"""Concurrent calls for the kits, with their errors raised in the test's own thread."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

import pytest

from kvf_dev.testing.overdue import stacks

T = TypeVar("T")

# Seconds. Frequent switches expose state that threads must not share, and values that are visible too early.
_SWITCH_S = 1e-6

# Steps of a call between which threads change. A call of more goes on without.
_STEPS = 2000


def stepped(work: Callable[[], T]) -> T:
    """Return what `work` returns. Between its steps, instructions of Python, other threads get their turn: what a call
    keeps in its object for an instant is seen by the others."""
    left = _STEPS

    def step(frame: FrameType, event: str, _arg: object) -> Callable[..., Any] | None:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            time.sleep(0)
        return step if left > 0 else None

    before = sys.gettrace()
    sys.settrace(step)
    try:
        return work()
    finally:
        sys.settrace(before)


def together(works: Sequence[Callable[[], object]], within_s: float) -> None:
    """Run `works` at the same time, with frequent switches between them. Raises the first error that one of them
    raised; fails if one does not end within `within_s` seconds."""
    raised: list[BaseException] = []
    begin = threading.Barrier(len(works), timeout=within_s)

    def run(work: Callable[[], object]) -> None:
        try:
            begin.wait()
            work()
        except BaseException as error:  # noqa: BLE001  raised again in the test's own thread
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + within_s
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
    finally:
        sys.setswitchinterval(before)
    if raised:
        raise raised[0]
    if running := [thread for thread in threads if thread.is_alive()]:
        pytest.fail(f"a call does not end within {within_s:g} s:\n{stacks(running)}", pytrace=False)
