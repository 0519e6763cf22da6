"""What the connectors are proven by: each run is a new engine process of vLLM with the same prompt."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import msgspec

from kvf_hashers.sha256 import Sha256
from kvframework.client import RequestHashes
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.vllm.engine import SERVER_PID, STEPS, Ask, Order, encode, kvframework_transfer

# Two blocks of vLLM's on a CPU.
CHUNK = 256
# The modules with each connector under test, see `Bench`.
CONNECTORS = ("tests.vllm.faults", "tests.vllm.offload_faults")
# What takes too long under load would be a miss, or not stored.
PATIENT = {"kvframework.deadline_scale": 50.0, "kvframework.lookup_deadline_s": 100.0}


@dataclass(frozen=True)
class Answer:
    """What an engine saw of one prompt. `computed`: prefill tokens; -1 where nobody counted."""

    tokens: list[int]
    cached: int
    computed: int
    ttft: float
    wall: float
    counters: dict[str, float]
    log: str = ""
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Bench:
    model: Path
    directory: Path
    prompt: list[int]
    new_tokens: int = 32
    options: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    # The module of the connectors that `run` names.
    connectors: str = "tests.vllm.faults"
    # An engine with a connector would else get another number of threads than one without.
    cores: str = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "0-1")

    @property
    def chunk(self) -> int:
        """The tokens of a chunk: vLLM's own offloading takes one of its blocks, if that is large."""
        return 128 if self.is_offloading else CHUNK

    @property
    def is_offloading(self) -> bool:
        return self.connectors == CONNECTORS[1]

    def ask(self, length: int | None = None, **fields: Any) -> Ask:
        return Ask(self.prompt[:length], tokens=self.new_tokens, **fields)

    def run(
        self,
        server: ServerProcess | None,
        *asks: Ask,
        connector: str = "Watched",
        on_wait: Callable[[], None] | None = None,
    ) -> list[Answer]:
        connector = f"{self.connectors}:{connector}"
        transfer = kvframework_transfer(server.endpoint, self.options, connector) if server else {}
        pid = str(server.pid) if server and server.process else "0"
        order = Order(str(self.model), list(asks), transfer, self.engine)
        answers = run_engine(
            order, self.directory, cores=self.cores, environment={SERVER_PID: pid}, on_wait=on_wait, python=self.python
        )
        return [replace(answer, computed=answer.computed if server else -1) for answer in answers]


def run_engine(
    order: Order,
    directory: Path,
    *,
    cores: str,
    environment: Mapping[str, str] | None = None,
    on_wait: Callable[[], None] | None = None,
    program: str = "tests.vllm.engine",
    python: str = sys.executable,
) -> list[Answer]:
    """The answers of a new engine process, whose log stays in `directory`. Asserts that it ends well."""
    steps = Path(tempfile.mkstemp(dir=directory, prefix="steps-")[1])
    environment = {**environment_of(cores), STEPS: str(steps), **(environment or {})}
    log = steps.with_suffix(".log")
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [python, "-m", program, "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        )
        try:
            process.stdin.write(encode(order))
            process.stdin.close()
            answers = list(_answers(process.stdout, on_wait))
            status = process.wait(60)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    text = log.read_text()
    assert status == 0, text[-6000:]
    return [replace(answer, log=text) for answer in answers]


def environment_of(cores: str) -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
    }


def _answers(stream: TextIO, on_wait: Callable[[], None] | None) -> Iterator[Answer]:
    for line in stream:
        event = msgspec.json.decode(line.encode())
        if event["event"] == "waiting" and on_wait is not None:
            on_wait()
        if event["event"] == "answer":
            names = ("tokens", "cached", "computed", "ttft", "wall", "counters")
            yield Answer(**{key: event[key] for key in names}, logprobs=event.get("logprobs", []))


def server_for(*settings: str, capacity: str = "1GiB") -> ServerProcess:
    return ServerProcess(f"server.chunk_size={CHUNK}", *settings, capacity=capacity)


def written_back(server: ServerProcess) -> None:
    with server.client() as client:
        wait_until(lambda: client.status()["l2"][0]["write_pending"] == 0, 60, "the write to L2")


def digest_of(bench: Bench, chunk: int) -> bytes:
    tokens = bench.prompt
    if bench.is_offloading:
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils as theirs

        theirs.init_none_hash(sha256)
        parent = None
        for at in range(0, (chunk + 1) * bench.chunk, bench.chunk):
            parent = theirs.hash_block_tokens(sha256, parent, tokens[at : at + bench.chunk])
        return bytes(parent)
    request = RequestHashes(Sha256(), CHUNK, request_id="")
    request.extend(tokens)
    return request.digests((chunk + 1) * CHUNK)[-32:]


@contextlib.contextmanager
def filesystem_server(bench: Bench) -> Iterator[tuple[ServerProcess, Path]]:
    folder = Path(tempfile.mkdtemp(dir=bench.directory, prefix="l2-"))
    with server_for("l2.0.use=filesystem", f"l2.0.path={folder}", "l2.0.timeout_s=10") as server:
        yield server, folder


@contextlib.contextmanager
def redis_server(bench: Bench) -> Iterator[tuple[ServerProcess, RedisServer]]:
    folder = Path(tempfile.mkdtemp(dir=bench.directory, prefix="redis-"))
    with (
        RedisServer(folder) as redis,
        server_for("l2.0.use=redis", f"l2.0.url={redis.url}", "l2.0.timeout_s=10") as server,
    ):
        yield server, redis


def restarted(server: ServerProcess) -> None:
    """The server anew, with nothing in L1."""
    written_back(server)
    server.stop()
    server.start()


def several(*connectors: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
        **fields,
    }


def example(folder: Path) -> dict[str, Any]:
    """vLLM's own connector, which keeps KV in files."""
    extra = {"shared_storage_path": str(folder)}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def cold(bench: Bench) -> Answer:
    return bench.run(None, bench.ask())[0]


def store_and_load(bench: Bench) -> tuple[Answer, Answer]:
    with server_for() as server:
        return bench.run(server, bench.ask())[0], bench.run(server, bench.ask())[0]


def load_from_disk(bench: Bench) -> Answer:
    with filesystem_server(bench) as (server, _):
        bench.run(server, bench.ask())
        restarted(server)
        return bench.run(server, bench.ask())[0]


def load_from_redis(bench: Bench) -> Answer:
    with redis_server(bench) as (server, _):
        bench.run(server, bench.ask())
        restarted(server)
        return bench.run(server, bench.ask())[0]


def local_and_external(bench: Bench, local: int) -> Answer:
    with server_for() as server:
        bench.run(server, bench.ask())
        return bench.run(server, bench.ask(local), bench.ask())[1]


def one_lost(bench: Bench, chunk: int) -> Answer:
    """One object is gone from L2, and L1 is empty."""
    with filesystem_server(bench) as (server, folder):
        bench.run(server, bench.ask())
        restarted(server)
        name = digest_of(bench, chunk).hex()
        (lost,) = [path for path in folder.rglob("*") if path.name.endswith(name)]
        lost.unlink()
        return bench.run(server, bench.ask())[0]


def corrupted_in_redis(bench: Bench, chunk: int) -> Answer:
    """One object has other bytes in Redis, and L1 is empty."""
    with redis_server(bench) as (server, redis):
        bench.run(server, bench.ask())
        restarted(server)
        digest = digest_of(bench, chunk)
        with redis.client() as client:
            found = [key for key in client.scan_iter(count=1000) if digest in key]
            assert found
            for key in found:
                middle = int(client.strlen(key)) // 2
                before = client.getrange(key, middle, middle)
                client.setrange(key, middle, bytes([before[0] ^ 0xFF]))
        answer = bench.run(server, bench.ask())[0]
        with server.client() as client:
            assert client.status()["l2"][0]["corrupt"], client.status()["l2"]
        return answer


def server_dies(bench: Bench, connector: str) -> Answer:
    with server_for() as server:
        bench.run(server, bench.ask())
        answer = bench.run(server, bench.ask(), connector=connector)[0]
        assert server.process.wait(60) == -9
        server.process = None
        return answer


def wrong_kv(bench: Bench) -> Answer:
    """The control: KV that is not the prompt's must change what the engine says."""
    with server_for() as server:
        bench.run(server, bench.ask())
        return bench.run(server, bench.ask(), connector="WrongKv")[0]
