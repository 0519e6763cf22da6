"""The transport kit's tests of loads in pieces, which a transport copies when the engine has time for them. One that
takes no notice and copies by itself passes, too."""

from __future__ import annotations

import contextlib
import signal
import tempfile
from pathlib import Path

import pytest

from kvf_dev.testing.transport.cases import CASES, PAGED
from kvf_dev.testing.transport.engine import KitEngine
from kvf_dev.testing.transport.kit import MakeEngine, TransportKit
from kvf_dev.testing.transport.node import (
    ServerProgram,
    client_of,
    endpoint_in,
    held_by,
    status_of,
    wait_until,
)
from kvf_dev.testing.transport.outcomes import must_miss, must_succeed, must_work
from kvf_dev.testing.transport.rig import RigSpec, TransportRig
from kvframework.api.futures import Future
from kvframework.api.transport import LoadOutcome
from kvframework.client import KVClient

NHD = PAGED["nhd"]
_SOON_S = 5.0


class Pieces(TransportKit):
    """`Future.advance` of a load with `in_pieces`."""

    @pytest.mark.parametrize("case", ["nhd", "hybrid"])
    def test_a_load_in_pieces_is_whole_at_its_end(self, make_engine: MakeEngine, case: str) -> None:
        engine = make_engine(CASES[case])
        request = engine.request()
        must_succeed(engine.store(request, engine.source()))
        stored = engine.snapshot()
        future = engine.load(request, engine.target(), in_pieces=True)
        pieces = self._advanced(future)
        must_succeed(future, "a load in pieces")
        engine.expect_loaded(stored, engine.source(), engine.target())
        engine.must_be_right()
        largest = max(group.nbytes for group in engine.registration.desc.groups)
        assert max(pieces, default=0) <= largest, "a piece is larger than an object, and none was to be as large"
        assert future.advance() == 0, "a load that has ended is advanced"

    def test_what_is_left_of_a_load_is_copied_at_once_where_there_is_no_bound(self, make_engine: MakeEngine) -> None:
        engine = make_engine(NHD)
        request = engine.request()
        must_succeed(engine.store(request, engine.source()))
        stored = engine.snapshot()
        future = engine.load(request, engine.target(), skip=16, in_pieces=True)
        if self._first_piece(future):
            future.advance()
            assert future.wait(_SOON_S), "a load has not ended by `advance` without a bound"
        must_succeed(future, "a load of which all that is left was copied at once")
        engine.expect_loaded(stored, engine.source(), engine.target(), 16)
        engine.must_be_right()

    def test_between_its_pieces_a_load_touches_nothing_and_can_be_cancelled(
        self, client: KVClient, make_engine: MakeEngine
    ) -> None:
        engine = make_engine(NHD)
        future = self._between_two_pieces(engine)
        engine.overwrite()
        future.cancel()
        assert future.query(), "a load that touches nothing does not end at once when it is cancelled"
        must_miss(future, "a load that was cancelled between two pieces ended well")
        assert future.advance() == 0
        engine.must_be_right("a load between two pieces touched the tensors")
        self._must_be_given_back(client)
        must_work(engine, "a transfer after a load that was cancelled between two pieces")

    def test_the_end_of_an_instance_ends_its_loads_in_pieces(self, client: KVClient, make_engine: MakeEngine) -> None:
        engine = make_engine(NHD)
        future = self._between_two_pieces(engine)
        engine.close()
        engine.overwrite()
        must_miss(future, "a load ended well after its instance")
        assert future.advance() == 0
        engine.must_be_right("a load touched the tensors after the end of its instance")
        self._must_be_given_back(client)

    def test_a_server_killed_between_two_pieces_is_a_miss(self, spec: RigSpec, rig: TransportRig) -> None:
        with tempfile.TemporaryDirectory(prefix="kvf-") as directory, contextlib.ExitStack() as stack:
            endpoint = endpoint_in(Path(directory))
            server = ServerProgram(spec, endpoint)
            stack.callback(server.close)
            client = stack.enter_context(client_of(rig, endpoint))
            engine = KitEngine(rig, client, 1, NHD, seed=1)
            stack.callback(engine.close)
            must_succeed(engine.store(engine.request(1), engine.source()))
            future = engine.load(engine.request(1), engine.target(), in_pieces=True)
            if not self._first_piece(future):
                pytest.skip("the transport copies by itself")
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
            self._advanced(future)
            must_miss(future, "a load ended well whose server was killed between two pieces")

    def _advanced(self, future: Future[LoadOutcome]) -> list[int]:
        """Have the load copied in the smallest pieces; return their bytes."""
        pieces: list[int] = []
        for _ in range(int(self.patience_s / 0.01)):
            if future.query():
                return pieces
            piece = future.advance(1)
            pieces.append(piece)
            if not piece:
                future.wait(0.01)
        pytest.fail("a load in pieces did not end, though it was advanced")

    def _between_two_pieces(self, engine: KitEngine) -> Future[LoadOutcome]:
        """Store, and return a load of it of which the first piece is copied; skip if the transport copies by itself."""
        request = engine.request()
        must_succeed(engine.store(request, engine.source()))
        future = engine.load(request, engine.target(), in_pieces=True)
        if not self._first_piece(future):
            pytest.skip("the transport copies by itself")
        return future

    def _first_piece(self, future: Future[LoadOutcome]) -> int:
        """Return the bytes of the first piece of a load, 0 if it has ended without one."""
        for _ in range(int(self.patience_s / 0.01)):
            if future.query():
                return 0
            if piece := future.advance(1):
                assert not future.query(), "a load of several objects has ended with its smallest piece"
                return piece
            future.wait(0.01)
        pytest.fail("a load in pieces did not begin, though it was advanced")

    def _must_be_given_back(self, client: KVClient) -> None:
        wait_until(
            lambda: held_by(status_of(client)) == (0, 0), "a load that ended early to give its pins back", _SOON_S
        )
