"""Two OpenAI servers of vLLM behind one kvframework server: conversations of several turns at the same time, some of
them broken off. Every token is compared with that of an engine that computed it without the connector.

`python -m tests.vllm.soak --seconds 180` prints what was seen; `test_soak.py` runs it shorter.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.ports import free_port
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.vllm import hybrid_models
from tests.vllm.model import make, prompt

ENGINES = 2
CONVERSATIONS = 8
TURNS = 4
NEW_TOKENS = 24
START_S = 300.0


@dataclass
class Seen:
    """What the conversations have seen so far."""

    answers: int = 0
    broken_off: int = 0
    cached: int = 0
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Engine:
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    model: str

    def complete(self, tokens: list[int], timeout: float = 300.0) -> tuple[list[int], int]:
        """The answer's tokens, and how many of the prompt's were cached."""
        body = {
            "model": self.model,
            "prompt": tokens,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            reply = json.loads(connection.getresponse().read())
            assert "choices" in reply, reply
            cached = (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            return reply["choices"][0]["token_ids"], cached
        finally:
            connection.close()

    def break_off(self, tokens: list[int], after: float) -> None:
        """Asks and hangs up before the answer."""
        body = {"model": self.model, "prompt": tokens, "max_tokens": 400, "temperature": 0, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            time.sleep(after)
        connection.close()

    def metrics(self) -> dict[str, float]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", "/metrics")
            found: dict[str, float] = {}
            for line in connection.getresponse().read().decode().splitlines():
                if not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    name = name.partition("{")[0]
                    found[name] = found.get(name, 0.0) + float(value)
            return found
        finally:
            connection.close()

    def resident_mib(self) -> dict[str, int]:
        """Of each of the engine's processes, by its name; without what is shared with the server."""
        found: dict[str, int] = {}
        waiting = [self.process.pid]
        while waiting:
            pid = waiting.pop()
            with contextlib.suppress(OSError):
                waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
                status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                name = status["Name"].strip()
                found[name] = found.get(name, 0) + (int(status["RssAnon"].split()[0]) >> 10)
        return found


@contextlib.contextmanager
def engine(model: Path, directory: Path, endpoint: str = "", more: tuple[str, ...] = ()) -> Iterator[Engine]:
    """An OpenAI server on a free port, once it is healthy."""
    port = free_port()
    log = directory / f"engine-{port}.log"
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--max-model-len",
        "2048",
        "--enforce-eager",
        # Little memory: requests are preempted, and vLLM's own cache forgets.
        "--kv-cache-memory-bytes",
        str(14 << 20),
        "--max-num-seqs",
        "8",
        "--enable-prompt-tokens-details",
        *more,
    ]
    if endpoint:
        connector = {
            "kv_connector": "KvFrameworkConnector",
            "kv_connector_module_path": "kvf_vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kvframework.endpoint": endpoint, "kvframework.deadline_scale": 10.0},
        }
        command += ["--kv-transfer-config", json.dumps(connector)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment)
    found = Engine(process, port, log, str(model))

    def healthy() -> bool:
        assert process.poll() is None, log.read_text()[-5000:]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    try:
        wait_until(healthy, START_S, "the engine")
        yield found
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def model_of(cache: Path, name: str) -> Path:
    """A model by its size, or by its family for one with recurrent layers."""
    return hybrid_models.make(cache / name, name) if name in hybrid_models.FAMILIES else make(cache / name, name)


def opening(conversation: int) -> list[int]:
    """Half of the conversations begin alike."""
    shared = prompt(600, seed=conversation % 2)
    return [*shared, *prompt(200 + 40 * conversation, seed=100 + conversation)]


def said(conversation: int, turn: int) -> list[int]:
    return prompt(60, seed=1000 + 10 * conversation + turn)


def expected(model: Path, directory: Path) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """By conversation and turn: the prompt, and what an engine without the connector answers."""
    found = {}
    with engine(model, directory) as plain:
        for conversation in range(CONVERSATIONS):
            tokens = opening(conversation)
            for turn in range(TURNS):
                tokens = [*tokens, *said(conversation, turn)]
                answer, _ = plain.complete(tokens)
                found[conversation, turn] = (tokens, answer)
                tokens = [*tokens, *answer]
    return found


def converse(
    engines: list[Engine], right: dict[tuple[int, int], tuple[list[int], list[int]]], seen: Seen, seconds: float
) -> None:
    """All conversations at the same time, again and again, each turn with any of the engines."""
    deadline = time.monotonic() + seconds

    def one(conversation: int) -> None:
        source = random.Random(conversation)
        try:
            while time.monotonic() < deadline:
                for turn in range(TURNS):
                    tokens, answer = right[conversation, turn]
                    chosen = source.choice(engines)
                    if source.random() < 0.3:
                        chosen.break_off(tokens, source.random() * 0.5)
                        with seen.lock:
                            seen.broken_off += 1
                    found, cached = chosen.complete(tokens)
                    with seen.lock:
                        seen.answers += 1
                        seen.cached += cached
                        if found != answer:
                            seen.wrong.append(f"{conversation}.{turn}, port {chosen.port}: {found} is not {answer}")
        except Exception as error:  # noqa: BLE001 - whatever it is, the test fails with it
            with seen.lock:
                seen.wrong.append(f"conversation {conversation}: {error!r}")

    threads = [threading.Thread(target=one, args=(conversation,)) for conversation in range(CONVERSATIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run(model: Path, directory: Path, seconds: float) -> dict[str, Any]:
    """Fails on a wrong token, or when anything stays pinned. What was seen, for those who read it."""
    right = expected(model, directory)
    seen = Seen()
    with ServerProcess(capacity="20MiB") as server, contextlib.ExitStack() as stack:
        engines = [stack.enter_context(engine(model, directory, server.endpoint)) for _ in range(ENGINES)]
        # The first round fills what is allocated once.
        converse(engines, right, seen, 1.0)
        memory = []
        for _ in range(3):
            converse(engines, right, seen, seconds / 3)
            memory.append([each.resident_mib() for each in engines])
        metrics = [each.metrics() for each in engines]
        with server.client() as client:

            def at_rest() -> bool:
                l1 = client.status()["l1"]
                return not (l1["pins"] or l1["write_leases"] or l1["pin_leases"])

            wait_until(at_rest, 30, "the end of all pins")
            status = client.status()
        log = "".join(each.log.read_text() for each in engines)
    assert not seen.wrong, seen.wrong[:3]
    return {
        "answers": seen.answers,
        "broken off": seen.broken_off,
        "tokens cached": seen.cached,
        "MiB of the engines' processes after each third": memory,
        "evictions": status["l1"]["evictions"],
        "preemptions": sum(each.get("vllm:num_preemptions_total", 0) for each in metrics),
        "connector": {
            name: sum(each.get(name, 0) for each in metrics)
            for name in sorted(metrics[0])
            if name.startswith("kvframework:") and name.endswith("_total")
        },
        "tracebacks": log.count("Traceback (most recent call last)"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "kvf-vllm-models")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvf-soak-") as directory:
        model = model_of(arguments.models, arguments.model)
        for name, value in run(model, Path(directory), arguments.seconds).items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
