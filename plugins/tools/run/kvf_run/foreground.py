"""How the engine runs: with a terminal as a child that this process waits for, else in place of this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NoReturn

import typer

# A shell's statuses of a command that cannot be run.
NOT_FOUND, NOT_EXECUTABLE = 127, 126
# A terminal sends these to the engine itself, as one of the group in front.
_OF_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def has_terminal() -> bool:
    """Whether a person sits in front: input and errors are a terminal."""
    return os.isatty(0) and os.isatty(2)


def become(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by the command; signals, streams and the exit code are its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], [*command], dict(environ))  # noqa: S606
    except OSError as error:
        _refuse(command, error)


def stay_in_front(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command as a child in the same process group, pass signals on, and return how it ended: its status, or
    minus the signal's number. In the main thread."""
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: FrameType | None) -> None:
        if child is not None:
            child.send_signal(number)

    before = {number: signal.signal(number, signal.SIG_IGN) for number in _OF_TERMINAL}
    before |= {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        child = subprocess.Popen(command, env=dict(environ), preexec_fn=_with_default_signals)
    except OSError as error:
        _refuse(command, error)
    code = child.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    return code


def end_like(code: int) -> NoReturn:
    """End this process as a child has ended, by the same signal if by one."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code if code >= 0 else 128 - code)


def _with_default_signals() -> None:
    """In the child: an ignored signal would stay ignored over the exec."""
    for number in _OF_TERMINAL:
        signal.signal(number, signal.SIG_DFL)


def _refuse(command: Sequence[str], error: OSError) -> NoReturn:
    missing = isinstance(error, FileNotFoundError)
    what = "command not found" if missing else error.strerror
    typer.echo(f"kvframework: {command[0]}: {what}", err=True)
    sys.exit(NOT_FOUND if missing else NOT_EXECUTABLE)
