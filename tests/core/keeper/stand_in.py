"""A stand-in for `kvframework serve`: stores two files with its keeper, and reports what it found. The file `fails` of
its folder says how it fails."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from kvframework.keeper.sd_notify import Keeper
from tests.support.processes import has_ended

NAMES = ("kvf-arena", "kvf-journal")
ARENA_BYTES = 1 << 20


def token_of(name: str, fd: int) -> str:
    """The token of a file that is whole, else "broken"."""
    content = os.pread(fd, ARENA_BYTES + 1, 0)
    token = content[:16]
    return token.decode() if content == token * (ARENA_BYTES // 16) else f"broken {name}"


def made(name: str, token: str) -> int:
    fd = os.memfd_create(name)
    os.pwrite(fd, token.encode() * (ARENA_BYTES // 16), 0)
    return fd


def main(folder: Path, takeover: bool) -> int:
    keeper = Keeper.from_environment()
    assert keeper is not None
    seen = sorted(name for name in os.environ if name.startswith(("LISTEN", "NOTIFY")))
    kept = keeper.kept(NAMES)
    tokens = {name: token_of(name, fd) for name, fd in kept.items()}
    report = folder / "report"
    before = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    own = {"pid": os.getpid(), "takeover": takeover, "found": tokens, "environ": seen}

    def say(**facts: object) -> None:
        with report.open("a") as file:
            file.write(json.dumps({**own, **facts}) + "\n")

    fails = (folder / "fails").read_text() if (folder / "fails").exists() else ""
    if fails == "at start" or (takeover and fails == "before the hand-over"):
        return 3
    if fails == "leaves an orphan" and os.fork() == 0:
        os._exit(0 if os.fork() else bool(time.sleep(0.05)))
    if fails == "refused":
        return 2
    if fails == "starts slowly":
        time.sleep(600)
    if takeover and fails == "hangs":
        time.sleep(600)
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _frame: signals.append(number))
    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    if takeover:
        old = before[-1]["pid"]
        os.kill(old, signal.SIGUSR2)
        while not has_ended(old):
            time.sleep(0.005)
        if fails == "after the hand-over":
            return 3
    if set(kept) != set(NAMES):
        token = os.urandom(8).hex()
        for name in NAMES:
            keeper.remove(name)
            keeper.store(name, made(name, token))
    for number in range(18 if fails == "stores too much" else 0):
        while True:
            try:
                keeper.store(f"more-{number}", made("more", "x" * 16))
                break
            except BlockingIOError:
                time.sleep(0.005)
    if fails == "is ready after its end begins":
        say(event="waits")
        signal.sigwait(watched)
    keeper.ready()
    say(event="ready")
    while True:
        number = signal.sigwait(watched)
        say(event=signal.Signals(number).name)
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2) and fails not in (
            "ignores its end",
            "is ready after its end begins",
        ):
            return 0
