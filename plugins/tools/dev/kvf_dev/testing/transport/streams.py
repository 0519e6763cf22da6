"""The transport kit's tests of streams that wait for a transfer while the engine's thread goes on."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvf_dev.testing.transport.cases import PAGED
from kvf_dev.testing.transport.engine import KitEngine
from kvf_dev.testing.transport.kit import Entered, MakeEngine, TransportKit
from kvf_dev.testing.transport.node import ServerProgram, client_of, endpoint_in, wait_until
from kvf_dev.testing.transport.outcomes import must_miss, must_succeed
from kvf_dev.testing.transport.rig import RigSpec, TransportRig
from kvframework.api.futures import Future
from kvframework.api.transport import LoadOutcome

NHD = PAGED["nhd"]
_A_WHILE_S = 0.2


class Streams(TransportKit):
    """Work on the engine's own streams behind a transfer."""

    @pytest.mark.parametrize("which", ["its own", "the current"])
    def test_a_stream_waits_for_a_load_and_the_engines_thread_does_not(
        self, rig: TransportRig, make_engine: MakeEngine, which: str
    ) -> None:
        stream = self._stream(rig, which)
        engine = make_engine(NHD)
        request = engine.request()
        must_succeed(engine.store(request, engine.source()))
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
            must_succeed(future)
        self._goes_on(reads)
        engine.expect_loaded(engine.snapshot(), engine.source(), engine.target())
        late = sum(read() != bytes(engine.model.images[name]) for read, name in zip(reads, engine.tensors, strict=True))
        assert not late, f"{late} tensors were read before the load that the stream waits for had written them"

    def test_what_is_no_stream_is_not_taken_for_the_current_one(
        self, rig: TransportRig, make_engine: MakeEngine
    ) -> None:
        """Without a stream that can wait the engine's thread waits, which is safe."""
        self._stream(rig, "its own")
        engine = make_engine(NHD)
        request = engine.request()
        must_succeed(engine.store(request, engine.source()))
        with self.holding(rig) as held:
            future = engine.load(request, engine.target())
            wait_until(rig.held, "a copy that is held")
            waiting = threading.Thread(target=lambda: future.to_cuda_future().wait(object()), daemon=True)
            waiting.start()
            waiting.join(_A_WHILE_S)
            returned = not waiting.is_alive()
            held.leave()
            waiting.join(self.patience_s)
            assert not returned, "raise DeviceError for what is no stream: no stream of the engine waits now"
            must_succeed(future)

    @pytest.mark.parametrize("how", ["is cancelled", "fails"])
    def test_a_stream_goes_on_after_a_load_that_did_not_succeed(
        self, rig: TransportRig, make_engine: MakeEngine, how: str
    ) -> None:
        """The users of the blocks must check their content; but no stream may wait for ever."""
        streams = [self._stream(rig, "its own") for _ in range(2)]
        # The load waits for an event of other memory: nothing but the load precedes the read here.
        engine, other = make_engine(NHD), make_engine(NHD)
        request = engine.request()
        must_succeed(engine.store(request, engine.source()))
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
            must_miss(future, f"a load that {how} was answered as a hit")
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
                    must_succeed(engine.store(request, engine.source()))
                    with self.holding(rig) as held:
                        future = engine.load(request, engine.target())
                        wait_until(rig.held, "a copy that is held")
                        self._wait(future, stream, held)
                        reads = _read_later(engine, stream)
                        server.process.send_signal(signal.SIGKILL)
                        must_miss(future)
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
        """Wait in this thread, since it may be that thread's stream. Held work is released if the call does not
        return."""
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
