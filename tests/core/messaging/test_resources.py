"""What a process may still take of the kernel."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys

import pytest
import zmq

from kvframework.errors import OutOfResources
from kvframework.messaging import polling as counts
from kvframework.messaging.client import connection
from tests.core.messaging.lab import Lab
from tests.support.processes import descriptors


def test_open_descriptors_are_counted_with_and_without_the_kernels_help(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = counts.descriptors_in_use()
    monkeypatch.setattr(os, "stat", lambda _: os.stat_result((0,) * 10))  # as before Linux 6.2
    assert counts.descriptors_in_use() == counted
    with contextlib.ExitStack() as stack:
        for _ in range(7):
            stack.callback(os.close, os.dup(0))
        assert counts.descriptors_in_use() == counted + 7


def test_none_left_even_to_count_them_is_none_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "stat", none_left)
    assert counts.descriptors_in_use() == counts.descriptor_limit()
    with pytest.raises(OutOfResources, match="fewer than 1 of"):
        counts.need(descriptors=1)


def test_what_is_needed_is_there_or_it_is_said() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    counts.need(descriptors=1, threads=2)
    with pytest.raises(OutOfResources, match=f"of its {limit} open files left"):
        counts.need(descriptors=limit)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (OSError(errno.EMFILE, "Too many open files"), True),
        (zmq.ZMQError(errno.EMFILE), True),
        (RuntimeError("can't start new thread"), True),
        (MemoryError(), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (RuntimeError("another"), False),
    ],
)
def test_errors_that_say_that_something_has_run_out(error: Exception, is_one: bool) -> None:
    assert (counts.as_out_of_resources(error) is not None) == is_one


def test_a_connection_takes_far_less_than_is_asked_for(lab: Lab) -> None:
    command = [sys.executable, "-m", "tests.core.messaging.client_program", lab.endpoint, "stay"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "done\n"
            taken = [what for what in descriptors(process.pid).values() if what.startswith(("socket:", "anon_inode:"))]
        finally:
            process.kill()
    assert 8 <= len(taken) <= connection._FOR_A_CONTEXT["descriptors"] // 2
