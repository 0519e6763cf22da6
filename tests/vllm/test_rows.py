"""The connector in vLLM itself: each row is a new engine process, and its greedy tokens are those of a cold engine."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvframework.wire import messages as m
from tests.events.node import Router, beginnings
from tests.support.ports import free_port
from tests.support.server_process import ServerProcess
from tests.support.trained_model import asked, trained_folder
from tests.vllm import rows
from tests.vllm.engine import Ask
from tests.vllm.model import cached, prompt
from tests.vllm.rows import Answer, Bench, written_back

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

# Correctness does not need the large model: `kvframework bench serving` has figures.
SIZE = os.environ.get("KVF_VLLM_SIZE", "tiny")
TOKENS = 2048
CHUNK = rows.CHUNK
CHUNKS = 8
# The last tokens fill no chunk.
CUT_TOKENS = CHUNKS * CHUNK + 52
# What is computed behind a cut may be rounded in another way: every cut is of the KV of the cold answer.
_AS_IT_IS = {"kvframework.store": False}


@dataclass(frozen=True)
class Cut:
    """The answers to one prompt: without a hit, and by the number of chunks hit, from the server and from the engine's
    own cache, 0 to `CHUNKS` of them."""

    cold: Answer
    loaded: Sequence[Answer]
    own: Sequence[Answer]


def cuts(bench: Bench, seeds: Sequence[int]) -> Iterator[Cut]:
    """Two engine processes, one after the other, for all prompts."""
    prompts = [prompt(CUT_TOKENS, seed=seed) for seed in seeds]
    with tempfile.TemporaryDirectory(dir=bench.directory, prefix="cuts-") as name:
        loaded = _loaded(bench, prompts, Path(name))
    own = _own(bench, prompts)
    for number in range(len(prompts)):
        first, rest = number * (CHUNKS + 2), number * (CHUNKS + 1)
        yield Cut(loaded[first], loaded[first + 1 : first + CHUNKS + 2], own[rest : rest + CHUNKS + 1])


def _loaded(bench: Bench, prompts: Sequence[list[int]], folder: Path) -> list[Answer]:
    """For each prompt a cold answer, which is stored, and one for each cut."""
    cut, asks, turns = folder / "cut", [], []
    cut.write_text("0")
    for given in prompts:
        asks.append(Ask(given, tokens=bench.new_tokens, reset=True))
        for chunks in range(CHUNKS + 1):
            turns.append((folder / f"go-{len(turns)}", chunks))
            asks.append(Ask(given, tokens=bench.new_tokens, reset=True, params=_AS_IT_IS, wait_file=str(turns[-1][0])))
    disk = ("l2.0.use=filesystem", f"l2.0.path={folder / 'l2'}", "l2.0.capacity=4GiB", "server.price=true")
    program = ("-m", "tests.vllm.cutting_server", str(cut))
    with ServerProcess(f"server.chunk_size={CHUNK}", *disk, capacity="1GiB", program=program) as server:
        waiting = iter(turns)

        def turn() -> None:
            go, chunks = next(waiting)
            written_back(server)
            with server.client() as client:
                assert client.call("CLEAR", m.Clear()).in_use == 0
            cut.write_text(str(chunks * CHUNK))
            go.touch()

        answers = bench.run(server, *asks, on_wait=turn)
        priced = server.status()["price"]
        assert (priced["lookups"], priced["cut"]) == (len(turns), len(prompts) * CHUNKS)
    return answers


def _own(bench: Bench, prompts: Sequence[list[int]]) -> list[Answer]:
    """For each prompt and number of chunks an answer of an engine whose own cache has these. They were computed in a
    prompt of the same length: what is computed beside them may change how they are rounded."""
    asks, others = [], prompt(CUT_TOKENS, seed=1 << 30)
    for given in prompts:
        for chunks in range(CHUNKS + 1):
            hit = chunks * CHUNK
            asks.append(Ask(given[:hit] + others[hit:], tokens=1, reset=True))
            asks.append(Ask(given, tokens=bench.new_tokens))
    return bench.run(None, *asks)[1::2]


@pytest.fixture(scope="module", params=rows.CONNECTORS)
def bench(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Bench:
    directory = tmp_path_factory.mktemp("rows")
    return Bench(cached(SIZE), directory, prompt(TOKENS), 16, connectors=request.param)


def only_ours(bench: Bench) -> None:
    """Skip what vLLM's own offloading does not have."""
    if bench.is_offloading:
        pytest.skip("a loss of vLLM's own offloading, see docs/engines/vllm.md")


@pytest.fixture(scope="module")
def cold(bench: Bench) -> Answer:
    return rows.cold(bench)


def lines(answer: Answer) -> list[str]:
    return [
        line
        for line in answer.log.splitlines()
        if re.search(r"(WARNING|ERROR).*\[(kvf_\w+|kvframework)", line) or re.search(r"(WARNING|ERROR).*no KV is", line)
    ]


@pytest.mark.engine_feature("vLLM", "new process")
def test_a_new_engine_loads_what_another_has_stored(bench: Bench, cold: Answer) -> None:
    stored, loaded = rows.store_and_load(bench)
    assert (stored.tokens, stored.cached, stored.computed) == (cold.tokens, 0, TOKENS)
    assert stored.counters["kvframework:stored_tokens"] == TOKENS
    assert stored.counters["kvframework:miss_requests|reason=not_stored"] == 1
    assert (loaded.tokens, loaded.cached, loaded.computed) == (cold.tokens, TOKENS, 1)
    assert loaded.counters["kvframework:hit_tokens"] == loaded.counters["kvframework:loaded_tokens"] == TOKENS
    assert loaded.counters["kvframework:load_seconds"] > 0
    assert not lines(stored) + lines(loaded)
    assert bench.is_offloading or "is registered at ipc://" in stored.log


def test_a_synchronous_load_leaves_a_chunk_to_compute(bench: Bench, cold: Answer) -> None:
    only_ours(bench)
    bench = Bench(**{**vars(bench), "options": {"kvframework.load": "sync"}})
    _, loaded = rows.store_and_load(bench)
    assert (loaded.tokens, loaded.computed) == (cold.tokens, CHUNK)


@pytest.mark.parametrize("row", [rows.load_from_disk, rows.load_from_redis])
def test_kv_outlives_the_server(bench: Bench, cold: Answer, row: object) -> None:
    answer = row(bench)  # type: ignore[operator]
    assert (answer.tokens, answer.computed) == (cold.tokens, 1)


@pytest.mark.engine_feature("vLLM", "other prompts")
def test_local_and_external_hits_are_mixed(bench: Bench, cold: Answer) -> None:
    # Five blocks: two chunks and a half.
    answer = rows.local_and_external(bench, 5 * 128)
    assert (answer.tokens, answer.computed) == (cold.tokens, 1)
    assert answer.counters["kvframework:hit_tokens"] == TOKENS - 5 * 128


# The digests of vLLM's own offloading are hashed by vLLM, whose import warns.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", [rows.one_lost, rows.corrupted_in_redis])
def test_what_is_lost_or_wrong_in_l2_is_computed(bench: Bench, cold: Answer, row: object) -> None:
    answer = row(bench, 5)  # type: ignore[operator]
    assert (answer.tokens, answer.cached, answer.computed) == (cold.tokens, 5 * bench.chunk, TOKENS - 5 * bench.chunk)


@pytest.mark.parametrize("connector", ["ServerDiesBeforeLoad", "ServerDiesDuringLoad"])
@pytest.mark.engine_feature("vLLM", "no server")
def test_a_server_that_is_killed_costs_recompute(bench: Bench, cold: Answer, connector: str) -> None:
    answer = rows.server_dies(bench, connector)
    assert (answer.tokens, answer.computed) == (cold.tokens, TOKENS)
    assert answer.counters["kvframework:failed_loads"] == 1


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_load_that_cannot_be_named_is_computed(bench: Bench, cold: Answer, load: str) -> None:
    options = {"kvframework.load": load, "kvframework.deadline_scale": 50.0}
    bench = Bench(**{**vars(bench), "options": options})
    with rows.server_for() as server:
        bench.run(server, bench.ask())
        first, again = bench.run(server, bench.ask(), bench.ask(reset=True), connector="RaisesOncePromised")
    assert first.tokens == again.tokens == cold.tokens
    assert first.computed >= TOKENS
    assert first.counters["kvframework:failed_loads"] == 1
    assert first.counters["kvframework:errors"] == 1


def test_an_engine_outlives_a_connector_that_raises_everywhere(bench: Bench, cold: Answer) -> None:
    with rows.server_for() as server:
        first, again = bench.run(server, bench.ask(), bench.ask(reset=True), connector="RaisesEverywhere")
    assert first.tokens == again.tokens == cold.tokens
    assert again.computed == TOKENS
    if bench.is_offloading:
        return
    for call in ("get_num_new_matched_tokens", "build_connector_meta", "start_load_kv", "wait_for_save"):
        assert first.log.count(f"{call} failed, and the engine continues without the cache:") == 1


@pytest.mark.engine_feature("vLLM", "new process")
def test_kv_that_is_wrong_would_be_seen(bench: Bench, cold: Answer) -> None:
    answer = rows.wrong_kv(bench)
    assert answer.computed == 1
    assert answer.tokens != cold.tokens


@pytest.mark.engine_feature("vLLM", "no server")
def test_a_server_that_is_not_there_costs_one_line(bench: Bench, cold: Answer) -> None:
    with rows.server_for() as server:
        server.stop()
        answer = bench.run(server, bench.ask())[0]
    assert (answer.tokens, answer.computed) == (cold.tokens, TOKENS)
    assert len(lines(answer)) == 1, lines(answer)
    assert "kvframework serve" in answer.log


@pytest.mark.engine_feature("vLLM", "tenants")
def test_opting_out_salts_and_generated_tokens(bench: Bench, cold: Answer) -> None:
    with rows.server_for() as server:
        long = Bench(**{**vars(bench), "new_tokens": CHUNK + 8})
        first = long.run(
            server,
            long.ask(params={"kvframework.store": False}),
            long.ask(reset=True),
            long.ask(reset=True, params={"kvframework.load": False}),
            long.ask(reset=True, salt="tenant"),
            long.ask(reset=True),
        )
        assert [answer.computed for answer in first] == [TOKENS, TOKENS, TOKENS, TOKENS, 1]
        assert len({tuple(answer.tokens) for answer in first}) == 1
        # A conversation goes on: its own answer has been stored as it was generated.
        turn = Bench(**{**vars(bench), "prompt": [*bench.prompt, *first[0].tokens]})
        (answer,) = turn.run(server, turn.ask())
        assert answer.cached == TOKENS + CHUNK
        assert answer.tokens == turn.run(None, turn.ask())[0].tokens


@pytest.mark.engine_feature("vLLM", "sliding windows")
def test_a_model_with_sliding_windows(bench: Bench, tmp_path: Path) -> None:
    window = replace(bench, model=cached("window"), directory=tmp_path, prompt=prompt(TOKENS + 100, seed=3))
    cold = rows.cold(window)
    stored, loaded = rows.store_and_load(window)
    assert stored.tokens == loaded.tokens == cold.tokens
    assert (stored.computed, loaded.computed) == (TOKENS + 100, 100)
    assert rows.wrong_kv(window).tokens != cold.tokens
    assert rows.server_dies(window, "ServerDiesBeforeLoad").tokens == cold.tokens


@pytest.mark.engine_feature("vLLM", "sliding windows")
def test_a_model_all_of_whose_layers_have_windows(bench: Bench, tmp_path: Path) -> None:
    """vLLM keeps one KV cache group of it. Of what a load passes by, vLLM takes the blocks away at once, also those of
    its own cache: after a failure they are missing."""
    local, loaded = 5 * CHUNK, CHUNK
    tokens = prompt(local + loaded + 100, seed=4)
    windows = replace(bench, model=cached("windows"), directory=tmp_path, prompt=tokens)
    cold = rows.cold(windows)
    with rows.server_for() as server:
        windows.run(server, windows.ask())
        asks = windows.ask(local, params={"kvframework.load": False}, reset=True), windows.ask()
        found, _, mixed, wrong = windows.run(
            server, windows.ask(), *asks, windows.ask(reset=True), connector="WrongKvFromTheThirdLoadOn"
        )
        assert (found.tokens, found.computed) == (cold.tokens, 100)
        assert (mixed.tokens, mixed.computed) == (cold.tokens, 100)
        assert loaded <= mixed.counters["kvframework:hit_tokens"] < local
        assert wrong.computed == 100
        assert wrong.tokens != cold.tokens
        _, failed = windows.run(server, *asks, connector="ServerDiesBeforeLoad")
        assert failed.counters["kvframework:failed_loads"] == 1
        assert failed.tokens == cold.tokens
        assert server.process.wait(60) == -9
        server.process = None


@pytest.mark.engine_feature("vLLM", "tensor parallel")
def test_each_tensor_parallel_worker_has_objects_of_its_own(bench: Bench) -> None:
    split = Bench(**{**vars(bench), "engine": {"tensor_parallel_size": 2}, "cores": "0|1"})
    cold = rows.cold(split)
    stored, loaded = rows.store_and_load(split)
    assert stored.tokens == loaded.tokens == cold.tokens
    assert (stored.computed, loaded.computed) == (TOKENS, 1)
    assert loaded.counters["kvframework:hit_tokens"] == TOKENS
    assert loaded.counters["kvframework:loaded_tokens"] == 2 * TOKENS


def announced(bench: Bench, *asks: Ask, server: ServerProcess | None = None) -> list[dict[str, Any]]:
    port = free_port()
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}", "topic": "kv"}
    listening = Bench(**{**vars(bench), "engine": {"kv_events_config": events}})
    with zmq.Context() as context, context.socket(zmq.SUB) as socket, contextlib.ExitStack() as ends:
        if server is None:
            server = ends.enter_context(rows.server_for())
        socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{port}")
        listening.run(server, *asks)
        batches = []
        while socket.poll(2000):
            batches.append(msgspec.msgpack.decode(socket.recv_multipart()[2]))
    return [event for batch in batches for event in batch[1]]


def test_routers_are_told_what_is_stored(bench: Bench) -> None:
    stored = [event for event in announced(bench, bench.ask()) if event["type"] == "BlockStored"]
    by_medium = {medium: [event for event in stored if event["medium"] == medium] for medium in ("GPU", "CPU")}
    blocks = {
        medium: [each for event in events for each in event["block_hashes"]] for medium, events in by_medium.items()
    }
    assert len(blocks["CPU"]) == TOKENS // 128
    # A router finds them by the same hashes as vLLM's own.
    assert set(blocks["CPU"]) <= set(blocks["GPU"])
    assert [token for event in by_medium["CPU"] for token in event["token_ids"]] == bench.prompt


def test_what_the_server_announces_the_engine_leaves_out(bench: Bench, tmp_path: Path) -> None:
    only_ours(bench)
    folder = tempfile.mkdtemp(prefix="kvf-")
    events = {"endpoint": "told.sock", "replay": "again.sock"}
    settings = [f"events.{key}=ipc://{folder}/{name}" for key, name in events.items()]
    with rows.server_for(*settings, "events.block_size=128", f"events.state={tmp_path}") as server:
        by_engine = announced(bench, bench.ask(), server=server)
        with contextlib.closing(Router(f"ipc://{folder}/told.sock", f"ipc://{folder}/again.sock")) as reader:
            reader.until(beginnings(bench.prompt, block=128))
    assert {event["medium"] for event in by_engine} == {"GPU"}
    # A router finds the server's blocks by the same hashes as vLLM's own.
    assert reader.held["CPU"] <= {each for event in by_engine for each in event["block_hashes"]}


def test_salted_blocks_are_announced_with_their_salt_or_not_at_all(bench: Bench) -> None:
    asks = [
        Ask(bench.prompt[: 2 * CHUNK], tokens=1, salt="tenant"),
        Ask(bench.prompt[: 4 * CHUNK], tokens=1, salt="tenant"),
        Ask(bench.prompt[: 2 * CHUNK], tokens=1, salt="other", params={"kvframework.salt": "own"}),
        Ask(bench.prompt[: 2 * CHUNK], tokens=1, params={"kvframework.salt": "own"}),
    ]
    silent = announced(bench, *asks)
    assert [event for event in silent if event["medium"] == "CPU"] == []
    # vLLM's own say it without a tag, and only in the first block of the prompt.
    assert [event["extra_keys"][0] for event in silent if event["medium"] == "GPU"][:2] == [["tenant"], None]

    # What takes too long under load is not stored, and so not announced.
    options = {"kvframework.announce_salts": True, "kvframework.deadline_scale": 50.0}
    events = announced(Bench(**{**vars(bench), "options": options}), *asks)
    of_server = [event for event in events if event["medium"] == "CPU"]
    assert [(event["type"], event["cache_salt"]) for event in of_server] == [("BlockStored", "tenant")] * 2
    assert [event["extra_keys"] for event in of_server] == [
        [["dynamo-cache-salt:tenant"], *[None] * 3],
        [["dynamo-cache-salt:tenant"], *[None] * 7],
    ]
    by_vllm = {each for event in events if event["medium"] == "GPU" for each in event["block_hashes"]}
    assert {each for event in of_server for each in event["block_hashes"]} <= by_vllm


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hit_that_is_cut_anywhere_changes_no_token(bench: Bench, tmp_path: Path, dtype: str) -> None:
    bench = replace(bench, model=cached("tiny"), directory=tmp_path, prompt=[], new_tokens=32, engine={"dtype": dtype})
    (cut,) = cuts(bench, [7])
    assert [answer.cached for answer in cut.loaded] == [CHUNK * chunks for chunks in range(CHUNKS + 1)]
    assert [answer.computed for answer in cut.loaded] == [CUT_TOKENS - CHUNK * chunks for chunks in range(CHUNKS + 1)]
    # The control: the engine's own cache, without a connector.
    assert [answer.cached for answer in cut.own] == [answer.cached for answer in cut.loaded]
    assert [answer.tokens for answer in cut.loaded] == [answer.tokens for answer in cut.own]
    if dtype == "float32":
        assert all(answer.tokens == cut.cold.tokens for answer in cut.loaded)


def test_an_answer_in_words_comes_from_the_kv_of_another_engine(bench: Bench, tmp_path: Path) -> None:
    model = trained_folder(Path(os.environ.get("KVF_VLLM_MODELS", Path(tempfile.gettempdir()) / "kvf-vllm-models")))
    question, words = asked(model)
    bench = replace(
        bench, model=model, directory=tmp_path, prompt=question, new_tokens=32, engine={"max_model_len": 4096}
    )
    cold = rows.cold(bench)
    stored, loaded = rows.store_and_load(bench)
    print(words(cold.tokens))
    assert stored.tokens == loaded.tokens == cold.tokens
    whole = len(question) // bench.chunk * bench.chunk
    assert (stored.cached, loaded.cached, loaded.computed) == (0, whole, len(question) - whole)
    assert "pledge" in words(loaded.tokens)
    assert rows.wrong_kv(bench).tokens != cold.tokens


def test_an_engine_learns_its_speed_and_tells_it(bench: Bench, tmp_path: Path) -> None:
    bench = replace(bench, prompt=prompt(8 * CHUNK + 52, seed=3), new_tokens=4)
    go_on = tmp_path / "go-on"
    told: list[dict[str, float]] = []
    asks = [Ask(prompt(len(bench.prompt), seed=100 + number), tokens=4) for number in range(8)]
    with rows.server_for() as server:

        def waiting() -> None:
            told.extend(server.status()["price"]["engines"])
            go_on.touch()

        answers = bench.run(server, *asks, bench.ask(wait_file=str(go_on)), on_wait=waiting)
        assert all(answer.computed == len(bench.prompt) for answer in answers)
    (engine,) = told
    measured = sorted(len(bench.prompt) / answer.wall for answer in answers)[len(answers) // 2]
    # The wall also holds four tokens that were generated, and what is around a step.
    assert 0.5 * measured < engine["tokens_per_s"] < 20 * measured
    print(engine, measured)
