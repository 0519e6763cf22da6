"""What a server finds that is not what it left: the start is cold with its reason, or warm with the right bytes; it
serves, and the one after it is warm."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_FSIZE, prlimit

import pytest

from tests.core.restart.planted_server import FILE_TEXT, NAMES, PLANT, STRANGERS
from tests.core.restart.prompts import CAPACITY, hits, overwrite_all, store
from tests.support.held_server import HeldServer
from tests.support.processes import has_ended, send
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

KNOWN = range(8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planted")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[HeldServer]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(PLANT, str(folder / "plant"))
        with HeldServer(capacity=CAPACITY, program=("-m", "tests.core.restart.planted_server")) as running:
            yield running


@pytest.fixture
def server(shared: HeldServer) -> HeldServer:
    """A server with known objects, whose start has not failed."""
    shared.start()
    shared.has_served()
    with shared.client() as client:
        store(client, 1, KNOWN)
    return shared


@contextmanager
def between(server: HeldServer) -> Iterator[mmap.mmap]:
    """Kill the server, and hold its keeper up: nothing reads the journal, which is yielded, before this ends. Then a
    new server serves."""
    assert server.process is not None
    pid, fd = server.pid, server.journal()
    send(server.process.pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: has_ended(pid), 60, "the end")
    try:
        with mmap.mmap(fd, 0) as journal:
            yield journal
    finally:
        os.close(fd)
        os.kill(server.process.pid, signal.SIGCONT)
    server.serving(pid)


def why_cold(server: HeldServer) -> str:
    """Return why the running server began cold; it works, and the next one is warm."""
    with server.client() as client:
        recovered = client.status()["l1"]["recovered"]
        found = hits(client, 1, KNOWN)
        if recovered["why_cold"]:
            assert recovered["objects"] == found == 0
        store(client, 2, KNOWN)
    server.has_served()
    server.kill9()
    server.start()
    with server.client() as client:
        assert client.status()["l1"]["recovered"]["why_cold"] == ""
        assert hits(client, 1, KNOWN) == len(KNOWN)
    return str(recovered["why_cold"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", STRANGERS)
def test_something_else_in_the_store(server: HeldServer, kind: str, name: str, folder: Path) -> None:
    with between(server):
        (folder / "plant").write_text(f"{kind} {name}")
    assert (why_cold(server) != "") == (name != "unknown")
    assert {row["name"] for row in server.keeper()["held"]} == {"kvf-arena", "kvf-journal"}
    if kind == "file":
        assert (folder / "stranger").read_bytes() == FILE_TEXT


def test_three_starts_in_a_row_that_did_not_serve(server: HeldServer, folder: Path) -> None:
    plant = folder / "plant"
    with between(server):
        plant.write_text("never-served")
    for _ in range(2):
        with server.client() as client:
            assert hits(client, 1, KNOWN) == len(KNOWN)
        server.kill9()
        server.start()
    with between(server):
        plant.unlink()
    assert why_cold(server).startswith("failed_starts: 3 servers in a row")


def test_no_memory_for_a_second_arena(server: HeldServer, folder: Path) -> None:
    """What is kept needs no room beside itself: the node's memory may be L1 and little more."""
    plant = folder / "plant"
    with between(server):
        plant.write_text("no-room")
    try:
        assert server.recovered()["why_cold"] == ""
        with server.client() as client:
            assert hits(client, 1, KNOWN) == len(KNOWN)
    finally:
        plant.unlink()


def test_no_memory_for_the_journal() -> None:
    """It serves on, without a journal."""
    with HeldServer(capacity=CAPACITY) as server:
        fd = server.journal()
        prlimit(server.pid, RLIMIT_FSIZE, (os.fstat(fd).st_size, RLIM_INFINITY))
        os.close(fd)
        with server.client() as client:
            overwrite_all(client, 6)
            assert "the journal of L1 failed, so the next server starts with an empty L1:" in server.log
        server.kill9()
        server.start()
        assert why_cold(server).startswith("no_journal")
