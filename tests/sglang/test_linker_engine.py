"""SGLang's external linker on a whole engine: device pools to the server and back, and what a dead server costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.engine_order import Ask
from tests.sglang.model import HYBRID, make
from tests.sglang.rows import Answer, Bench, stored
from tests.sglang.test_engine import LENGTH as LLAMA_LENGTH
from tests.sglang.test_engine import MODELS, PAGE, PAGES
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.vllm.model import prompt

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

SPOILED = {"module": "tests.sglang.faults_of_linkers"}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(make(MODELS / "tiny", "tiny"), tmp_path_factory.mktemp("linker"), prompt(LLAMA_LENGTH, seed=7))


@pytest.fixture(scope="module")
def cold(bench: Bench) -> Answer:
    """SGLang alone."""
    return bench.answers(None)[0]


def cached(answer: Answer) -> tuple[list[int], int]:
    return answer.tokens, answer.cached


def test_device_pools_are_loaded_by_a_new_process(bench: Bench, cold: Answer) -> None:
    """Its objects are those of the hierarchical cache."""
    with ServerProcess(capacity="128MiB") as server:
        assert bench.answers(server, objects=PAGES, linker={}) == [cold]
        (loaded,) = bench.answers(server, linker={})
        assert cached(loaded) == (cold.tokens, PAGES * PAGE)
        (spoiled,) = bench.answers(server, linker={**SPOILED, "name": "SpoiledPages"})
        assert spoiled.cached == PAGES * PAGE
        assert spoiled.tokens != cold.tokens
        assert bench.answers(server) == [Answer(cold.tokens, PAGES * PAGE, PAGES * PAGE)]


@pytest.mark.engine_feature("SGLang", "no server")
def test_a_dead_server_costs_no_answer(bench: Bench, cold: Answer, tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(3)]
    server = ServerProcess(capacity="128MiB")
    asks = [Ask(bench.prompt), *(Ask(bench.prompt, wait_file=str(file), flush=True) for file in files)]
    try:
        with bench.running(server, *asks, linker={}) as engine:

            def go_on(number: int) -> Answer:
                engine.expect("waiting")
                files[number].touch()
                return engine.answer()

            assert engine.answer() == cold
            server.start()
            wait_until(lambda: len(server.status()["instances"]) == 2, what="the registration")
            assert go_on(0) == cold
            wait_until(lambda: stored(server) == PAGES, what="the stores")
            assert cached(go_on(1)) == (cold.tokens, PAGES * PAGE)
            server.kill9()
            assert go_on(2) == cold
    finally:
        server.__exit__()


@pytest.mark.engine_feature("SGLang", "tensor parallel")
def test_tensor_parallel_ranks_agree(bench: Bench, cold: Answer) -> None:
    with ServerProcess(capacity="128MiB") as server:
        ranks = {"engine": {"tp_size": 2}, "linker": {}}
        assert bench.answers(server, objects=2 * PAGES, **ranks) == [cold]
        assert cached(bench.answers(server, **ranks)[0]) == (cold.tokens, PAGES * PAGE)


@pytest.mark.engine_feature("SGLang", "hybrid models")
def test_a_hybrid_needs_its_states(tmp_path: Path) -> None:
    length = 321
    settings = {"page_size": 1, "mamba_radix_cache_strategy": "no_buffer"}
    bench = Bench(make(MODELS / HYBRID, HYBRID), tmp_path, prompt(length, seed=3), settings)
    first = Ask(bench.prompt[:-1])
    _, own = bench.answers(None, first, Ask(bench.prompt))
    with ServerProcess(capacity="256MiB") as server:
        bench.answers(server, first, objects=length - 1 + 2, linker={})
        assert cached(bench.answers(server, linker={})[0]) == (own.tokens, length - 1)
        (spoiled,) = bench.answers(server, linker={**SPOILED, "name": "SpoiledStates"})
        assert spoiled.cached == length - 1
        assert spoiled.tokens != own.tokens
