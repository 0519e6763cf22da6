"""Streams that wait for a transfer go on once it is over, however it ended, and whoever asked in whatever way."""

from __future__ import annotations

import logging
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvf_dev.testing.accelerator import SimulatedNode
from kvf_dev.testing.accelerator.rig import SimulatedRig
from kvf_dev.testing.transport.engine import PAGED, PATIENCE_S, KitEngine
from kvf_dev.testing.transport.node import Program, client_of, endpoint_in
from kvf_dev.testing.transport.rig import RigSpec
from kvframework.api import futures
from kvframework.api.futures import Future, Promise
from kvframework.errors import Cancelled, DeadlineExceeded, DeviceError, ServerGone
from kvframework.server import Server
from tests.support.processes import send
from tests.support.waiting import wait_until

NHD = PAGED["nhd"]


class Streams:
    """A device's: what is held, and how often each was released."""

    def __init__(self) -> None:
        self.released: dict[object, int] = {}
        self.meanwhile: Callable[[], object] = lambda: None

    def hold(self, stream: object | None) -> Callable[[], None]:
        self.released[stream] = 0
        self.meanwhile()
        return lambda: self.released.update({stream: self.released[stream] + 1})


@pytest.fixture
def streams() -> Streams:
    return Streams()


@pytest.fixture
def pending(streams: Streams) -> Promise[bool]:
    return Promise(stream_hook=streams.hold)


def test_it_tells_what_the_transfers_future_tells(pending: Promise[bool]) -> None:
    seen = pending.to_cuda_future()
    assert not seen.query()
    with pytest.raises(TimeoutError):
        seen.result(0)
    pending.set_result(True)
    assert (seen.query(), seen.result(0), seen.exception()) == (True, True, None)
    cancelled = Promise[bool]().to_cuda_future()
    cancelled.cancel()
    assert isinstance(cancelled.exception(), Cancelled)


@pytest.mark.parametrize(
    "end",
    [
        lambda future: future.set_result(True),
        lambda future: future.set_result(False),
        lambda future: future.set_exception(ServerGone("it is gone")),
        lambda future: future.cancel(),
    ],
    ids=["success", "miss", "error", "cancel"],
)
def test_a_stream_goes_on_however_the_transfer_ends(
    pending: Promise[bool], streams: Streams, end: Callable[[Future[bool]], object]
) -> None:
    pending.to_cuda_future().wait("load stream")
    pending.to_cuda_future().wait()
    assert streams.released == {"load stream": 0, None: 0}
    end(pending)
    assert streams.released == {"load stream": 1, None: 1}


def test_nothing_is_held_for_what_is_over(pending: Promise[bool], streams: Streams) -> None:
    pending.set_result(True)
    pending.to_cuda_future().wait("stream")
    assert streams.released == {}


def test_a_transfer_that_ends_while_the_stream_is_being_held_lets_it_go(
    pending: Promise[bool], streams: Streams
) -> None:
    streams.meanwhile = lambda: pending.set_result(True)
    pending.to_cuda_future().wait("stream")
    assert streams.released == {"stream": 1}


def test_no_callback_that_fails_keeps_a_stream_waiting(pending: Promise[bool], streams: Streams) -> None:
    def fails(_: Future[bool]) -> None:
        raise ValueError("in a callback")

    pending.add_done_callback(fails)
    pending.to_cuda_future().wait("stream")
    with pytest.raises(ValueError, match="in a callback"):
        pending.set_result(True)
    assert streams.released == {"stream": 1}


def test_an_overdue_future_lets_streams_go_and_stays_pending(pending: Promise[bool], streams: Streams) -> None:
    ended: list[bool] = []
    pending.add_done_callback(lambda future: ended.append(future.result(0)))
    seen = pending.to_cuda_future()
    seen.wait("stream")
    pending.expire_holds()
    assert streams.released == {"stream": 1}
    assert not seen.query()
    with pytest.raises(DeadlineExceeded):
        seen.result(0)
    seen.wait("later")
    assert "later" not in streams.released
    pending.expire_holds()
    assert ended == []
    pending.set_result(True)
    pending.expire_holds()
    assert (streams.released, ended, seen.result(0)) == ({"stream": 1}, [True], True)


def test_a_future_that_becomes_overdue_while_the_stream_is_being_held_lets_it_go(
    pending: Promise[bool], streams: Streams
) -> None:
    streams.meanwhile = pending.expire_holds
    pending.to_cuda_future().wait("stream")
    assert streams.released == {"stream": 1}


@pytest.mark.parametrize("how", ["overdue", "resolved"])
def test_no_release_that_fails_keeps_another_stream_waiting(how: str, pending: Promise[bool], streams: Streams) -> None:
    def fails() -> None:
        raise ValueError("in a release")

    pending._add_release(fails)
    pending.to_cuda_future().wait("stream")
    with pytest.raises(ValueError, match="in a release"):
        pending.expire_holds() if how == "overdue" else pending.set_result(True)
    assert streams.released == {"stream": 1}
    assert pending.query() is (how == "resolved")


def test_each_stream_is_let_go_once_whoever_is_first() -> None:
    for _ in range(200):
        streams = Streams()
        pending = Promise[bool](stream_hook=streams.hold)
        seen = pending.to_cuda_future()
        early = [f"early {number}" for number in range(20)]
        for stream in early:
            seen.wait(stream)
        calls = [pending.expire_holds, lambda end=pending.set_result: end(True)]
        calls += [lambda wait=seen.wait, at=at: [wait(f"{at}.{number}") for number in range(20)] for at in range(3)]
        together = threading.Barrier(len(calls))

        def at_once(call: Callable[[], object], together: threading.Barrier = together) -> None:
            together.wait()
            call()

        threads = [threading.Thread(target=at_once, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert set(early) <= streams.released.keys()
        assert set(streams.released.values()) == {1}


@pytest.mark.parametrize("why", ["no device", "cannot hold"])
def test_a_thread_that_waits_instead_goes_on_when_the_future_is_overdue(why: str, streams: Streams) -> None:
    def refuse(stream: object | None) -> Callable[[], None]:
        raise DeviceError("no such thing here")

    future: Promise[bool] = Promise(stream_hook=refuse if why == "cannot hold" else None)
    waiting, later = [threading.Thread(target=future.to_cuda_future().wait, daemon=True) for _ in range(2)]
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    future.expire_holds()
    later.start()
    for thread in (waiting, later):
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert not future.query()


@pytest.mark.parametrize("why", ["no device", "cannot hold"])
def test_where_no_stream_can_wait_the_thread_does_and_that_is_said_once(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    futures._once.clear()

    def refuse(stream: object | None) -> Callable[[], None]:
        raise DeviceError("no such thing here")

    future: Promise[bool] = Promise(stream_hook=refuse if why == "cannot hold" else None)
    together = threading.Barrier(16)

    def wait() -> None:
        together.wait()
        future.to_cuda_future().wait()

    waiting = [threading.Thread(target=wait) for _ in range(together.parties)]
    with caplog.at_level(logging.WARNING):
        for thread in waiting:
            thread.start()
        wait_until(lambda: caplog.records, what="the line in the log")
        waiting[0].join(0.1)
        assert all(thread.is_alive() for thread in waiting)
        # A failure is for those who ask for the result.
        future.set_exception(ServerGone("it is gone"))
        for thread in waiting:
            thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in waiting)
    said = "the transport does not support streams" if why == "no device" else "no such thing here"
    assert [record.message for record in caplog.records] == [
        f"streams cannot wait for a transfer, so the engine's thread waits: {said}"
    ]


@pytest.mark.parametrize("what", ["instance", "connection"])
def test_a_stream_goes_on_when_its_side_is_closed_under_the_transfer(
    what: str, rig: SimulatedRig, server: Server
) -> None:
    with client_of(rig, server.endpoint) as client:
        engine = KitEngine(rig, client, 1, NHD)
        request = engine.stored()
        stream = rig.stream()
        with rig.holding_copies():
            future = engine.load(request, engine.target())
            wait_until(rig.held, PATIENCE_S, "a copy that is held")
            future.to_cuda_future().wait(stream)
            # Of other memory: who closes a connection under a load has given up the blocks.
            read = rig.read_later(rig.empty([1], "uint8"), stream)
            closing_it = threading.Thread(target=engine.close if what == "instance" else client.close)
            closing_it.start()
            closing_it.join(0.1)
            assert read() is None or what == "connection"
        wait_until(lambda: read() is not None, PATIENCE_S, "the end of the stream's wait")
        closing_it.join(PATIENCE_S)
        assert not closing_it.is_alive()
        engine.close()


def test_a_stream_goes_on_at_the_deadline_of_a_server_that_is_silent(
    node: SimulatedNode, rig: SimulatedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may still write to the blocks, so that the future has to wait for what it says."""
    spec = RigSpec("tests.devices.rigs:simdev", {"node": str(node.path)})
    with tempfile.TemporaryDirectory(prefix="kvf-") as directory:
        endpoint = endpoint_in(Path(directory))
        server = Program("server", spec, endpoint)
        try:
            with client_of(rig, endpoint) as client:
                engine = KitEngine(rig, client, 3, NHD)
                request = engine.stored()
                stream = rig.stream()
                monkeypatch.setattr(client, "deadlines", replace(client.deadlines, transfer_s=1.0))
                with rig.holding_copies():
                    future = engine.load(request, engine.target())
                    wait_until(rig.held, PATIENCE_S, "a copy that is held")
                    send(server.process.pid, signal.SIGSTOP)
                    seen = future.to_cuda_future()
                    seen.wait(stream)
                    # Of other memory: the copy may still write to the blocks.
                    read = rig.read_later(rig.empty([1], "uint8"), stream)
                    thread = threading.Thread(target=seen.wait, args=(object(),), daemon=True)
                    thread.start()
                    wait_until(lambda: read() is not None, PATIENCE_S, "the end of the stream's wait")
                    thread.join(PATIENCE_S)
                    assert not thread.is_alive()
                    assert not future.query()
                assert not future.query()
                server.process.send_signal(signal.SIGCONT)
                assert not future.result(PATIENCE_S).ok
                engine.close()
        finally:
            server.process.send_signal(signal.SIGCONT)
            server.close()
