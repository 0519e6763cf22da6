"""The serving bench: the load of a trace, and a whole run at stand-ins for vLLM's server, over real sockets."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_plan.errors import TraceError
from kvf_plan.trace.form import Request
from kvframework_bench.errors import BenchFailed, BenchUnavailable
from kvframework_bench.lmcache_server import free_port
from kvframework_bench.process import adopting, running
from kvframework_bench.serving.contenders import IDEAL, NONE, OURS, OWN, PEER, Contender, Offload
from kvframework_bench.serving.engines import Engine, EngineSettings, family, vllm_command
from kvframework_bench.serving.figures import ServingFigures, Unequal
from kvframework_bench.serving.load import LoadShape, make_load, shared_tokens, token_ids
from kvframework_bench.serving.run import ServingSizes, bench_serving
from tests.support.waiting import wait_until

pytest.importorskip("h11")

CHUNK = 512
STAND_IN = str(Path(__file__).with_name("stand_in_engine.py"))


# the load


def conversation(root: int, lengths: Sequence[int], ats: Sequence[float]) -> list[Request]:
    """Turns that begin with chunk 0, as all do, and then with chunks of their own."""
    return [
        Request(at, tokens, 160, [0, *(1 + root * 100 + index for index in range((tokens - 1) // CHUNK))])
        for at, tokens in zip(ats, lengths, strict=True)
    ]


TURNS = st.lists(st.tuples(st.integers(CHUNK + 1, 20 * CHUNK), st.floats(0, 2000)), min_size=1, max_size=5)


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    requests: list[Request] = []
    for root, turns in enumerate(draw(st.lists(TURNS, min_size=3, max_size=12))):
        lengths, ats = sorted(tokens for tokens, _ in turns), sorted(at for _, at in turns)
        requests += conversation(root, lengths, ats)
    return sorted(requests, key=lambda request: request.at)


SHAPES = st.builds(
    LoadShape,
    requests=st.integers(1, 40),
    seconds=st.floats(1, 60),
    window_s=st.floats(10, 3000),
    longest=st.integers(200, 5000),
)


@given(traces(), SHAPES)
def test_a_load_is_turns_of_the_trace_in_its_order(trace: list[Request], shape: LoadShape) -> None:
    try:
        asks = make_load(trace, CHUNK, shape)
    except BenchFailed:
        return
    assert asks == make_load(trace, CHUNK, shape)
    ats = [ask.at for ask in asks]
    assert ats == sorted(ats)
    assert ats[0] == 0
    assert ats[-1] <= shape.seconds * 1.000001
    numbers = {ask.conversation for ask in asks}
    assert numbers == set(range(len(numbers)))
    for number in numbers:
        turns = [ask for ask in asks if ask.conversation == number]
        assert len(turns) > 1
        assert sorted(ask.turn for ask in turns) == list(range(len(turns)))
    for ask in asks:
        assert 1 <= ask.prompt_tokens <= shape.longest
        assert ask.answer_tokens == 10


@given(traces(), SHAPES, st.integers(0, 5))
def test_what_the_trace_shares_the_tokens_share(trace: list[Request], shape: LoadShape, seed: int) -> None:
    try:
        asks = make_load(trace, CHUNK, shape)[:6]
    except BenchFailed:
        return
    for one in asks:
        mine = token_ids(one, seed=seed, vocabulary=32000)
        assert len(mine) == one.prompt_tokens
        assert all(300 <= token < 32000 for token in mine)
        for other in asks:
            theirs = token_ids(other, seed=seed, vocabulary=32000)
            same = 0
            for a, b in zip(one.pieces, other.pieces, strict=False):
                if a.chunk != b.chunk:
                    break
                same += min(a.tokens, b.tokens)
            assert mine[:same] == theirs[:same]


@given(traces(), SHAPES)
def test_an_unlimited_cache_has_what_came_before(trace: list[Request], shape: LoadShape) -> None:
    try:
        asks = make_load(trace, CHUNK, shape)
    except BenchFailed:
        return
    assert shared_tokens(asks) <= sum(ask.prompt_tokens for ask in asks)
    twice = [ask for ask in asks for _ in range(2)]
    assert shared_tokens(twice) >= sum(ask.prompt_tokens for ask in asks)


def test_rounds_share_no_tokens() -> None:
    trace = [*conversation(0, [1100, 1200], [0, 1]), *conversation(1, [1100, 1200], [1, 2])]
    ask = make_load(trace, CHUNK, LoadShape(4, 1))[1]
    one, other = (token_ids(ask, seed=seed, vocabulary=32000) for seed in (1, 2))
    assert sum(a == b for a, b in zip(one, other, strict=True)) < len(one) / 20


def test_a_load_has_conversations_of_the_whole_window() -> None:
    trace = [each for root in range(50) for each in conversation(root, [1100, 1200], [20.0 * root, 20.0 * root + 5])]
    asks = make_load(trace, CHUNK, LoadShape(20, 10, window_s=1000))
    assert len(asks) == 20
    assert asks[-1].at > 8


def test_of_a_trace_without_second_turns_no_load_is_made() -> None:
    with pytest.raises(BenchFailed, match="no conversation of two to"):
        make_load(conversation(0, [1100], [0]), CHUNK, LoadShape(4, 1))


# a run


def write_trace(folder: Path) -> Path:
    requests = [each for root in range(4) for each in conversation(root, [1100, 1300, 1800], [root, 20 + root, 60])]
    requests.sort(key=lambda request: request.at)
    path = folder / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": int(each.at * 1000),
                    "input_length": each.tokens,
                    "output_length": each.output_tokens,
                    "hash_ids": each.chunks,
                }
            )
            + "\n"
            for each in requests
        )
    )
    return path


def contender(name: str, *options: str, needed: bool = True) -> Contender:
    @contextmanager
    def opened(_directory: Path, _capacity: int) -> Iterator[Offload]:
        yield Offload(list(options))

    return Contender(name, opened, needed)


def absent(name: str) -> Contender:
    @contextmanager
    def opened(_directory: Path, _capacity: int) -> Iterator[Offload]:
        raise BenchUnavailable("not installed: it", hint="install it")
        yield

    return Contender(name, opened, needed=False)


@contextmanager
def stand_in(
    name: str, _settings: EngineSettings, options: Sequence[str], _cores: Sequence[int], directory: Path
) -> Iterator[Engine]:
    port = free_port()
    with running(name, [sys.executable, STAND_IN, str(port), *options], directory) as child:
        yield Engine(name, port, child, directory)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "a-model"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 1000, "max_position_embeddings": 8192}')
    return folder


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Callable[..., ServingFigures]:
    sizes = ServingSizes(LoadShape(100, 0.2, window_s=100), rounds=2, engine_bytes=0, capacity_bytes=0)
    trace = write_trace(tmp_path)
    return lambda *contenders: bench_serving(sizes, trace=trace, model=model, contenders=contenders, launch=stand_in)


def test_every_contender_is_measured_alone_and_with_two_engines(run: Callable[..., ServingFigures]) -> None:
    figures = run(contender(NONE), contender(IDEAL), contender(OURS, "other-tokens"))
    assert [(row.engines, row.contender, row.rounds) for row in figures.rows] == [
        (engines, name, 2) for engines in (1, 2) for name in (NONE, IDEAL, OURS)
    ]
    assert figures.skipped == []
    assert (figures.load.requests, figures.load.conversations) == (12, 4)
    assert [row.equal for row in figures.rows] == [1.0, 1.0, 0.0] * 2
    assert [len(row.unequal) for row in figures.rows] == [0, 0, 24] * 2
    assert figures.rows[2].unequal[0] == Unequal(0, 0, 0, 0)
    for row in figures.rows:
        assert row.p50_ms.min <= row.p90_ms.median <= row.p99_ms.max
        assert row.tokens_s.min > 0
        assert row.hit.max == 0  # no prompt came twice
        assert (row.p50 is None) is (row.contender == NONE)
        assert (row.later is None) is (row.later_p50 is None) is (row.contender == IDEAL)
        assert row.later_ms is not None
        assert row.later_ms.min <= row.p99_ms.max


def test_engines_but_the_ideal_ones_restart_after_half_of_the_requests(tmp_path: Path, model: Path) -> None:
    started: list[str] = []

    @contextmanager
    def counting(name: str, *rest: Any) -> Iterator[Engine]:
        started.append(name)
        with stand_in(name, *rest) as engine:
            yield engine

    sizes = ServingSizes(LoadShape(100, 0.2, window_s=100), 1, restarts=True, engine_bytes=0, capacity_bytes=0)
    contenders = [contender(name) for name in (NONE, IDEAL, OURS)]
    figures = bench_serving(sizes, trace=write_trace(tmp_path), model=model, contenders=contenders, launch=counting)
    assert figures.load.restarted
    # Once for all, and once for each number of engines.
    assert Counter(name.partition(",")[0] for name in started) == {NONE: 6, IDEAL: 2, OURS: 6}
    assert [(row.equal, row.unequal) for row in figures.rows] == [(1.0, [])] * 6
    assert all(row.engine_ms.min >= 0 for row in figures.rows)


def test_a_peer_that_does_not_run_is_named_with_its_first_error(run: Callable[..., ServingFigures]) -> None:
    figures = run(contender(NONE), contender(OWN, "dies", needed=False), absent(PEER))
    assert [(each.what, each.reason) for each in figures.skipped] == [
        (OWN, "Exception: only supported on GPUs"),
        (PEER, "not installed: it"),
    ]
    assert {row.contender for row in figures.rows} == {NONE}


def test_a_peer_whose_server_does_not_start_is_named_with_that_error(run: Callable[..., ServingFigures]) -> None:
    @contextmanager
    def opened(_directory: Path, _capacity: int) -> Iterator[Offload]:
        raise BenchFailed("the server has ended")
        yield

    figures = run(Contender(PEER, opened, needed=False), contender(NONE))
    assert [(each.what, each.reason) for each in figures.skipped] == [(PEER, "the server has ended")]
    assert {row.contender for row in figures.rows} == {NONE}


@pytest.mark.parametrize("fault", ["dies", "dies-when-asked"])
def test_an_engine_that_ends_is_the_error_with_the_end_of_its_log(
    run: Callable[..., ServingFigures], fault: str
) -> None:
    with pytest.raises(BenchFailed, match="kvframework, engine 1 ended with status") as caught:
        run(contender(NONE), contender(OURS, fault))
    assert "RuntimeError: " in str(caught.value)


def test_an_engine_that_refuses_is_quoted(run: Callable[..., ServingFigures]) -> None:
    with pytest.raises(BenchFailed, match=re.escape('status 400: {"error": {"message": "too long"}}')):
        run(contender(NONE, "refuses"))


def test_what_an_engine_leaves_behind_ends_with_it_and_is_counted(tmp_path: Path) -> None:
    settings = EngineSettings(Path("model"), 4096, 1 << 25)
    before = sum(os.times()[2:4])
    with adopting():
        with stand_in("an engine", settings, ["leaves-a-child"], [0], tmp_path) as engine:
            wait_until(lambda: len(family(engine.child.pid)) == 2 and engine.processor_s() > 0.5)
            of_family = family(engine.child.pid)
            engine.stop()
        assert not any(Path(f"/proc/{pid}").exists() for pid in of_family)
    assert sum(os.times()[2:4]) - before >= 0.5


# bad input


def start(trace: Path, model: Path | None, sizes: ServingSizes | None = None) -> ServingFigures:
    sizes = sizes or ServingSizes(LoadShape(12, 1), rounds=1, engine_bytes=0, capacity_bytes=0)

    def never(*_: object) -> AbstractContextManager[Engine]:
        raise AssertionError("an engine was started")

    return bench_serving(sizes, trace=trace, model=model, contenders=(contender(NONE),), launch=never)


def test_a_trace_that_is_not_there(tmp_path: Path, model: Path) -> None:
    with pytest.raises(TraceError, match="none"):
        start(tmp_path / "none", model)


def test_a_trace_of_another_format(tmp_path: Path, model: Path) -> None:
    (tmp_path / "t.csv").write_text("time,tokens\n1,2\n")
    with pytest.raises(TraceError):
        start(tmp_path / "t.csv", model)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "the model's config.json cannot be read: No such file"),
        ("{", "the model's config.json is wrong: "),
        ('{"vocab_size": 3}', "missing required field"),
        ('{"vocab_size": 1000, "max_position_embeddings": 512}', "at most 512 tokens"),
    ],
)
def test_a_folder_without_a_model(tmp_path: Path, config: str | None, said: str) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(config)
    with pytest.raises(BenchUnavailable, match=said) as caught:
        start(write_trace(tmp_path), folder)
    assert f"--model {folder}" in str(caught.value)


def test_too_little_memory(tmp_path: Path, model: Path) -> None:
    sizes = ServingSizes(LoadShape(12, 1), rounds=1, engine_bytes=1 << 50)
    with pytest.raises(BenchUnavailable, match="2 engines and their servers need"):
        start(write_trace(tmp_path), model, sizes)


def test_engines_differ_in_their_offload_only() -> None:
    settings = EngineSettings(Path("model"), 4096, 1 << 25)
    one, other = (vllm_command(settings, 8000, offload) for offload in ([], ["--kv-offloading-size", "1"]))
    assert other == [*one, "--kv-offloading-size", "1"]
