"""The server of this user: found at its endpoint, else started under `kvframework hold`, and left there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import kvframework
from kvf_run.log_file import log_path
from kvframework.api.console import short_duration
from kvframework.api.endpoint import parse_endpoint
from kvframework.api.plugin import ByteSize
from kvframework.client import StatusSource, quiet_connection
from kvframework.errors import EndpointError, ServerGone
from kvframework.status import Status

IDLE_STOP_S = 30 * 60.0
_READY_S, _LOOK_S, _STOP_S = 60.0, 2.0, 15.0
_PAUSE_S, _NOTED_S = 0.05, 15.0


class Found(NamedTuple):
    """A server that answers. `started` says whether this process has started it; `notes` are lines for the user."""

    endpoint: str
    started: bool
    notes: list[str]


class Wanted(NamedTuple):
    """The server to start where none answers. `l1` None: a share of the available memory, unless `config` is given."""

    endpoint: str
    l1: ByteSize | None = None
    config: Path | None = None
    overrides: Sequence[str] = ()


def ensure_server(wanted: Wanted) -> Found:
    """Find the server or start it, and wait until it answers. Blocks for a second, at most for `_READY_S`. Raises
    `KVFrameworkError`: there is no server then, and nothing of a failed start is left."""
    quiet_connection()
    if (running := _status_of(wanted.endpoint)) is not None:
        return _found(wanted, running.server.version)
    if parse_endpoint(wanted.endpoint).kind != "ipc":
        raise EndpointError(
            "no server answers at the TCP endpoint", where=wanted.endpoint, hint="start the server on its node"
        )
    with _alone(wanted.endpoint):
        running = _status_of(wanted.endpoint)
        return _start(wanted) if running is None else _found(wanted, running.server.version)


def keeper_of(endpoint: str) -> dict[str, Any] | None:
    """Return what `kvframework hold` says of itself at this endpoint, None where none runs. Blocks for about 0.5 s."""
    asked = subprocess.run(
        [*_command("hold"), "--status", "--json", "--endpoint", endpoint, "--timeout", "5"],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=30,
    )
    try:
        reply = json.loads(asked.stdout)
    except ValueError:
        return None
    return reply if isinstance(reply, dict) else None


def started_keeper(endpoint: str) -> int | None:
    """Return the process of `kvframework hold` that a `kvframework run` has started at this endpoint, if it runs."""
    keeper = keeper_of(endpoint)
    try:
        noted = int(_lock_path(endpoint).read_text())
    except (OSError, ValueError):
        return None
    return noted if keeper is not None and keeper.get("pid") == noted else None


def end_keeper(pid: int, endpoint: str, timeout_s: float = _STOP_S) -> bool:
    """End a keeper and its server in order, and wait for that; return whether it has ended. Blocks for `timeout_s`, and
    for as long as the server drains."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if _ended_within(process, timeout_s):
            return True
        status = _status_of(endpoint)
        # A further signal would end the drain.
        if status is None or status.drain.done is not False:
            return _ended_within(process, 0.0)
        return _ended_within(process, status.drain.left_s + _STOP_S)
    finally:
        os.close(process)


def _status_of(endpoint: str) -> Status | None:
    """Return the status of the server that answers, None where none does. Blocks for `_LOOK_S` at most."""
    # A path without a socket needs no connection, which would be tried for its whole time.
    parsed = parse_endpoint(endpoint)
    if parsed.kind == "ipc" and not Path(parsed.path).exists():
        return None
    with contextlib.closing(StatusSource(endpoint, _LOOK_S, name="run")) as source, contextlib.suppress(ServerGone):
        return msgspec.json.decode(source.ask(), type=Status)
    return None


def _found(wanted: Wanted, version: str) -> Found:
    notes = []
    if version != kvframework.__version__:
        notes.append(
            f"the server at {wanted.endpoint} is release {version}, this command is release {kvframework.__version__}: "
            "`kvframework restart` replaces the server and keeps its cache"
        )
    if wanted.l1 is not None or wanted.config is not None:
        notes.append(
            f"a server already runs at {wanted.endpoint}, so --l1 and --config have no effect before `kvframework stop`"
        )
    return Found(wanted.endpoint, False, notes)


def _start(wanted: Wanted) -> Found:
    options = ["--set", f"server.endpoint={wanted.endpoint}", "--set", f"server.idle_stop_s={IDLE_STOP_S}"]
    why = ""
    if wanted.config is not None:
        options += ["--config", str(wanted.config)]
        why = f", configuration {wanted.config}"
    if wanted.l1 is not None:
        options += ["--set", f"l1.capacity={int(wanted.l1)}"]
    elif wanted.config is None:
        why = ", 25 % of available memory"
    for override in wanted.overrides:
        options += ["--set", override]
    log = log_path(wanted.endpoint)
    note = _lock_path(wanted.endpoint)
    note.write_text("")
    try:
        _spawn(log, note, options)
        keeper = _noted(note)
        if not keeper:
            raise EndpointError(
                "the server cannot be started", where=str(log.parent), hint="run `kvframework serve` to see the error"
            )
        status = _wait_ready(keeper, wanted.endpoint, log)
    except BaseException:
        # An interrupt may come at any moment of its start.
        if keeper := _noted(note):
            end_keeper(keeper, wanted.endpoint)
        raise
    stops = f"stops after {short_duration(IDLE_STOP_S)} without an engine"
    l1 = f"L1 {ByteSize(status.l1.capacity_bytes)}{why}"
    return Found(wanted.endpoint, True, [f"started the server at {wanted.endpoint}: {l1}; {stops}; log: {log}"])


def _spawn(log: Path, note: Path, options: Sequence[str]) -> None:
    """Start `kvframework hold`, which outlives this process. It notes its process id by itself, at once: a `run` that
    is killed while it waits leaves a server that `stop` knows."""
    flag, nowhere = "-P" if sys.version_info >= (3, 11) else "-s", subprocess.DEVNULL
    starter = [sys.executable, flag, "-m", "kvf_run.log_file", str(log), str(note), *_command("hold"), "--", *options]
    subprocess.run(starter, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True, check=False)


def _noted(note: Path) -> int:
    """Wait until the keeper has noted its process id, and return that; 0 if it does not in time."""
    deadline = time.monotonic() + _NOTED_S
    while not (text := note.read_text()) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    return int(text or 0)


def _command(name: str) -> list[str]:
    return [sys.executable, "-m", "kvframework", name]


def _wait_ready(keeper: int, endpoint: str, log: Path) -> Status:
    deadline = time.monotonic() + _READY_S
    while (status := _status_of(endpoint)) is None:
        ended = not Path(f"/proc/{keeper}").exists()
        if ended or time.monotonic() > deadline:
            why = "ended" if ended else "did not answer in time"
            raise EndpointError(f"the server {why}: {_last_line(log)}", where=endpoint, hint=f"see {log}")
        time.sleep(_PAUSE_S)
    return status


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines[-8:] if "error:" in line or " ERROR " in line] or lines[-1:]
        return errors[0].strip() if errors else "the server's log is empty"
    return "the server has no log"


def _lock_path(endpoint: str) -> Path:
    return Path(f"{parse_endpoint(endpoint).path}.run")


@contextlib.contextmanager
def _alone(endpoint: str) -> Iterator[None]:
    """One `kvframework run` at a time starts a server at an endpoint; others wait, and find it. Raises
    `EndpointError`."""
    path = _lock_path(endpoint)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.parent.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            raise EndpointError(
                "the folder of the server's socket belongs to another user",
                where=str(path.parent),
                hint="give another --endpoint",
            )
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise EndpointError(
            f"the server cannot be started: {error.strerror}",
            where=str(path.parent),
            hint="set XDG_RUNTIME_DIR to a folder that you own, or give another --endpoint",
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _ended_within(process: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
