"""The connector in vLLM together with what its users combine: roles, several stores, speculation, chunked prefill, and
requests whose KV depends on more than tokens. Tokens are those of a cold engine, and wrong KV would be seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvf_vllm.registration import CONNECTORS
from tests.support.server_process import ServerProcess
from tests.vllm import rows
from tests.vllm.engine import Ask, Order
from tests.vllm.model import cached, prompt
from tests.vllm.rows import PATIENT, Answer, Bench, example, several

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

CHUNK = rows.CHUNK
# One token after the last chunk: it depends on all of the KV.
TOKENS = 5 * CHUNK + 1


@pytest.fixture(scope="module", params=rows.CONNECTORS)
def bench(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Bench:
    directory = tmp_path_factory.mktemp("together")
    return Bench(cached("tiny"), directory, prompt(TOKENS, seed=17), 12, PATIENT, connectors=request.param)


@pytest.fixture(scope="module")
def cold(bench: Bench) -> Answer:
    return rows.cold(bench)


def transfer(bench: Bench, server: ServerProcess, fault: str = "", **fields: Any) -> dict[str, Any]:
    name = "KvFrameworkOffloading" if bench.is_offloading else "KvFrameworkConnector"
    return {
        "kv_connector": fault or name,
        "kv_connector_module_path": bench.connectors if fault else CONNECTORS[name],
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvframework.endpoint": server.endpoint, **PATIENT},
        **fields,
    }


def answers(bench: Bench, given: dict[str, Any], *asks: Ask) -> list[Answer]:
    order = Order(str(bench.model), list(asks) or [bench.ask()], given, bench.engine)
    return rows.run_engine(order, bench.directory, cores=bench.cores)


@pytest.mark.engine_feature("vLLM", "prefill and decode")
def test_a_consumer_loads_what_a_producer_has_computed(bench: Bench, cold: Answer) -> None:
    with rows.server_for() as server:
        producing = transfer(bench, server, kv_role="kv_producer")
        producer, again = answers(bench, producing, bench.ask(), bench.ask(reset=True))
        assert (producer.tokens, again.tokens, again.cached) == (cold.tokens, cold.tokens, 0)
        other = Ask(prompt(2 * CHUNK, seed=18), tokens=4)
        consumer, _ = answers(bench, transfer(bench, server, kv_role="kv_consumer"), bench.ask(), other)
        assert (consumer.tokens, consumer.cached) == (cold.tokens, TOKENS - 1)
        assert not [name for name in consumer.counters if "stored" in name]
        wrong = answers(bench, transfer(bench, server, "WrongKv", kv_role="kv_consumer"))[0]
        assert wrong.tokens != cold.tokens
        # The consumer has not stored its own prompt.
        assert answers(bench, transfer(bench, server), other)[0].cached == 0


@pytest.mark.engine_feature("vLLM", "beside others")
def test_of_two_stores_one_that_was_emptied_is_made_up_for_by_the_other(bench: Bench, cold: Answer) -> None:
    with rows.server_for() as one, rows.server_for() as other:
        both = several(transfer(bench, one), transfer(bench, other))
        assert answers(bench, both)[0].tokens == cold.tokens
        for emptied in (one, other):
            emptied.stop()
            emptied.start()
            found = answers(bench, both)[0]
            assert (found.tokens, found.cached) == (cold.tokens, TOKENS - 1)


@pytest.mark.engine_feature("vLLM", "beside others")
def test_beside_vllms_own_either_store_is_enough(bench: Bench, tmp_path: Path) -> None:
    # Of a prompt that ends one token after a block, vLLM's own does not find what it has stored.
    bench = replace(bench, prompt=[*bench.prompt, 500])
    cold = rows.cold(bench)
    with rows.server_for() as server:
        both = several(transfer(bench, server), example(tmp_path / "files"))
        assert answers(bench, both)[0].tokens == cold.tokens
        server.stop()
        server.start()
        # vLLM's own has whole blocks of the prompt, all or none.
        found = answers(bench, both)[0]
        assert (found.tokens, found.cached) == (cold.tokens, 5 * CHUNK)
        elsewhere = several(transfer(bench, server), example(tmp_path / "empty"))
        # What the other has loaded within a step is stored a step later.
        found = answers(bench, elsewhere)[0]
        assert (found.tokens, found.cached) == (cold.tokens, 5 * CHUNK)


@pytest.mark.engine_feature("vLLM", "speculative decoding")
@pytest.mark.engine_feature("vLLM", "chunked prefill")
def test_speculation_and_chunked_prefill_beside_loads(bench: Bench) -> None:
    """Drafts come from the prompt's own words: they are taken as often as rejected."""
    words = prompt(40, seed=19)
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    chunked = replace(
        bench,
        prompt=(words * 40)[:TOKENS],
        new_tokens=2 * CHUNK,
        engine={"max_num_batched_tokens": 200, "enable_chunked_prefill": True, "max_num_seqs": 4},
    )
    drafted = replace(chunked, engine={**chunked.engine, "speculative_config": ngram})
    wanted = rows.cold(chunked)
    with rows.server_for() as server:
        stored = answers(drafted, transfer(bench, server))[0]
        assert stored.tokens == wanted.tokens
        assert stored.counters["vllm:spec_decode_num_accepted_tokens"] > 0
        # Each half of the prompt, then all: local and external hits, and a rest in pieces of 200.
        third = replace(drafted, prompt=[*drafted.prompt, *wanted.tokens, *prompt(500, seed=20)], new_tokens=12)
        loaded = answers(third, transfer(bench, server), third.ask(3 * 128), third.ask())
        assert loaded[1].cached >= TOKENS // CHUNK * CHUNK + 2 * CHUNK
        assert loaded[1].tokens == rows.cold(third).tokens


@pytest.mark.parametrize("block", [96])
def test_a_block_that_is_no_divisor_of_the_servers_chunk(bench: Bench, cold: Answer, block: int) -> None:
    odd = replace(bench, engine={"block_size": block})
    with rows.server_for() as server:
        assert answers(odd, transfer(bench, server))[0].tokens == cold.tokens
        found = answers(odd, transfer(bench, server))[0]
        # Three blocks are the first multiple that has a chunk of 256.
        chunk = block if bench.is_offloading else 3 * block
        assert (found.tokens, found.cached) == (cold.tokens, TOKENS // chunk * chunk)
        # Other blocks are other objects.
        assert answers(bench, transfer(bench, server))[0].cached == 0


def test_a_reset_hides_what_was_shared_from_this_engine_only(bench: Bench, cold: Answer) -> None:
    with rows.server_for() as server:
        asks = [bench.ask(), bench.ask(reset=True), bench.ask(forget=True), bench.ask(reset=True)]
        found = answers(bench, transfer(bench, server), *asks)
        assert [answer.cached for answer in found] == [0, TOKENS - 1, 0, TOKENS - 1]
        assert {tuple(answer.tokens) for answer in found} == {tuple(cold.tokens)}
        assert answers(bench, transfer(bench, server))[0].cached == TOKENS - 1


def misses(answer: Answer) -> dict[str, float]:
    prefix = "kvframework:miss_requests|reason="
    return {name.removeprefix(prefix): count for name, count in answer.counters.items() if name.startswith(prefix)}


def test_embeddings_instead_of_tokens_are_computed(bench: Bench) -> None:
    embedded = replace(bench, engine={"enable_prompt_embeds": True})
    with rows.server_for() as server:
        one, other = answers(embedded, transfer(bench, server), bench.ask(embeds=1), bench.ask(embeds=2, reset=True))
    assert misses(one) == misses(other) == {"prompt_embeds": 1}
    assert one.tokens != other.tokens
    assert not [name for name in {**one.counters, **other.counters} if "stored" in name]


def test_pooling_is_computed(bench: Bench) -> None:
    pooling = replace(bench, engine={"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False})
    with rows.server_for() as server:
        one, other = answers(pooling, transfer(bench, server), bench.ask(pool=True), bench.ask(pool=True, reset=True))
    assert misses(one) == misses(other) == {"pooling": 1}
    assert one.tokens == other.tokens != []


def test_input_that_streams_is_computed(bench: Bench) -> None:
    with rows.server_for() as server:
        (answer,) = rows.run_engine(
            Order(str(bench.model), [bench.ask()], transfer(bench, server)),
            bench.directory,
            cores=bench.cores,
            program="tests.vllm.streaming_engine",
        )
    # The second request is a short one.
    assert set(misses(answer)) == {"streaming_input", "too_short"}
    assert not [name for name in answer.counters if "stored" in name]
    assert answer.tokens
