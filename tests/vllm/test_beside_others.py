"""The connector in vLLM beside other connectors, other engines of the process, and clients that mean no good."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvf_vllm.registration import CONNECTORS, NAME
from tests.support.ports import free_port
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.vllm import rows
from tests.vllm.engine import Order, encode
from tests.vllm.model import cached, prompt
from tests.vllm.rows import PATIENT, Answer, Bench, environment_of, example, several
from tests.vllm.test_pd_proxy import pd_proxy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

CHUNK = rows.CHUNK
TOKENS = 4 * CHUNK


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    directory = tmp_path_factory.mktemp("beside")
    return Bench(cached("tiny"), directory, prompt(TOKENS, seed=5), 8)


@pytest.fixture(scope="module")
def cold(bench: Bench) -> Answer:
    return rows.cold(bench)


@pytest.fixture(params=CONNECTORS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def alone(server: ServerProcess, name: str = NAME, **fields: Any) -> dict[str, Any]:
    """By its name: vLLM knows it by the entry point."""
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvframework.endpoint": server.endpoint, **PATIENT},
        **fields,
    }


def answers(bench: Bench, transfer: dict[str, Any], *asks: Any, **environment: str) -> list[Answer]:
    order = Order(str(bench.model), list(asks), transfer, bench.engine)
    return rows.run_engine(order, bench.directory, cores=bench.cores, environment=environment)


@pytest.mark.parametrize("plugins", ["all", "none"])
def test_under_the_multi_connector_statistics_are_logged(
    bench: Bench, cold: Answer, tmp_path: Path, plugins: str, name: str
) -> None:
    """`none`: VLLM_PLUGINS leaves the entry point out, and the module is named."""
    named = {"kv_connector_module_path": CONNECTORS[name]} if plugins == "none" else {}
    environment = {"VLLM_PLUGINS": ""} if plugins == "none" else {}
    with rows.server_for() as server:
        transfer = several(alone(server, name, **named), example(tmp_path))
        stored, again = answers(bench, transfer, bench.ask(), bench.ask(reset=True), **environment)
    assert stored.tokens == again.tokens == cold.tokens
    assert stored.counters["kvframework:stored_tokens"] == TOKENS
    assert again.counters["kvframework:loaded_tokens"] >= TOKENS - CHUNK


def test_the_engines_failure_policy_counts_not_the_one_beside_the_connector(bench: Bench, name: str) -> None:
    with rows.server_for() as server, pytest.raises(AssertionError) as refused:
        answers(bench, several(alone(server, name), kv_load_failure_policy="fail"), bench.ask())
    assert "kv_load_failure_policy is 'fail'" in str(refused.value)
    assert "kv_transfer_config of MultiConnector" in str(refused.value)


@pytest.mark.engine_feature("vLLM", "several engines")
def test_engines_of_one_process_share_their_metrics(bench: Bench, cold: Answer, name: str) -> None:
    with rows.server_for() as server:
        engine = {"kv_cache_memory_bytes": 1 << 27}
        order = Order(str(bench.model), [bench.ask()], alone(server, name), engine)
        log = bench.directory / "two-engines.log"
        with log.open("w") as stderr:
            done = subprocess.run(
                [sys.executable, "-m", "tests.vllm.two_engines", encode(order)],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                timeout=1700,
                check=False,
                env=environment_of(bench.cores),
            )
    assert done.returncode == 0, log.read_text()[-6000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["tokens"] for each in found] == [cold.tokens] * 4
    # The second engine, the first again, and one made after the first has ended.
    assert [each["loaded"] for each in found] == [0, TOKENS, 2 * TOKENS, 3 * TOKENS]


class Api:
    """An OpenAI server of vLLM."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, model: str, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.killed = False
        self._model = model

    def kill(self) -> None:
        self.killed = True
        self.process.kill()
        self.process.wait()

    def get(self, path: str) -> str:
        try:
            with self._connected(60) as connection:
                connection.request("GET", path)
                return connection.getresponse().read().decode() or "up"
        except OSError:
            return ""

    def ask(self, tokens: list[int], **body: Any) -> dict[str, Any]:
        with self._connected(300) as connection:
            self._post(connection, tokens, body)
            return dict(json.loads(connection.getresponse().read()))

    def abort(self, tokens: list[int], **body: Any) -> None:
        with self._connected(300) as connection:
            self._post(connection, tokens, {"max_tokens": 2000, "stream": True, **body})
            with connection.getresponse() as response:
                response.read(1)

    def _connected(self, timeout: float) -> closing[http.client.HTTPConnection]:
        return closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout))

    def _post(self, connection: http.client.HTTPConnection, tokens: list[int], body: dict[str, Any]) -> None:
        headers = {"Content-Type": "application/json", **body.pop("headers", {})}
        full = {"model": self._model, "prompt": tokens, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **body}
        connection.request("POST", "/v1/completions", json.dumps(full), headers)


@contextmanager
def api(bench: Bench, transfer: dict[str, Any], *options: str) -> Iterator[Api]:
    port = free_port()
    log = bench.directory / f"api-{port}.log"
    fixed = f"--host 127.0.0.1 --port {port} --dtype float32 --enforce-eager --max-model-len 3072 "
    fixed += f"--kv-cache-memory-bytes {1 << 28}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(bench.model), *fixed.split()]
    command += ["--kv-transfer-config", json.dumps(transfer), *options]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment_of(bench.cores))
        try:
            server = Api(process, port, str(bench.model), log)
            wait_until(lambda: process.poll() is not None or server.get("/health"), 800, "the OpenAI server")
            assert process.poll() is None, log.read_text()[-6000:]
            yield server
            assert process.poll() is None or server.killed, log.read_text()[-6000:]
            assert "EngineDeadError" not in log.read_text()
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()


def test_two_of_it_behind_an_openai_server_whose_clients_mean_no_good(bench: Bench, name: str) -> None:
    with rows.server_for() as one, rows.server_for() as other:
        # Blocks for two long requests: with more of them vLLM preempts.
        options = ("--num-gpu-blocks-override", "26")
        with api(bench, several(alone(one, name), alone(other, name)), *options) as server:
            wanted = server.ask(bench.prompt)["choices"]
            for params in ({"kvframework.salt": 7}, {"kvframework.salt": "s" * 5000}, {"kvframework.": {}}):
                assert server.ask(bench.prompt, kv_transfer_params=params)["choices"] == wanted
            for seed in range(3):
                server.abort(prompt(1000, seed=100 + seed))
            one.kill9()
            assert server.ask(bench.prompt, cache_salt="tenant")["choices"] == wanted
            server.abort(bench.prompt, cache_salt="tenant")
            assert server.ask(bench.prompt)["choices"] == wanted
            # Statistics are logged every ten seconds, and shown at once.
            stored = [line for line in server.get("/metrics").splitlines() if line.startswith("kvframework:stored_tok")]
            assert stored
            assert float(stored[0].split()[-1]) >= 2 * TOKENS
            wait_until(lambda: f"KV Transfer metrics: {name}" in server.log.read_text(), 60, "the log line")


DETAILS = "--enable-prompt-tokens-details"


def hit(answer: dict[str, Any]) -> int:
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


@pytest.mark.engine_feature("vLLM", "prefill and decode")
def test_prefill_and_decode_in_two_engines_behind_the_examples_proxy(bench: Bench, name: str) -> None:
    tokens = [*bench.prompt, *prompt(CHUNK + 1, seed=6)]
    assert len(tokens) == 1281
    with rows.server_for() as store, ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(api(bench, alone(store, name, kv_role=role), DETAILS))
            for role in ("kv_producer", "kv_consumer")
        )
        places = [f"127.0.0.1:{engine.port}" for engine in (prefill, decode)]
        proxy = pd_proxy.proxy(*places)
        stack.callback(proxy.server_close)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        stack.callback(proxy.shutdown)
        front = Api(decode.process, proxy.server_address[1], str(bench.model), decode.log)
        answer = front.ask(tokens, max_tokens=12, return_token_ids=True)
        assert hit(answer) == 1280
        # The prefill engine has computed the prompt and has not loaded it.
        alone_computed = prefill.ask(tokens, max_tokens=12, return_token_ids=True, cache_salt="other")
        assert hit(alone_computed) == 0
        assert answer["choices"][0]["token_ids"] == alone_computed["choices"][0]["token_ids"]
        # Without the prefill engine the other one computes, and stores nothing.
        prefill.kill()
        other = prompt(600, seed=7)
        assert [hit(front.ask(other, cache_salt=salt)) for salt in ("one", "two")] == [0, 0]


def test_ranks_of_data_parallel_engines_read_each_others_kv(bench: Bench, name: str) -> None:
    bench = replace(bench, cores="0|1")
    with rows.server_for() as store, api(bench, alone(store, name), DETAILS, "--data-parallel-size", "2") as server:
        answers = [
            server.ask(bench.prompt, headers={"X-data-parallel-rank": rank}, return_token_ids=True) for rank in "01"
        ]
        assert [hit(answer) for answer in answers] == [0, TOKENS]
        assert answers[0]["choices"][0]["token_ids"] == answers[1]["choices"][0]["token_ids"]
