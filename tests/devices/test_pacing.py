"""How fast copies may follow each other, and that a copier rests while it waits for that. How much of the arena may be
used while several threads pin it. A copier process whose log is not read works and ends like any other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvf_dev.testing.accelerator import SimulatedNode
from kvf_dev.testing.transport.engine import PAGED, PATIENCE_S, KitEngine, must_work
from kvf_dev.testing.transport.node import client_of, serving
from kvf_devices import DeviceOptions
from kvf_devices.copier import THREADS, Copier, Launcher, Pinning
from kvf_devices.messages import Done, Frames, Lost, Start, framed, from_copier
from kvframework.api.plugin import ByteSize
from kvframework.errors import DeviceError
from kvframework.supervise.child import NamedCall
from tests.devices.rigs import simdev
from tests.devices.test_launching import Driver, Event, Job, batches
from tests.support.full_pipe import full_pipe

PACE = 100


class AtOnce(Driver):
    """Copies are done as soon as they are launched; `at` is when each was."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.at: list[tuple[str, float, int]] = []

    def pin(self, offset: int, nbytes: int) -> None:
        return

    def lacks(self) -> tuple[str, ...]:
        return ()

    def copy(self, stream, batch, *, to_arena):  # type: ignore[no-untyped-def]
        super().copy(stream, batch, to_arena=to_arena)
        self.at.append((stream, self.now, batch.nbytes))

    def reached(self, event: Event) -> bool:
        return True


class Paced:
    """A launcher under a virtual clock, which is stepped as the copier does."""

    def __init__(self, pace: int) -> None:
        self.driver = AtOnce()
        self.done: list[int] = []
        self.launcher = Launcher(
            self.driver,  # type: ignore[arg-type]
            limit=1 << 20,
            pace=pace,
            usable=lambda: 1 << 20,
            done=lambda job: self.done.append(job.number),
            clock=lambda: self.driver.now,
        )

    def add(self, number: int, *sizes: int, is_store: bool = True) -> None:
        self.launcher.add(Job(number, number, is_store, batches(*sizes), None, 0))

    def run(self, until: float) -> None:
        while True:
            while self.launcher.step():
                pass
            rest = self.launcher.rest_s()
            if not self.launcher.busy or self.driver.now + rest > until:
                self.driver.now = max(self.driver.now, until)
                return
            assert rest > 0, "it would spin"
            self.driver.now += rest


@pytest.fixture
def paced() -> Paced:
    return Paced(PACE)


def test_a_launch_waits_until_those_before_it_are_paid_for(paced: Paced) -> None:
    paced.add(1, 50, 20, 30)
    paced.add(2, 10)
    paced.run(until=10.0)
    assert paced.driver.at == [("stores", 0.0, 50), ("stores", 0.5, 20), ("stores", 0.7, 30), ("stores", 1.0, 10)]
    assert paced.done == [1, 2]


def test_a_launch_of_more_than_a_seconds_worth_goes(paced: Paced) -> None:
    paced.add(1, 1000)
    paced.add(2, 1)
    paced.run(until=0.1)
    assert paced.driver.at == [("stores", 0.0, 1000)]
    assert paced.done == [1], "a job ends with its last launch, not once that is paid for"
    paced.run(until=20.0)
    assert paced.driver.at[1:] == [("stores", 10.0, 1)]


def test_without_a_pace_all_go_at_once() -> None:
    free = Paced(0)
    free.add(1, 1000, 1000, 1000)
    free.run(until=0.0)
    assert [at for _, at, _ in free.driver.at] == [0.0, 0.0, 0.0]


def test_a_job_that_waits_for_its_pace_is_cancelled_at_once(paced: Paced) -> None:
    paced.add(1, 1000, 1000)
    paced.run(until=0.1)
    paced.launcher.cancel(number=1)
    paced.launcher.step()
    assert paced.done == [1]


@settings(max_examples=60)
@given(
    jobs=st.lists(st.tuples(st.floats(0, 30), st.booleans(), st.lists(st.integers(1, 400), max_size=5)), max_size=12)
)
def test_over_any_time_no_more_than_its_worth_and_a_launch_begins(jobs: list[tuple[float, bool, list[int]]]) -> None:
    paced = Paced(PACE)
    for number, (at, is_store, sizes) in enumerate(sorted(jobs, key=lambda job: job[0])):
        paced.run(until=at)
        paced.add(number, *sizes, is_store=is_store)
    paced.run(until=1e6)
    assert sorted(paced.done) == list(range(len(jobs)))
    for direction in ("loads", "stores"):
        launches = [(at, nbytes) for stream, at, nbytes in paced.driver.at if stream == direction]
        for first in range(len(launches)):
            begun = 0
            for at, nbytes in launches[first:]:
                assert begun <= PACE * (at - launches[first][0]) + 1e-3
                begun += nbytes


@pytest.fixture
def copier() -> Iterator[tuple[Copier, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(PATIENCE_S)
        yield Copier(theirs, AtOnce(), DeviceOptions(pace=ByteSize(PACE)), 4096), ours  # type: ignore[arg-type]


def test_the_copier_rests_while_copies_wait_for_their_pace(copier: tuple[Copier, socket.socket]) -> None:
    working, sock = copier
    steps: list[float] = []
    step = working._launcher.step

    def counted() -> bool:
        steps.append(time.monotonic())
        return step()

    working._launcher.step = counted  # type: ignore[method-assign]
    working._launcher.add(Job(1, 1, True, batches(20, 20, 1), None, 0))
    thread = threading.Thread(target=working.run)
    thread.start()
    frames, received = Frames(), []
    while not any(isinstance(each, Done) for each in received):
        received += [from_copier(payload) for payload in frames.feed(sock.recv(4096))]
    sock.shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert steps[-1] - steps[0] >= 0.4
    assert len(steps) < 60, f"{len(steps)} turns in the 0.4 s of two waits"


def test_a_store_takes_as_long_as_the_configured_pace_says(tmp_path_factory: pytest.TempPathFactory) -> None:
    with ExitStack() as stack:
        node = stack.enter_context(SimulatedNode(tmp_path_factory.mktemp("node")))
        rig = stack.enter_context(closing(simdev(str(node.path), pace=10_000, launch=100)))
        server = stack.enter_context(serving(rig))
        client = stack.enter_context(client_of(rig, server.endpoint))
        engine = KitEngine(rig, client, 1, PAGED["nhd"])
        nbytes = sum(len(image) for image in engine.model.images.values()) * 12 // 27  # 12 of its 27 blocks
        began = time.monotonic()
        assert engine.store(engine.request(), engine.source()).result(PATIENCE_S).ok
        # A launch goes before it is paid for, and has one block of a layer at least.
        assert time.monotonic() - began > (nbytes - 200) / 10_000
        engine.close()


def test_a_copier_works_for_a_server_with_many_descriptors(tmp_path_factory: pytest.TempPathFactory) -> None:
    with ExitStack() as stack:
        try:
            for _ in range(1100):
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            pytest.skip(f"a process may not have so many here: {error}")
        node = stack.enter_context(SimulatedNode(tmp_path_factory.mktemp("node")))
        rig = stack.enter_context(closing(simdev(str(node.path))))
        server = stack.enter_context(serving(rig))
        client = stack.enter_context(client_of(rig, server.endpoint))
        engine = KitEngine(rig, client, 1, PAGED["nhd"])
        must_work(engine)
        engine.close()


SLICE = 4
SIZE = 2 * THREADS * SLICE - 1
STUCK_S = 20.0


class Pins:
    """Its slices are pinned at the same moment, as many as there are threads; from `fails_at` on none is."""

    def __init__(self, fails_at: int = SIZE) -> None:
        self.pinned: list[tuple[int, int]] = []
        self._fails_at = fails_at
        self._together = threading.Barrier(THREADS)

    def pin(self, offset: int, nbytes: int) -> None:
        self._together.wait(STUCK_S)
        if offset >= self._fails_at:
            raise DeviceError("no more memory may be locked")
        self.pinned.append((offset, nbytes))


def pin_all(driver: Pins) -> Pinning:
    made = Pinning(driver, SIZE, SLICE)  # type: ignore[arg-type]
    made._run()
    return made


def test_every_byte_is_pinned_once() -> None:
    driver = Pins()
    assert pin_all(driver).usable() == SIZE
    ends = [0, *(offset + nbytes for offset, nbytes in sorted(driver.pinned))]
    assert [offset for offset, _ in sorted(driver.pinned)] == ends[:-1]
    assert ends[-1] == SIZE


def test_what_lies_before_a_slice_that_failed_is_usable() -> None:
    made = pin_all(Pins(fails_at=5 * SLICE))
    assert made.usable() == 5 * SLICE
    with pytest.raises(DeviceError, match="no more memory may be locked"):
        made.check()


def test_a_copier_that_fails_says_so_although_its_log_is_not_read() -> None:
    ours, theirs = socket.socketpair()
    arena = os.memfd_create("arena")
    program = "import sys; from kvf_devices.copier import main; sys.exit(main(sys.argv[1:]))"
    with ours, full_pipe() as (_, writer):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno()), str(arena)],
            pass_fds=(theirs.fileno(), arena),
            stdout=writer,
            stderr=writer,
        )
        theirs.close()
        os.close(arena)
        try:
            ours.settimeout(30)
            ours.sendall(framed(Start(NamedCall("no_such_module:create", "no_such_module:Options", b""), "gpu-0")))
            frames, said = Frames(), []
            while not said:
                said = [from_copier(payload) for payload in frames.feed(ours.recv(1 << 16))]
            assert isinstance(said[0], Lost)
            assert "no_such_module" in said[0].failure.error().fact
            assert process.wait(60) == 1
        finally:
            process.kill()
            process.wait()
