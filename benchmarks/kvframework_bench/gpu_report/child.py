"""One step of the report in a separate process group, with a bound: a hang and a crash are results like any other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from kvframework.api.process import how_ended
from kvframework.text import short_number

# To end by itself after SIGTERM, and to be gone after SIGKILL: a driver may hold a process in the kernel.
_TERM_S, _KILL_S = 5.0, 5.0
# Of each stream that much is kept: the end of it.
MOST_BYTES = 4 << 20


class Ran(msgspec.Struct, frozen=True):
    """The end of a process: its status (None: it had to be killed), the reason if it did not end by itself, the
    seconds that it took, and what it printed."""

    status: int | None
    reason: str
    seconds: float
    out: str
    err: str


def run_bounded(
    command: Sequence[str], limit_s: float, *, folder: Path | None = None, variables: Mapping[str, str] | None = None
) -> Ran:
    """Run a command, and end it with all processes of its group after `limit_s` seconds, or on an interrupt, which is
    raised again. Blocks a few seconds longer than that at most."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=folder,
                env=os.environ | dict(variables or {}),
                start_new_session=True,
            )
        except OSError as error:
            return Ran(None, f"the step could not be started: {error.strerror or error}", 0.0, "", "")
        try:
            status: int | None = process.wait(limit_s)
            reason = "" if status is not None and status >= 0 else f"the step ended {how_ended(status or 0)}"
        except subprocess.TimeoutExpired:
            status, reason = None, f"the step did not end within {short_number(limit_s)} s{_ended(process)}"
        except BaseException:
            _ended(process)
            raise
        finally:
            # What it started and left behind.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        return Ran(status, reason, round(time.monotonic() - started, 1), _kept(out), _kept(err))


def _ended(process: subprocess.Popen[bytes]) -> str:
    """End the group; returns the rest of the sentence for a process that stays, else ""."""
    for number, patience in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        return ""
    return ", and SIGKILL does not end the process, which is blocked in the kernel"


def _kept(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - MOST_BYTES, 0))
    return file.read(MOST_BYTES).decode(errors="replace")
