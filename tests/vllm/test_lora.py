"""LoRA adapters in vLLM itself: their KV is stored and loaded by the content of the adapter, and by nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import ServerProcess
from tests.vllm import rows
from tests.vllm.model import cached, make_adapter, prompt
from tests.vllm.rows import Answer, Bench

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CHUNK = rows.CHUNK
# One token after the last chunk: it depends on all of the KV.
TOKENS = 4 * CHUNK + 1
NEW = 12


@pytest.fixture(scope="module", params=rows.CONNECTORS)
def bench(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Bench:
    engine = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    directory = tmp_path_factory.mktemp("lora")
    tokens = prompt(TOKENS, seed=11)
    return Bench(cached("tiny"), directory, tokens, NEW, rows.PATIENT, engine, connectors=request.param)


@pytest.fixture
def folder(bench: Bench, tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", bench.model, seed=1)


def adapter(folder: Path, name: str = "style", number: int = 1) -> list[Any]:
    return [name, number, str(folder)]


def cold(bench: Bench, *adapters: list[Any]) -> list[int]:
    return bench.run(None, bench.ask(adapters=list(adapters)))[0].tokens


def answers(bench: Bench, server: ServerProcess, *adapters: list[Any], connector: str = "Watched") -> Answer:
    loads = bench.ask(8, adapters=list(adapters))
    return bench.run(server, loads, bench.ask(adapters=list(adapters)), connector=connector)[1]


def misses(answer: Answer) -> dict[str, float]:
    prefix = "kvframework:miss_requests|reason="
    return {name.removeprefix(prefix): count for name, count in answer.counters.items() if name.startswith(prefix)}


@pytest.mark.engine_feature("vLLM", "LoRA")
def test_an_adapter_is_loaded_by_what_it_holds(bench: Bench, folder: Path, tmp_path: Path) -> None:
    one = cold(bench, adapter(folder))
    with rows.server_for() as server:
        assert answers(bench, server, adapter(folder)).tokens == one
        # Under another name and number, from another path.
        copy = make_adapter(tmp_path / "copy", bench.model, seed=1)
        (folder / "adapter_config.json").rename(copy / "adapter_config.json")
        found = answers(bench, server, adapter(copy, "other", 7))
        assert (found.tokens, found.cached, found.computed) == (one, TOKENS - 1, 1)
        assert answers(bench, server, adapter(copy), connector="WrongKv").tokens != one


@pytest.mark.engine_feature("vLLM", "LoRA")
def test_an_adapter_that_was_trained_again_in_place_has_no_hit(bench: Bench, folder: Path) -> None:
    with rows.server_for() as server:
        before = answers(bench, server, adapter(folder))
        make_adapter(folder, bench.model, seed=2)
        wanted = cold(bench, adapter(folder))
        after = answers(bench, server, adapter(folder))
        assert (after.tokens, after.computed) == (wanted, TOKENS)
        assert misses(after) == {"not_stored": 1}
        # The control: the KV of the first would have been seen.
        assert after.tokens != before.tokens
        make_adapter(folder, bench.model, seed=2, alpha=32)
        assert answers(bench, server, adapter(folder)).computed == TOKENS


@pytest.mark.engine_feature("vLLM", "LoRA")
def test_two_adapters_and_the_base_model_in_one_batch(bench: Bench, folder: Path, tmp_path: Path) -> None:
    other = make_adapter(tmp_path / "other", bench.model, seed=2)
    batch = [adapter(folder), [], adapter(other, "other", 2)]
    # On a CPU vLLM takes the adapter of the last slot for requests without one.
    bench = replace(bench, engine={**bench.engine, "max_loras": 3})
    wanted = cold(bench, *batch)
    assert len({tuple(wanted[at : at + NEW]) for at in range(0, 3 * NEW, NEW)}) == 3
    with rows.server_for() as server:
        stored = answers(bench, server, *batch)
        assert (stored.tokens, stored.cached) == (wanted, 0)
        found = answers(bench, server, *batch)
        assert (found.tokens, found.cached) == (wanted, 3 * (TOKENS - 1))
        assert found.counters["kvframework:hit_requests"] == 3
        # An engine without adapters has the base model's.
        plain = answers(replace(bench, engine={}), server, [])
        assert (plain.tokens, plain.cached) == (wanted[NEW : 2 * NEW], TOKENS - 1)


def test_what_the_engine_holds_counts_not_what_lies_there_now(bench: Bench, folder: Path, tmp_path: Path) -> None:
    """Trained again in place while the engine runs, which keeps what it has loaded; then a third engine."""
    ready = tmp_path / "go"

    def train() -> None:
        make_adapter(folder, bench.model, seed=2)
        ready.touch()

    asks = [
        bench.ask(adapters=[adapter(folder)]),
        bench.ask(adapters=[adapter(folder)], wait_file=str(ready), reset=True),
    ]
    # The engine's first request with the adapter is computed, and stored all the same.
    first = cold(bench, adapter(folder))
    with rows.server_for() as server:
        stored, again = bench.run(server, *asks, on_wait=train)
        assert (stored.tokens, again.tokens) == (first, first)
        assert again.computed == 1
        found = answers(bench, server, adapter(folder))
        assert (found.tokens, found.computed) == (cold(bench, adapter(folder)), TOKENS)


@pytest.mark.parametrize("pause", [False, True])
def test_an_adapter_that_is_loaded_again_from_changed_files(
    bench: Bench, folder: Path, tmp_path: Path, pause: bool
) -> None:
    """vLLM's own prefix cache goes by name and path. `pause`: other adapters have pushed it out of vLLM before."""
    ready = tmp_path / "go"

    def train() -> None:
        make_adapter(folder, bench.model, seed=2)
        ready.touch()

    others = [adapter(make_adapter(tmp_path / str(seed), bench.model, seed=seed), str(seed), seed) for seed in (3, 4)]
    small = replace(bench, engine={**bench.engine, "max_loras": 1, "max_cpu_loras": 1})
    asks = [
        bench.ask(adapters=[adapter(folder)]),
        *[replace(bench.ask(600), adapters=[each]) for each in others if pause],
        bench.ask(adapters=[adapter(folder) if pause else adapter(folder, number=9)], wait_file=str(ready), reset=True),
    ]
    with rows.server_for() as server:
        *_, again = small.run(server, *asks, on_wait=train)
        assert (again.tokens, again.computed) == (cold(bench, adapter(folder)), TOKENS)
        assert misses(again) == {"lora_not_loaded": 1}
        assert answers(bench, server, adapter(folder)).cached == 0


def test_an_adapter_that_changes_while_it_is_loaded_has_no_name(bench: Bench, folder: Path) -> None:
    with rows.server_for() as server:
        answer = answers(bench, server, adapter(folder), connector="AdapterChangesWhileLoaded")
        assert "changed while vLLM loaded it, so its requests are computed" in answer.log
        assert "kvframework:stored_tokens" not in answer.counters
        assert answers(bench, server, adapter(folder)).cached == 0


def test_what_a_cpu_computes_without_an_adapter_beside_one_in_the_last_slot_is_not_stored(
    bench: Bench, folder: Path
) -> None:
    """vLLM's own mistake stays in its engine."""
    one_slot = replace(bench, engine={**bench.engine, "max_loras": 1})
    with rows.server_for() as server:
        _, base = one_slot.run(server, bench.ask(adapters=[adapter(folder)]), bench.ask(adapters=[[]]))
        assert "requests without an adapter are not stored: on a CPU vLLM applies its last adapter to them" in base.log
        assert answers(replace(bench, engine={}), server, []).cached == 0
