"""The transport kit's tests of content: stored bytes come back, in the right place and nowhere else."""

from __future__ import annotations

import pytest

from kvf_dev.testing.transport.cases import CASES, CHUNK, PAGED
from kvf_dev.testing.transport.kit import MakeEngine, TransportKit
from kvf_dev.testing.transport.outcomes import must_miss, must_succeed, must_work
from kvframework.api.layout import NO_BLOCK
from kvframework.api.transport import StoreOutcome
from kvframework.errors import BadBlockIds, BadRange

NHD = PAGED["nhd"]


class Content(TransportKit):
    """Every layout, every group, every range."""

    @pytest.fixture(params=sorted(CASES))
    def case(self, request: pytest.FixtureRequest) -> str:
        if request.param == "opaque":
            pytest.importorskip("torch")
        name: str = request.param
        return name

    def test_what_is_stored_comes_back_in_other_blocks(self, make_engine: MakeEngine, case: str) -> None:
        must_work(make_engine(CASES[case]))

    def test_another_instance_loads_what_was_stored(self, make_engine: MakeEngine, case: str) -> None:
        one, other = make_engine(CASES[case]), make_engine(CASES[case])
        request = one.request()
        must_succeed(one.store(request, one.source()))
        must_succeed(other.load(request, other.target()))
        other.expect_loaded(one.model, one.source(), other.target())
        other.must_be_right()
        one.must_be_right("a store changes nothing")

    def test_skipped_tokens_are_not_written(self, make_engine: MakeEngine, case: str) -> None:
        groups = CASES[case]
        whole = max(group.block_size for group in groups) if any(group.opaque for group in groups) else 1
        engine = make_engine(groups)
        request = engine.request()
        must_succeed(engine.store(request, engine.source()))
        # The longest first, so that no load finds its skipped tokens written already.
        for skip in (3 * CHUNK - 1, CHUNK + 6, CHUNK, 7, 1):
            skip -= skip % whole
            must_succeed(engine.load(request, engine.target(), skip=skip))
            engine.expect_loaded(engine.snapshot(), engine.source(), engine.target(), skip)
            engine.must_be_right(f"{skip} tokens were skipped")

    def test_one_block_is_gathered_for_the_canary(self, make_engine: MakeEngine, case: str) -> None:
        """The canary receives the canonical bytes of a block, through the path that stores take."""
        engine = make_engine(CASES[case])
        blocks = [count - 2 for count in engine.model.blocks]
        instance = engine.worker._instance
        assert instance is not None
        gathered = instance.transfer.gather_block(engine.caches, blocks)
        expected = [engine.model.canonical_block(index, block) for index, block in enumerate(blocks)]
        wrong = [index for index, (one, other) in enumerate(zip(gathered, expected, strict=False)) if one != other]
        assert not wrong, (
            f"gather_block gives other bytes of layer group {wrong[0]} than its block {blocks[wrong[0]]} has"
        )
        assert len(gathered) == len(expected), f"gather_block gives {len(gathered)} blocks of {len(expected)} groups"

    def test_layouts_share_objects(self, make_engine: MakeEngine) -> None:
        """The same groups with other orders of axes have the same objects."""
        from dataclasses import replace

        one = make_engine([replace(NHD[0], axes=("plane", "block", "token", "head", "dim"))])
        request = one.request()
        must_succeed(one.store(request, one.source()))
        for axes in (("block", "head", "token", "dim"), ("layer", "block", "dim", "plane", "head", "token")):
            other = make_engine([replace(NHD[0], axes=axes)])
            assert other.registration.namespace == one.registration.namespace, "equal content has two namespaces"
            must_succeed(other.load(request, other.target()))
            other.expect_loaded(one.model, one.source(), other.target())
            other.must_be_right()

    def test_only_missing_chunks_are_copied(self, make_engine: MakeEngine) -> None:
        engine = make_engine(NHD)
        request = engine.request()
        middle = engine.source(CHUNK, 2 * CHUNK)
        must_succeed(engine.store(request, middle, CHUNK, 2 * CHUNK))
        before = engine.snapshot()
        engine.overwrite()
        whole = engine.store(request, engine.source())
        must_succeed(whole)
        outcome = whole.result()
        assert outcome == StoreOutcome(stored=2, present=1), (
            f"{outcome.stored} chunks were stored and {outcome.present} were present; right are 2 and 1"
        )
        after = engine.snapshot()
        must_succeed(engine.load(request, engine.target()))
        engine.expect_loaded(after, engine.source(), engine.target())
        engine.expect_loaded(before, middle, engine.target(CHUNK, 2 * CHUNK))
        engine.must_be_right()

    def test_a_part_of_what_is_stored_is_loaded(self, make_engine: MakeEngine) -> None:
        engine = make_engine(NHD)
        request = engine.request()
        must_succeed(engine.store(request, engine.source()))
        end = 2 * CHUNK
        must_succeed(engine.load(request, engine.target(CHUNK, end), CHUNK, end))
        engine.expect_loaded(engine.snapshot(), engine.source(CHUNK, end), engine.target(CHUNK, end))
        engine.must_be_right()

    def test_a_load_of_what_is_not_there_touches_nothing(self, make_engine: MakeEngine) -> None:
        engine = make_engine(NHD)
        request = engine.request()
        must_miss(engine.load(request, engine.target()))
        must_succeed(engine.store(request, engine.source(0, CHUNK), 0, CHUNK))
        must_miss(engine.load(request, engine.target()), "two chunks are missing")
        engine.must_be_right()

    def test_blocks_that_a_window_gave_away_are_left_out(self, make_engine: MakeEngine) -> None:
        engine = make_engine(CASES["hybrid"])
        request = engine.request()
        ids = engine.source()
        ids[1] = [NO_BLOCK] * 5 + ids[1][5:]
        ids[2] = [NO_BLOCK] * 2 + ids[2][2:]
        stored = engine.store(request, ids)
        must_succeed(stored)
        outcome = stored.result()
        assert outcome == StoreOutcome(stored=3 + 1 + 1 + 3), (
            f"{outcome.stored} objects were stored of 8 whose blocks the engine still has"
        )

    def test_wrong_block_ids_are_refused_before_anything_is_touched(self, make_engine: MakeEngine) -> None:
        engine = make_engine(CASES["state"])
        request = engine.request()
        good = engine.source()
        count = engine.model.blocks[0]
        for bad in (
            good[:1],
            [*good, good[0]],
            [good[0][:-1], good[1]],
            [[*good[0], 0], good[1]],
            [[*good[0][:-1], count], good[1]],
            [[*good[0][:-1], -1], good[1]],
            [[*good[0][:-1], NO_BLOCK], good[1]],
        ):
            for submit in (engine.store, engine.load):
                with pytest.raises(BadBlockIds):
                    submit(request, bad)
        for skip in (-1, 3 * CHUNK + 1):
            with pytest.raises(BadRange):
                engine.load(request, good, skip=skip)
        assert engine.hit(request) == 0, "a refused store was published"
        engine.must_be_right()

    def test_many_transfers_at_once_do_not_mix(self, make_engine: MakeEngine) -> None:
        engines = [make_engine(CASES[name]) for name in ("nhd", "hnd", "nhd")]
        requests = [[engine.request() for turn in range(4)] for engine in engines]
        futures = [
            engine.store(request, engine.source())
            for turn in range(4)
            for engine, request in ((engine, requests[at][turn]) for at, engine in enumerate(engines))
        ]
        for future in futures:
            must_succeed(future, "one of many stores at once")
        loads = [
            engine.load(requests[at][turn], engine.target()) for turn in range(4) for at, engine in enumerate(engines)
        ]
        for load in loads:
            must_succeed(load, "one of many loads at once")
        for engine in engines:
            engine.expect_loaded(engine.snapshot(), engine.source(), engine.target())
            engine.must_be_right()
