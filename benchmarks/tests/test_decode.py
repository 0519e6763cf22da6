"""The decode bench: which gaps count, and a whole run at a stand-in for vLLM's server, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvframework_bench.decode.figures import DecodeFigures, Window, decode_tables, gaps_within, rows_of
from kvframework_bench.decode.run import ALONE, HELD, LOADED, DecodeSizes, bench_decode
from kvframework_bench.errors import BenchFailed, BenchUnavailable
from kvframework_bench.serving.contenders import Contender, Offload
from kvframework_bench.serving.model import read_config

pytest.importorskip("h11")

from benchmarks.tests.test_serving import contender, stand_in

SIZES = DecodeSizes(rounds=2, prompt_tokens=512, answer_tokens=100, engine_bytes=0)
CONFIG = (
    '{"vocab_size": 1000, "max_position_embeddings": 8192, "num_hidden_layers": 2, "num_attention_heads": 8, '
    '"num_key_value_heads": 2, "hidden_size": 64}'
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "a-model"
    folder.mkdir()
    (folder / "config.json").write_text(CONFIG)
    return folder


def test_what_counts_is_what_comes_while_a_request_waits_without_its_own_step() -> None:
    gaps = [1.0, 2.0, 3.0, 4.0, 5.0]  # ends at 11, 13, 16, 20, 25
    assert gaps_within(gaps, 10.0, [(10.5, 20.1)]) == [1.0, 2.0, 3.0]
    assert gaps_within(gaps, 10.0, [(11.5, 16.5), (17.0, 26.0)]) == [2.0, 4.0]
    assert gaps_within(gaps, 10.0, [(9.0, 10.5), (30.0, 31.0)]) == []


def test_ratios_are_taken_round_by_round() -> None:
    def windows(*gaps: float) -> list[Window]:
        return [Window([gap] * 5, [0.02], 0) for gap in gaps]

    rows = rows_of({ALONE: windows(1.0, 2.0), HELD: windows(2.0, 4.0), LOADED: windows(3.0, 6.0)}, ALONE, HELD)
    alone, held, loaded = rows
    assert (alone.p99, alone.p99_to_held, held.p99_to_held) == (None, None, None)
    assert held.p99 is not None
    assert loaded.p99 is not None
    assert loaded.p99_to_held is not None
    assert (held.p99.min, held.p99.max) == (2.0, 2.0)
    assert (loaded.p99.median, loaded.p99_to_held.median) == (3.0, 1.5)


def run(model: Path, *options: str) -> DecodeFigures:
    return bench_decode(SIZES, model=model, launch=stand_in, contender=contender("kvframework", *options))


def test_a_run_has_all_cases(model: Path) -> None:
    figures = run(model)
    assert [row.beside for row in figures.rows] == [ALONE, HELD, LOADED]
    assert figures.prompt_bytes == 512 * 2 * 2 * 2 * 8 * 4
    alone, held, loaded = figures.rows
    assert (alone.requests, alone.loaded_tokens, held.loaded_tokens) == (0, 0, 0)
    assert held.requests > 0
    assert loaded.loaded_tokens >= loaded.requests * 512 > 0
    assert alone.p50_ms.min >= 2.0
    assert len(decode_tables(figures)) == 2


def test_an_engine_that_loads_nothing_is_an_error(model: Path) -> None:
    with pytest.raises(BenchFailed, match=r"beside loads: [0-9]+ requests were answered, and 0 tokens loaded"):
        run(model, "never-loads")


def test_an_engine_that_ends_is_the_error_with_the_end_of_its_log(model: Path) -> None:
    with pytest.raises(BenchFailed, match="ended with status"):
        run(model, "dies-when-asked")


def test_a_model_of_short_prompts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1000, "max_position_embeddings": 512}')
    with pytest.raises(BenchUnavailable, match="at most 512 tokens"):
        run(tmp_path)


def test_too_little_memory(model: Path) -> None:
    @contextmanager
    def never(_directory: Path, _capacity: int) -> Iterator[Offload]:
        raise AssertionError("a server was started")
        yield

    sizes = DecodeSizes(rounds=1, engine_bytes=1 << 50)
    with pytest.raises(BenchUnavailable, match="of memory"):
        bench_decode(sizes, model=model, launch=stand_in, contender=Contender("kvframework", never, needed=True))


def test_the_kv_of_a_token(model: Path) -> None:
    assert read_config(model).kv_bytes == 2 * 2 * 2 * 8 * 4
