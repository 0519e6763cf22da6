"""One client never frees what it pins, or uses up what others are granted: other clients go on as if it were alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvframework.service.transfer_paths.grants import MAX_OF_ASKER
from kvframework.wire import messages as m
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

# Room for 32 chunks of 32 KiB.
CAPACITY, ROOM = "1MiB", 32
NINE = range(1000, 1009)


class Hoarder:
    """The process of `hoarder_program`, whose prompts are in L1."""

    def __init__(self, server: ServerProcess, prompts: int = ROOM) -> None:
        program = [sys.executable, "-m", "tests.survival.hoarder_program", server.endpoint, str(prompts), "1"]
        self.process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        assert self.answer() == prompts

    def answer(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def do(self, line: str) -> int:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        return self.answer()

    def end(self) -> None:
        self.process.communicate(timeout=60)


@contextmanager
def hoarder_at(server: ServerProcess, prompts: int = ROOM) -> Iterator[Hoarder]:
    hoarder = Hoarder(server, prompts)
    try:
        yield hoarder
    finally:
        hoarder.end()


def session_of(server: ServerProcess, pid: int) -> dict[str, Any]:
    (found,) = [each for each in server.status()["messaging"]["sessions"] if each["pid"] == pid]
    return dict(found)


def store_nine(client: WireClient) -> int:
    """Store nine prompts; return how many of them are hits once all are stored."""
    registered = client.register(2)
    keys = [key_for(registered, [token] * 256) for token in NINE]
    for key in keys:
        client.store(key, b"n", 2)
    found = [client.lookup(key) for key in keys]
    for each in found:
        if each.ticket:
            client.call("FREE_LOOKUP_LOCKS", m.TicketRef(each.ticket))
    return sum(each.hit_tokens == 256 for each in found)


def test_hits_that_are_never_freed_do_not_keep_another_engine_from_storing() -> None:
    with ServerProcess(capacity=CAPACITY) as server, hoarder_at(server) as hoarder, server.client() as other:
        assert hoarder.do("look") == ROOM, "alone, it may pin all of L1"
        assert store_nine(other) == 9
        assert hoarder.do("look") < ROOM
        assert store_nine(other) == 9
