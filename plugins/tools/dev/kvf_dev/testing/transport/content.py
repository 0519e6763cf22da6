"""The transport kit's tests of content: stored bytes come back, in the right place and nowhere else, also in pieces. A
transport that takes no notice of pieces and copies by itself passes, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvf_dev.testing.transport.cases import CASES, CHUNK
from kvf_dev.testing.transport.engine import KitEngine, must_miss, must_succeed, must_work
from kvf_dev.testing.transport.kit import MakeEngine, TransportKit
from kvframework.api.futures import Future
from kvframework.api.layout import NO_BLOCK
from kvframework.api.transport import LoadOutcome, StoreOutcome
from kvframework.client import KVClient


class Content(TransportKit):
    """Every layout, every group, every range."""

    @pytest.fixture(params=sorted(CASES))
    def case(self, request: pytest.FixtureRequest) -> str:
        name: str = request.param
        return name

    def test_what_is_stored_comes_back_in_other_blocks(self, make_engine: MakeEngine, case: str) -> None:
        must_work(make_engine(CASES[case]))

    def test_another_instance_loads_what_was_stored(self, make_engine: MakeEngine, case: str) -> None:
        one, other = make_engine(CASES[case]), make_engine(CASES[case])
        other.must_load(one.stored(), one.model, one.source())
        one.must_be_right("a store changes nothing")

    def test_skipped_tokens_are_not_written(self, make_engine: MakeEngine, case: str) -> None:
        groups = CASES[case]
        whole = max(group.block_size for group in groups) if any(group.opaque for group in groups) else 1
        engine = make_engine(groups)
        request = engine.stored()
        # The longest first, so that no load finds its skipped tokens written already.
        for skip in (3 * CHUNK - 1, CHUNK + 6, CHUNK, 7, 1):
            skip -= skip % whole
            engine.must_load(request, skip=skip, what=f"{skip} tokens were skipped")

    def test_one_block_is_gathered_for_the_canary(self, make_engine: MakeEngine, case: str) -> None:
        """The canary receives the canonical bytes of a block, through the path that stores take."""
        engine = make_engine(CASES[case])
        blocks = [count - 2 for count in engine.model.blocks]
        instance = engine.worker._instance
        assert instance is not None
        gathered = list(instance.transfer.gather_block(engine.caches, blocks))
        for index, block in enumerate(blocks):
            right = gathered[index : index + 1] == [engine.model.canonical_block(index, block)]
            assert right, f"gather_block gives other bytes of layer group {index} than its block {block} has"

    def test_only_missing_chunks_are_copied(self, engine: KitEngine) -> None:
        request, middle = engine.request(), engine.source(CHUNK, 2 * CHUNK)
        must_succeed(engine.store(request, middle, CHUNK, 2 * CHUNK))
        before = engine.snapshot()
        engine.overwrite()
        whole = engine.store(request, engine.source())
        must_succeed(whole)
        found = whole.result()
        assert found == StoreOutcome(stored=2, present=1), f"of 3 chunks 1 is present; the outcome is {found}"
        after = engine.snapshot()
        must_succeed(engine.load(request, engine.target()))
        engine.expect_loaded(after, engine.source(), engine.target())
        engine.expect_loaded(before, middle, engine.target(CHUNK, 2 * CHUNK))
        engine.must_be_right()

    def test_a_load_of_what_is_not_there_touches_nothing(self, engine: KitEngine) -> None:
        request = engine.request()
        must_miss(engine.load(request, engine.target()))
        must_succeed(engine.store(request, engine.source(0, CHUNK), 0, CHUNK))
        must_miss(engine.load(request, engine.target()), "two chunks are missing")
        engine.must_be_right()

    def test_blocks_that_a_window_gave_away_are_left_out(self, make_engine: MakeEngine) -> None:
        engine = make_engine(CASES["hybrid"])
        ids = engine.source()
        ids[1] = [NO_BLOCK] * 5 + ids[1][5:]
        ids[2] = [NO_BLOCK] * 2 + ids[2][2:]
        stored = engine.store(engine.request(), ids)
        must_succeed(stored)
        found = stored.result()
        assert found == StoreOutcome(stored=8), f"the engine has the blocks of 8 objects; the outcome is {found}"

    def test_many_transfers_at_once_do_not_mix(self, make_engine: MakeEngine) -> None:
        engines = [make_engine(CASES[name]) for name in ("nhd", "hnd", "nhd")] * 4
        requests = [engine.request() for engine in engines]
        for what in ("store", "load"):
            for future in [engine.submit(what, each) for engine, each in zip(engines, requests, strict=True)]:
                must_succeed(future, f"one of many {what}s at once")
        for engine in engines[:3]:
            engine.must_have_loaded()


class Pieces(TransportKit):
    """`Future.advance` of a load with `in_pieces`."""

    @pytest.mark.parametrize("case", ["nhd", "hybrid"])
    def test_a_load_in_pieces_is_whole_at_its_end(self, make_engine: MakeEngine, case: str) -> None:
        engine = make_engine(CASES[case])
        future = engine.load(engine.stored(), engine.target(), in_pieces=True)
        pieces = list(self._pieces(future))
        must_succeed(future, "a load in pieces")
        engine.must_have_loaded()
        largest = max(group.nbytes for group in engine.registration.desc.groups)
        assert max(pieces, default=0) <= largest, "a piece is larger than an object, and none was to be as large"
        assert future.advance() == 0, "a load that has ended is advanced"

    def test_between_its_pieces_a_load_touches_nothing_and_is_cancelled(
        self, client: KVClient, engine: KitEngine
    ) -> None:
        future = self._between_two_pieces(engine)
        engine.overwrite()
        future.cancel()
        assert future.query(), "a load that touches nothing does not end at once when it is cancelled"
        must_miss(future, "a load that was cancelled between two pieces ended well")
        assert future.advance() == 0
        engine.must_be_right("a load that was cancelled between two pieces touched the tensors")
        self.must_be_given_back(client, "a load that ended early")
        must_work(engine, "a transfer after a load that was cancelled between two pieces")

    def _between_two_pieces(self, engine: KitEngine) -> Future[LoadOutcome]:
        """Store, and return a load of it of which the first piece is copied; skip if the transport copies by itself."""
        future = engine.load(engine.stored(), engine.target(), in_pieces=True)
        if not next(self._pieces(future), 0):
            pytest.skip("the transport copies by itself")
        assert not future.query(), "a load of several objects has ended with its smallest piece"
        return future

    def _pieces(self, future: Future[LoadOutcome]) -> Iterator[int]:
        """Have the load copied in the smallest pieces; yield the bytes of each."""
        for _ in range(int(self.patience_s / 0.01)):
            if future.query():
                return
            if piece := future.advance(1):
                yield piece
            else:
                future.wait(0.01)
        pytest.fail("a load in pieces did not end, though it was advanced")
