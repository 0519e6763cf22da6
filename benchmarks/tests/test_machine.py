"""The benches' readings of /proc: the load by others, and the cost of a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvframework_bench.machine import CpuSeconds, Load, LoadMeter, busy_seconds, cores, describe_machine
from kvframework_bench.server import has_mapped, idle_cores, parse_status, resident

STAT = """cpu  300 20 100 5000 700 3 7 70 11 0
cpu0 150 10 50 2500 350 1 3 35 5 0
intr 1
"""
STATUS = """Name:\tpython
VmRSS:\t  999999 kB
RssAnon:\t   26000 kB
RssFile:\t   17000 kB
RssShmem:\t   65536 kB
"""


def test_idle_and_waiting_are_not_busy_and_guests_count_once() -> None:
    assert busy_seconds(STAT, 100) == pytest.approx((300 + 20 + 100 + 3 + 7 + 70) / 100)


def test_own_time_is_not_that_of_others() -> None:
    before, after = CpuSeconds(10.0, 100.0, 5.0), CpuSeconds(14.0, 107.0, 6.0)
    assert before.others_until(after) == pytest.approx(1.5)
    assert before.others_until(CpuSeconds(14.0, 100.5, 6.0)) == 0


@pytest.mark.parametrize(("before", "during", "busy"), [(0.0, 0.02, False), (0.5, 0.0, True), (0.0, 0.5, True)])
def test_a_machine_is_busy_if_others_use_it_before_or_meanwhile(before: float, during: float, busy: bool) -> None:
    assert Load.of(3.0, before, during).busy is busy


def test_a_meter_reads_this_machine() -> None:
    load = LoadMeter(0.05).finish()
    assert load.cores == cores()
    assert 0 <= load.others_before <= os.cpu_count() * 1.5  # type: ignore[operator]


_UNWATCHED = """
import signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as a process that does not care for its children leaves it to its own
from kvframework_bench.machine import CpuSeconds, LoadMeter
LoadMeter(0.0)
start = CpuSeconds.now()
subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.5: pass"], check=True)
print(CpuSeconds.now().own - start.own)
"""


def test_the_time_of_children_is_own_time_even_where_nobody_waits_for_them() -> None:
    done = subprocess.run([sys.executable, "-c", _UNWATCHED], capture_output=True, text=True, timeout=240, check=True)
    assert float(done.stdout) > 0.4


def test_a_servers_memory_leaves_shared_memory_out() -> None:
    memory = parse_status(STATUS)
    assert memory.excluding_shared == 43000 * 1024
    assert memory.shmem == 64 << 20


def test_a_status_without_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="RssAnon"):
        parse_status("Name:\tkthreadd\n")


def test_this_process_is_read() -> None:
    pid = os.getpid()
    assert resident(pid).anon > 1 << 20
    assert has_mapped(pid, "libc")
    assert not has_mapped(pid, "no such library")
    assert idle_cores(pid, 0.01) >= 0


def test_the_machine_has_a_description() -> None:
    machine = describe_machine()
    assert machine.cores >= 1
    assert machine.memory_bytes > 1 << 28
    assert {"kvframework", "pyzmq", "msgspec"} <= set(machine.packages)
