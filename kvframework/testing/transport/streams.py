"""Owns the transport kit's tests of streams that wait for a transfer while the engine's thread goes on."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvframework.api.futures import Future
from kvframework.api.transport import LoadOutcome
from kvframework.testing.transport.cases import PAGED
from kvframework.testing.transport.engine import KitEngine
from kvframework.testing.transport.kit import Entered, MakeEngine, TransportKit
from kvframework.testing.transport.node import PATIENCE_S, ServerProgram, client_of, endpoint_in, wait_until
from kvframework.testing.transport.rig import RigSpec, TransportRig

NHD = PAGED["nhd"]
_A_WHILE_S = 0.2


class Streams(TransportKit):
    """What stands behind a transfer on the engine's own streams."""

    @pytest.mark.parametrize("which", ["its own", "the current"])
    def test_a_stream_waits_for_a_load_and_the_engines_thread_does_not(
        self, rig: TransportRig, make_engine: MakeEngine, which: str
    ) -> None:
        stream = self._stream(rig, which)
        engine = make_engine(NHD)
        request = engine.request()
        assert engine.store(request, engine.source()).result(PATIENCE_S).ok
        with self.holding(rig) as held:
            future = engine.load(request, engine.target())
            wait_until(rig.held, "a copy that is held")
            self._wait(future, stream, held)
            reads = _read_later(engine, stream)
            until = time.monotonic() + _A_WHILE_S
            while time.monotonic() < until:
                assert not any(_happened(reads)), "a read came before the load that its stream waits for"
                time.sleep(0.005)
            held.leave()
            assert future.result(PATIENCE_S).ok
        self._goes_on(reads)
        engine.expect_loaded(engine.snapshot(), engine.source(), engine.target())
        assert [read() for read in reads] == [bytes(engine.model.images[name]) for name in engine.tensors]

    @pytest.mark.parametrize("how", ["is cancelled", "fails"])
    def test_a_stream_goes_on_after_a_load_that(self, rig: TransportRig, make_engine: MakeEngine, how: str) -> None:
        """What the blocks hold then is for those to ask who use them; but nobody must wait for ever."""
        streams = [self._stream(rig, "its own") for _ in range(2)]
        # The load waits for an event of other memory: nothing but the load stands before what is read here.
        engine, other = make_engine(NHD), make_engine(NHD)
        request = engine.request()
        assert engine.store(request, engine.source()).result(PATIENCE_S).ok
        if how == "fails":
            self._fail_next_copy(rig)
        with self.entered(rig.holding_writes()) as held:
            future = engine.load(request, engine.target(), event=other.overwrite(later=True))
            reads = []
            for stream in streams:
                self._wait(future, stream, held)
                reads += _read_later(engine, stream)
            if how == "is cancelled":
                future.cancel()
            held.leave()
            assert not future.result(PATIENCE_S).ok
        self._goes_on(reads)

    def test_a_stream_goes_on_when_its_server_is_killed(self, spec: RigSpec, rig: TransportRig) -> None:
        stream = self._stream(rig, "its own")
        with tempfile.TemporaryDirectory(prefix="kvf-") as directory:
            endpoint = endpoint_in(Path(directory))
            server = ServerProgram(spec, endpoint)
            try:
                with client_of(rig, endpoint) as client:
                    engine = KitEngine(rig, client, 1, NHD, seed=1)
                    request = engine.request(1)
                    assert engine.store(request, engine.source()).result(PATIENCE_S).ok
                    with self.holding(rig) as held:
                        future = engine.load(request, engine.target())
                        wait_until(rig.held, "a copy that is held")
                        self._wait(future, stream, held)
                        reads = _read_later(engine, stream)
                        server.process.send_signal(signal.SIGKILL)
                        assert not future.result(PATIENCE_S).ok
                        self._goes_on(reads)
                    engine.close()
            finally:
                server.close()

    def _stream(self, rig: TransportRig, which: str) -> object | None:
        self.needs_asynchronous(rig)
        try:
            stream = rig.stream()
        except NotImplementedError as reason:
            pytest.skip(str(reason))
        return stream if which == "its own" else None

    def _wait(self, future: Future[LoadOutcome], stream: object | None, held: Entered) -> None:
        """In this thread, since it may be that thread's stream. What is held is let go if it does not come back."""
        watchdog = threading.Timer(self.patience_s, held.leave)
        watchdog.start()
        future.to_cuda_future().wait(stream)
        watchdog.cancel()
        watchdog.join()
        assert not future.query(), "the engine's thread waited for the transfer"

    def _goes_on(self, reads: list[Callable[[], bytes | None]]) -> None:
        wait_until(lambda: all(_happened(reads)), "the end of a stream's wait for its transfer", self.patience_s)

    def _fail_next_copy(self, rig: TransportRig) -> None:
        try:
            rig.fail_copy()
        except NotImplementedError as reason:
            pytest.skip(str(reason))


def _read_later(engine: KitEngine, stream: object | None) -> list[Callable[[], bytes | None]]:
    return [engine.rig.read_later(tensor, stream) for tensor in engine.tensors.values()]


def _happened(reads: list[Callable[[], bytes | None]]) -> list[bool]:
    return [read() is not None for read in reads]
