"""`kvframework run`: an engine's command behind it runs with the cache.

How the engine runs: with a terminal as a child that this process waits for, else in place of this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from kvf_run.engine import connected, environment, examined
from kvf_run.node_server import Wanted, ensure_server
from kvf_run.stats import read_stats, summary
from kvframework.api.command import Overrides, examples
from kvframework.api.plugin import ByteSize
from kvframework.client import server_endpoint
from kvframework.errors import ConfigFieldError, KVFrameworkError

app = typer.Typer()


@app.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        "kvframework run -- vllm serve MODEL",
        "kvframework run --l1 32GiB -- python -m sglang.launch_server --model-path MODEL",
        "kvframework run -- python script.py        a script with transformers or vllm.LLM",
        "kvframework run --l1 8GiB                  the server alone",
        "kvframework stop                           stop the server that `run` started",
    ),
)
def run(
    engine: Annotated[list[str] | None, typer.Argument(metavar="[-- ENGINE ...]", help="The engine's command.")] = None,
    l1: Annotated[
        str | None, typer.Option(help="Memory for the cache (L1), such as 8GiB. Default: 25 % of available memory.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file for a server that the command starts.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="The server's endpoint. Default: $KVFRAMEWORK_ENDPOINT, else this user's.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Run an engine with the cache: connect it to the server of this user, which is started if there is none.

    The server outlives the engine, so that the next one finds what this one has stored. It ends after 30 minutes
    without an engine. Options that connect vLLM or SGLang are added to the command; signals, standard streams and the
    exit code are the engine's own. Without a server the engine runs as well, and computes.
    """
    chosen = server_endpoint(endpoint, config)
    command = engine or []
    # Before a server is started: a contradiction is an error.
    asked = connected(command, examined(command), chosen) if command else None
    try:
        capacity = ByteSize.parse(l1) if l1 is not None else None
    except ValueError as error:
        raise ConfigFieldError(str(error), where="--l1", hint="write 8GiB") from None
    try:
        found = ensure_server(Wanted(chosen, capacity, config, overrides or ()))
    except KVFrameworkError as error:
        if asked is None:
            raise
        _say(f"no server is available, so the engine runs without the cache: {error}")
    else:
        for note in found.notes:
            _say(note)
        if found.started and os.getpid() == 1:
            _say("this command is the container's first process, so the server ends with it")
    if asked is None:
        return
    for note in asked.notes:
        _say(note)
    environ = environment(chosen)
    if not has_terminal():
        become(asked.command, environ)
    code = stay_in_front(asked.command, environ)
    with contextlib.suppress(KVFrameworkError):
        for line in summary(read_stats(chosen)):
            _say(line)
    end_like(code)


def _say(text: str) -> None:
    typer.echo(f"kvframework: {' '.join(text.split())}", err=True)


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
