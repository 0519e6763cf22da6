"""A whole SGLang engine on the CPU, by its hierarchical cache and by its external linker: what one process stores
another loads, and the tokens are the same. Each control, whose loaded bytes are changed, gives other tokens: so it is
the loaded bytes that decide."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sglang.engine_order import Ask
from tests.sglang.model import HYBRID, make
from tests.sglang.rows import Answer, Bench, stored
from tests.support.server_process import ServerProcess
from tests.support.trained_model import asked, trained_folder
from tests.support.waiting import wait_until
from tests.vllm.model import prompt

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

PAGE = 64
LENGTH, PAGES = 1300, 20
MODELS = Path(os.environ.get("KVF_SGLANG_MODELS", Path(tempfile.gettempdir()) / "kvf-sglang-models"))
# What a storage is given with a call, field by field.
GIVEN = """
from tests.sglang.standins import everything; everything.install()
from dataclasses import fields
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolTransfer
print(*(field.name for each in (HiCacheStorageExtraInfo, PoolTransfer) for field in fields(each)))
"""
FAULTS = {"module_path": "tests.sglang.faults"}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(make(MODELS / "tiny", "tiny"), tmp_path_factory.mktemp("llama"), prompt(LENGTH, seed=7))


@pytest.fixture(scope="module")
def cold(bench: Bench) -> Answer:
    return bench.answers(None)[0]


@pytest.fixture(scope="module")
def server(bench: Bench, cold: Answer) -> Iterator[ServerProcess]:
    with ServerProcess(capacity="128MiB") as server:
        assert bench.answers(server, objects=PAGES) == [cold]
        yield server


def test_a_storage_is_given_no_token_ids() -> None:
    """So what SGLang stores has no events. Once a release gives them, `PoolPages.store` can pass them on."""
    shown = subprocess.run([sys.executable, "-c", GIVEN], capture_output=True, text=True, check=True).stdout
    names = shown.splitlines()[-1].split()
    assert {"prefix_keys", "keys"} <= set(names)
    assert [name for name in names if "token" in name] == []


@pytest.mark.engine_feature("SGLang", "new process")
@pytest.mark.engine_feature("SGLang", "tenants")
def test_a_new_process_loads_what_another_has_stored(bench: Bench, server: ServerProcess, cold: Answer) -> None:
    """Its host pool has another layout; a salt is another name."""
    asks = [Ask(bench.prompt), Ask(bench.prompt, salt="tenant")]
    loaded, salted = bench.answers(server, *asks, engine={"hicache_mem_layout": "page_first_direct"})
    assert loaded == Answer(cold.tokens, PAGES * PAGE, PAGES * PAGE)
    assert (salted.tokens, salted.stored) == (cold.tokens, 0)


@pytest.mark.engine_feature("SGLang", "new process")
def test_other_bytes_give_other_tokens(bench: Bench, server: ServerProcess, cold: Answer) -> None:
    (spoiled,) = bench.answers(server, **FAULTS, class_name="SpoiledPages")
    assert spoiled.stored == PAGES * PAGE
    assert spoiled.tokens != cold.tokens


@pytest.mark.engine_feature("SGLang", "no server")
def test_an_engine_outlives_its_server(bench: Bench, cold: Answer, tmp_path: Path) -> None:
    """It starts without one, finds one, computes while it is dead, and uses the next one; after `clear` and after an
    update of its weights it finds nothing."""
    files = [tmp_path / str(number) for number in range(6)]

    def ask(number: int, **fields: object) -> Ask:
        return Ask(bench.prompt, wait_file=str(files[number]), **fields)  # type: ignore[arg-type]

    server = ServerProcess(capacity="128MiB")
    asks = [
        Ask(bench.prompt),
        ask(0, flush=True),
        ask(1, flush=True),
        ask(2, flush=True),
        ask(3, flush=True),
        ask(4, flush=True, clear=True),
        ask(5, flush=True, update=str(bench.model)),
    ]
    try:
        with bench.running(server, *asks) as engine:
            assert engine.answer() == cold

            def go_on(number: int) -> Answer:
                engine.expect("waiting")
                files[number].touch()
                return engine.answer()

            server.start()
            wait_until(lambda: len(server.status()["instances"]) == 2, what="the registration")
            assert go_on(0) == cold
            wait_until(lambda: stored(server) == PAGES, what="the stores")
            assert go_on(1) == Answer(cold.tokens, PAGES * PAGE, PAGES * PAGE)
            server.kill9()
            assert go_on(2) == cold
            server.start()
            wait_until(lambda: len(server.status()["instances"]) == 2, what="the registration")
            # What SGLang stored while no server was there is stored again when it is computed again.
            assert go_on(3) == cold
            wait_until(lambda: stored(server) == PAGES, what="the stores")
            assert go_on(4) == cold
            wait_until(lambda: stored(server) == 2 * PAGES, what="the stores after a clear")
            assert go_on(5) == cold
        assert "SGLang updates its weights" in engine.log.read_text()
    finally:
        server.__exit__()


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param({"tp_size": 2}, id="tp", marks=pytest.mark.engine_feature("SGLang", "tensor parallel")),
        pytest.param({"pp_size": 2}, id="pp", marks=pytest.mark.engine_feature("SGLang", "pipeline parallel")),
    ],
)
def test_each_rank_loads_its_own_part(bench: Bench, cold: Answer, ranks: dict[str, int]) -> None:
    split = replace(bench, engine=ranks)
    with ServerProcess(capacity="128MiB") as server:
        assert split.answers(server, objects=2 * PAGES) == [cold]
        assert split.answers(server) == [Answer(cold.tokens, PAGES * PAGE, PAGES * PAGE)]


@pytest.mark.engine_feature("SGLang", "hybrid models")
def test_a_hybrid_needs_its_states(tmp_path: Path) -> None:
    """A hit ends where a state is: at the end of what was computed. The prompt ends one token later, or a wrong state
    would be forgotten. The tokens are those after a hit of SGLang's own, which rounds states, too."""
    length = 321
    bench = Bench(
        make(MODELS / HYBRID, HYBRID),
        tmp_path,
        prompt(length, seed=3),
        {"page_size": 1, "hicache_mem_layout": "page_first_direct", "mamba_radix_cache_strategy": "no_buffer"},
        {"prefetch_threshold": 64},
    )
    first = Ask(bench.prompt[:-1])
    _, own = bench.answers(None, first, Ask(bench.prompt))
    assert (own.cached, own.stored) == (length - 1, 0)
    with ServerProcess(capacity="256MiB") as server:
        # A page a token, and a state of two parts.
        bench.answers(server, first, objects=length - 1 + 2)
        (loaded,) = bench.answers(server)
        assert loaded == Answer(own.tokens, length - 1, length - 1)
        (spoiled,) = bench.answers(server, **FAULTS, class_name="SpoiledStates")
        assert spoiled.stored == length - 1
        assert spoiled.tokens != own.tokens


LINKER_FAULTS = {"module": "tests.sglang.faults_of_linkers"}


def cached(answer: Answer) -> tuple[list[int], int]:
    return answer.tokens, answer.cached


def test_device_pools_are_loaded_by_a_new_process(bench: Bench, cold: Answer) -> None:
    """Its objects are those of the hierarchical cache."""
    with ServerProcess(capacity="128MiB") as server:
        assert bench.answers(server, objects=PAGES, linker={}) == [cold]
        (loaded,) = bench.answers(server, linker={})
        assert cached(loaded) == (cold.tokens, PAGES * PAGE)
        (spoiled,) = bench.answers(server, linker={**LINKER_FAULTS, "name": "SpoiledPages"})
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
def test_a_linked_hybrid_needs_its_states(tmp_path: Path) -> None:
    length = 321
    settings = {"page_size": 1, "mamba_radix_cache_strategy": "no_buffer"}
    bench = Bench(make(MODELS / HYBRID, HYBRID), tmp_path, prompt(length, seed=3), settings)
    first = Ask(bench.prompt[:-1])
    _, own = bench.answers(None, first, Ask(bench.prompt))
    with ServerProcess(capacity="256MiB") as server:
        bench.answers(server, first, objects=length - 1 + 2, linker={})
        assert cached(bench.answers(server, linker={})[0]) == (own.tokens, length - 1)
        (spoiled,) = bench.answers(server, linker={**LINKER_FAULTS, "name": "SpoiledStates"})
        assert spoiled.cached == length - 1
        assert spoiled.tokens != own.tokens


def test_an_answer_in_words_comes_from_the_kv_of_another_engine(tmp_path: Path) -> None:
    from tests.sglang.standins import vision

    vision.install()
    model = trained_folder(MODELS)
    question, words = asked(model)
    bench = Bench(model, tmp_path, question)
    ask = Ask(question, 32)
    # A page is left to compute, if only for the last token.
    pages = (len(question) - 1) // PAGE
    (cold,) = bench.answers(None, ask)
    print(words(cold.tokens))
    with ServerProcess(capacity="256MiB") as server:
        assert bench.answers(server, ask, objects=pages) == [cold]
        assert bench.answers(server, ask) == [Answer(cold.tokens, pages * PAGE, pages * PAGE)]
        (spoiled,) = bench.answers(server, ask, module_path="tests.sglang.faults", class_name="SpoiledPages")
    assert "pledge" in words(cold.tokens)
    assert spoiled.stored == pages * PAGE
    assert spoiled.tokens != cold.tokens
