"""Isolated runs of a plugin's code: in a fresh interpreter, with a deadline.

The report goes, line by line, into a file that both processes hold: lines before a crash or a hang are not lost. Used
by the process of a command; blocks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from kvframework.supervise.state import how_ended

_TAIL_BYTES = 2000


@dataclass(frozen=True)
class Ran:
    """The result of a run: the lines of its report, the reason of its end ("" if regular), and the end of its
    output."""

    lines: list[bytes]
    ended: str
    printed: str


def run_isolated(
    module: str, request: bytes, *, deadline_s: float, arguments: Sequence[str] = (), function: str = "main"
) -> Ran:
    """Calls `function` of `module` with the arguments FD and `arguments` and `request` as standard input, and kills it,
    with all its child processes, after `deadline_s` seconds. FD is the descriptor of the report. The run has this
    process's module search path, and ends without the interpreter's own end: a native library's thread that asks for
    the interpreter then aborts the process, and a plugin's thread that does not end would keep it alive."""
    program = (
        f"import os, sys; sys.path[:] = {sys.path!r}; from {module} import {function}; {function}(); "
        "sys.stdout.flush(); sys.stderr.flush(); os._exit(0)"
    )
    with (
        tempfile.TemporaryFile() as report,
        tempfile.TemporaryFile() as printed,
        tempfile.TemporaryFile() as wanted,
    ):
        wanted.write(request)
        wanted.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(report.fileno()), *arguments],
            stdin=wanted,
            stdout=printed,
            stderr=printed,
            pass_fds=[report.fileno()],
            start_new_session=True,
        )
        try:
            ended = _ended(process.wait(deadline_s))
        except subprocess.TimeoutExpired:
            ended = f"did not end within {deadline_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said = _all(printed.fileno())[-_TAIL_BYTES:].decode(errors="replace")
        return Ran(_all(report.fileno()).splitlines(), ended, said)


def _ended(status: int) -> str:
    if status < 0:
        return f"was ended {how_ended(status)}"
    return f"ended the interpreter with status {status}" if status else ""


def _all(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
