"""A prefiller and a decoder of vLLM, each with NIXL beside a connector of kvframework, and what stands before them.

Both engines compute with one thread: NIXL's own thread keeps a core busy in each, and threads that wait for each other
would take seconds a token.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.ports import free_port
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.vllm.model import cached
from tests.vllm.rows import PATIENT, environment_of
from tests.vllm.test_beside_others import Api
from tests.vllm.test_pd_proxy import pd_proxy

START_S = 900
ROLES = ("kv_producer", "kv_consumer")
# Tokens of a chunk, and of a block of vLLM on a CPU.
CHUNK = 128
# Bytes that vLLM's offloading has loaded.
OFFLOADED = "vllm:kv_offload_total_bytes_total|CPU_to_GPU"


def transfer(server: ServerProcess, connector: str, role: str) -> dict[str, Any]:
    """The `kv_transfer_config` of one side, as docs/prefill-decode.md has it."""
    common = {"kv_load_failure_policy": "recompute"}
    options = {"kvframework.endpoint": server.endpoint, **PATIENT}
    nixl = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu", **common}
    ours = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": options, **common}
    both = {"kv_connector_extra_config": {"connectors": [nixl, ours]}}
    return {"kv_connector": "MultiConnector", "kv_role": role, **both, **common}


@dataclass
class Engine:
    """One OpenAI server of vLLM and its settings; it can be killed with all of its processes and started again."""

    directory: Path
    transfer: dict[str, Any] | None
    core: int
    environment: dict[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.port, self.side_port = free_port(), free_port()
        self.model = str(cached("tiny"))
        self.log = self.directory / f"engine-{self.port}.log"

    def start(self) -> None:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += f"--host 127.0.0.1 --port {self.port} --dtype float32 --enforce-eager --max-model-len 3072".split()
        command += ["--kv-cache-memory-bytes", str(1 << 28), "--enable-prompt-tokens-details", *self.options]
        if self.transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.transfer)]
        environment = environment_of(str(self.core)) | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port)}
        # `/reset_prefix_cache` is for developers.
        environment |= {"VLLM_SERVER_DEV_MODE": "1", **self.environment}
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        self.api = Api(self.process, self.port, self.model, self.log)

    def wait(self) -> None:
        process = self.process
        assert process is not None
        wait_until(lambda: process.poll() is not None or self.api.get("/health"), START_S, "an engine")
        assert process.poll() is None, self.log.read_text()[-6000:]

    def signal(self, number: int) -> None:
        """To all processes of the engine; none may be left."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def kill(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def ask(self, tokens: list[int], **body: Any) -> Answer:
        return answered(self.api, tokens, **body)

    def post(self, path: str) -> None:
        with closing(http.client.HTTPConnection(self.address, timeout=60)) as connection:
            connection.request("POST", path)
            assert connection.getresponse().status == 200, path

    def metrics(self) -> dict[str, float]:
        """Counters by name, or name and source."""
        found: dict[str, float] = {}
        for line in self.api.get("/metrics").splitlines():
            if line.startswith("#") or "_created{" in line or "_bucket{" in line:
                continue
            name, _, rest = line.partition("{")
            source = re.search(r'(?:source|reason|transfer_type)="([^"]*)"', rest)
            key = f"{name}|{source.group(1)}" if source else name
            found[key] = found.get(key, 0) + float(line.split()[-1])
        return found


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    # Of the prompt, that this engine has not computed.
    hit: int
    place: dict[str, Any] | None = None


def answered(api: Api, tokens: list[int], **body: Any) -> Answer:
    got = api.ask(tokens, return_token_ids=True, **{"max_tokens": 8, **body})
    assert "choices" in got, got
    details = got["usage"]["prompt_tokens_details"] or {}
    return Answer(got["choices"][0]["token_ids"], int(details.get("cached_tokens") or 0), got.get("kv_transfer_params"))


def prefilled(engine: Engine, tokens: list[int]) -> dict[str, Any]:
    """Where the prefiller keeps the KV of this prompt, as a router asks it."""
    place = engine.ask(tokens, max_tokens=1, kv_transfer_params={"do_remote_decode": True}).place
    assert place is not None
    return place


@dataclass
class Pair:
    server: ServerProcess
    prefill: Engine
    decode: Engine
    directory: Path

    @contextmanager
    def proxy(self) -> Iterator[Api]:
        server = pd_proxy.proxy(self.prefill.address, self.decode.address)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert self.decode.process is not None
        try:
            yield Api(self.decode.process, server.server_address[1], self.decode.model, self.decode.log)
        finally:
            server.shutdown()
            server.server_close()

    def router(self, *options: str) -> AbstractContextManager[Api]:
        urls = [f"http://{engine.address}" for engine in (self.prefill, self.decode)]
        policy = ("--policy", "round_robin")
        return running_router(self.directory, self.decode.model, urls[:1], urls[1:], *policy, *options)


@contextmanager
def running_router(
    directory: Path, model: str, prefill: Sequence[str], decode: Sequence[str], *options: str
) -> Iterator[Api]:
    """vLLM's own router."""
    port, log = free_port(), directory / "router.log"
    command = [sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port()), *options]
    for option, urls in (("--prefill", prefill), ("--decode", decode)):
        command += [word for url in urls for word in (option, url)]
    with log.open("a") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        front = Api(process, port, model, log)
        try:
            wait_until(lambda: process.poll() is not None or front.get("/health"), 60, "the router")
            assert process.poll() is None, log.read_text()[-4000:]
            yield front
        finally:
            process.kill()


# Of the tiny model.
TOKEN_BYTES = 4 * 2 * 4 * 32 * 4


class Counts(NamedTuple):
    """Tokens of an engine's prompts that were not computed, by what vLLM says it found and by what each connector says
    it moved. NIXL moves whole blocks."""

    local: int
    external: int
    ours: int
    nixl: int

    def since(self, before: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


def counted(engine: Engine) -> Counts:
    metrics = settled(engine)
    local, external = (
        int(metrics.get(f"vllm:prompt_tokens_by_source_total|{source}", 0))
        for source in ("local_cache_hit", "external_kv_transfer")
    )
    ours = metrics.get("kvframework:loaded_tokens_total", 0) or metrics.get(OFFLOADED, 0) / TOKEN_BYTES
    return Counts(local, external, int(ours), int(metrics.get("vllm:nixl_bytes_transferred_sum", 0)) // TOKEN_BYTES)


def settled(engine: Engine) -> dict[str, float]:
    """The metrics once a later step has brought all counts of earlier ones; that step's prompt has no chunk."""
    engine.ask([7] * 9, max_tokens=1)
    return engine.metrics()


@contextmanager
def pair(directory: Path, connector: str, **environment: str) -> Iterator[Pair]:
    with ServerProcess(capacity="1GiB") as server, ExitStack() as stack:
        engines = [
            Engine(directory, transfer(server, connector, role), core, environment) for core, role in enumerate(ROLES)
        ]
        for engine in engines:
            stack.callback(engine.kill)
            engine.start()
        for engine in engines:
            engine.wait()
        yield Pair(server, *engines, directory)
