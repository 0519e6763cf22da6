"""vLLM's own offloading over a real server, in vLLM itself: what one engine stores another loads, and greedy tokens are
those of an engine without a cache, whatever fails."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.vllm import rows
from tests.vllm.engine import HALTED
from tests.vllm.hybrid_models import FAMILIES
from tests.vllm.hybrid_models import make as make_hybrid
from tests.vllm.model import cached, prompt
from tests.vllm.rows import Answer, Bench

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

TOKENS, HIT = 1000, 896
MODELS = Path(os.environ.get("KVF_VLLM_MODELS", Path(tempfile.gettempdir()) / "kvf-vllm-models"))


def bench_of(model: Path, directory: Path, tokens: int = TOKENS, **engine: object) -> Bench:
    patient = {**rows.PATIENT, "kvframework.connect_timeout_s": 60.0}
    bench = Bench(
        model, directory, prompt(tokens, seed=3), 12, patient, dict(engine), connectors="tests.vllm.offload_faults"
    )
    # vLLM wants a set of cores for each of its ranks.
    return replace(bench, cores="0|1") if engine.get("tensor_parallel_size") == 2 else bench


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench_of(cached("tiny"), tmp_path_factory.mktemp("offloading"))


@pytest.fixture(scope="module")
def cold(bench: Bench) -> Answer:
    return rows.cold(bench)


def test_what_one_engine_stores_another_loads(bench: Bench, cold: Answer) -> None:
    with rows.server_for() as server:
        stored, again = bench.run(server, bench.ask(), bench.ask(reset=True))
        local, rest = bench.run(server, bench.ask(300), bench.ask())
        (other,) = bench.run(server, bench.ask(salt="pepper"))
        wrong, hidden, out = bench.run(
            server,
            bench.ask(),
            bench.ask(forget=True),
            bench.ask(reset=True, params={"kvframework.load": False}),
            connector="WrongKv",
        )
        leases = server.status()["l1"]
    assert (stored.tokens, stored.cached) == (cold.tokens, 0)
    assert (again.tokens, again.cached, again.computed) == (cold.tokens, HIT, TOKENS - HIT)
    assert (local.cached, rest.tokens, rest.cached) == (256, cold.tokens, HIT)
    assert (other.tokens, other.cached) == (cold.tokens, 0)
    # The control: what was loaded counts.
    assert wrong.cached == HIT
    assert wrong.tokens != cold.tokens
    assert (hidden.tokens, hidden.cached) == (cold.tokens, 0)
    assert (out.tokens, out.cached) == (cold.tokens, 0)
    assert (leases["pin_leases"], leases["write_leases"], leases["pins"]) == (0, 0, 0)


def test_workers_of_one_engine_write_one_object_each_chunk(bench: Bench, cold: Answer, tmp_path: Path) -> None:
    split = bench_of(bench.model, tmp_path, tensor_parallel_size=2, distributed_executor_backend="mp")
    with rows.server_for() as server:
        split.run(server, split.ask())
        objects = server.status()["l1"]["objects"]
        (loaded,) = split.run(server, split.ask())
        (alone,) = bench.run(server, bench.ask())
    assert (loaded.tokens, loaded.cached) == (cold.tokens, HIT)
    # Eight blocks of 16 tokens of all workers are a chunk.
    assert objects == HIT // 128
    assert (alone.tokens, alone.cached) == (cold.tokens, 0)


def test_one_worker_loads_what_two_have_stored_in_vllms_canonical_layout(
    bench: Bench, cold: Answer, tmp_path: Path
) -> None:
    split = bench_of(bench.model, tmp_path, tensor_parallel_size=2, distributed_executor_backend="mp")
    alone = bench_of(bench.model, tmp_path)
    with rows.server_for() as server:
        bench.run(server, bench.ask())
        for each in (split, alone):
            each.options["canonical_layout"] = True
        (stored,) = split.run(server, split.ask())
        (loaded,) = alone.run(server, alone.ask())
        (wrong,) = alone.run(server, alone.ask(), connector="WrongKv")
        (again,) = split.run(server, split.ask())
        objects = server.status()["l1"]["objects"]
    # The ordinary layout is another namespace.
    assert (stored.tokens, stored.cached) == (cold.tokens, 0)
    assert (loaded.tokens, loaded.cached) == (cold.tokens, HIT)
    assert (again.tokens, again.cached) == (cold.tokens, HIT)
    assert wrong.tokens != cold.tokens
    assert objects == 2 * HIT // 128


def test_the_canonical_layout_is_refused_where_vllm_has_none(tmp_path: Path) -> None:
    bench = bench_of(make_hybrid(MODELS / "lfm2", "lfm2"), tmp_path)
    bench.options["canonical_layout"] = True
    with rows.server_for() as server, pytest.raises(AssertionError, match="leave canonical_layout out"):
        bench.run(server, bench.ask())


def test_mla_on_a_cpu_is_neither_stored_nor_loaded(tmp_path: Path) -> None:
    bench = bench_of(cached("mla"), tmp_path)
    with rows.server_for() as server:
        (first,) = bench.run(server, bench.ask())
        (second,) = bench.run(server, bench.ask())
        objects = server.status()["l1"]["objects"]
    assert (second.tokens, second.cached, objects) == (first.tokens, 0, 0)
    assert "vLLM loads and stores no KV:" in first.log


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_loaded_with_the_keys_and_values(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", str(Path(__file__).parent / "no_images") + os.pathsep + os.environ.get("PYTHONPATH", "")
    )
    told = FAMILIES[family]
    tokens = told.chunks * told.chunk + 1
    bench = bench_of(make_hybrid(MODELS / family, family), tmp_path, tokens, **told.engine)
    cold = rows.cold(bench)
    with rows.server_for() as server:
        (stored,) = bench.run(server, bench.ask())
        (loaded,) = bench.run(server, bench.ask())
        (wrong,) = bench.run(server, bench.ask(), connector="WrongKv")
    assert (stored.tokens, stored.cached) == (cold.tokens, 0)
    assert (loaded.tokens, loaded.cached) == (cold.tokens, tokens - 1)
    assert wrong.tokens != cold.tokens


@contextmanager
def taken_over(server: ServerProcess, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Another server takes over while a copy halts. Yields the bytes that the next one keeps from everybody then."""
    kept: list[int] = []

    def take_over() -> None:
        wait_until((folder / "halted").exists, 600, "a copy")
        assert server.take_over() == 0, server.log
        kept.append(server.status()["l1"]["quarantined_bytes"])
        (folder / "over").touch()

    monkeypatch.setenv(HALTED, str(folder))
    thread = threading.Thread(target=take_over, daemon=True)
    thread.start()
    yield kept
    thread.join()


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_load_during_which_another_server_takes_over_is_computed(
    bench: Bench, cold: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    loading = bench_of(bench.model, bench.directory)
    loading.options["kvframework.load"] = load
    with rows.server_for() as server:
        bench.run(server, bench.ask())
        with taken_over(server, tmp_path, monkeypatch):
            asks = bench.ask(), bench.ask(reset=True, settle=True)
            computed, loaded = loading.run(server, *asks, connector="HaltsALoad")
        l1 = server.status()["l1"]
    assert computed.tokens == loaded.tokens == cold.tokens
    assert computed.computed >= TOKENS
    assert computed.counters["kvframework:failed_loads"] == 1
    # L1 has gone over with all that it had.
    assert (loaded.cached, loaded.computed) == (HIT, TOKENS - HIT)
    assert (l1["pin_leases"], l1["pins"], l1["quarantined_bytes"]) == (0, 0, 0)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_store_during_which_another_server_takes_over_is_never_published(
    bench: Bench, cold: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    engine = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"} if workers == 2 else {}
    storing, idle, objects = bench_of(bench.model, bench.directory, **engine), tmp_path / "idle", []

    def waits() -> Iterator[None]:
        yield  # for the takeover
        wait_until(lambda: server.status()["l1"]["quarantined_bytes"] == 0, 300, "the end of quarantine")
        objects.append(server.status()["l1"]["objects"])
        yield idle.touch()

    with rows.server_for() as server:
        with taken_over(server, tmp_path, monkeypatch) as kept:
            asks = (
                bench.ask(),
                # Its steps end the store, whose blocks vLLM keeps meanwhile.
                bench.ask(9, wait_file=str(tmp_path / "over"), settle=True),
                bench.ask(reset=True),
                bench.ask(reset=True, wait_file=str(idle)),
            )
            answers = storing.run(server, *asks, connector="HaltsAStore", on_wait=waits().__next__)
        answers += storing.run(server, bench.ask())
    assert [answer.tokens for answer in answers[:1] + answers[2:]] == [cold.tokens] * 4
    assert [answer.cached for answer in answers] == [0, 0, 0, HIT, HIT]
    assert (kept, objects) == ([HIT * 4096], [HIT // 128])
