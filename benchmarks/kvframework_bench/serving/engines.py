"""vLLM's OpenAI servers as child processes: their command, their start, their processor time, their end."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvframework_bench.lmcache_server import free_port
from kvframework_bench.process import BenchChild, running
from kvframework_bench.serving.connector_time import FOLDER, ConnectorTime, connector_time

_START_S, _END_S = 600.0, 10.0
_TICKS = os.sysconf("SC_CLK_TCK")
SERVED = "model"
BLOCK_TOKENS = 128
TIMED = "kvframework_bench.serving.timed_connector"
# Nothing is looked for outside, and no log line is written for a request.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
# Not what a warning quotes.
_RAISED = re.compile(r"(?<![`\w])(\w*(?:Error|Exception): .+)")


class EngineSettings(msgspec.Struct, frozen=True):
    """What all engines have in common. `kv_cache_bytes` is the KV cache of each, which is too small on purpose;
    `tokenizer` says that the model has one, so prompts may be text."""

    model: Path
    longest: int
    kv_cache_bytes: int
    tokenizer: bool = False


@dataclass
class Engine:
    """A server that answers on `port`; `child` is the process of its HTTP side, whose children are the others. In
    `connectors` they note the times of theirs."""

    name: str
    port: int
    child: BenchChild
    connectors: Path

    def processor_s(self) -> float:
        """Return the processor time of its processes so far, in seconds."""
        return sum(map(processor_s, family(self.child.pid)))

    def connector_time(self) -> ConnectorTime | None:
        """Return the time of its connectors so far; None if it has none."""
        return connector_time(family(self.child.pid), self.connectors)

    def await_answer(self) -> None:
        """Return when it is ready for requests. Raises `BenchFailed` with the end of its log if it ends, or is not in
        time."""
        deadline = time.monotonic() + _START_S
        while not _healthy(self.port):
            self.child.check_alive()
            if time.monotonic() > deadline:
                raise self.child.failure(f"does not answer after {_START_S:.0f} s")
            time.sleep(0.1)

    def why(self) -> str:
        """Return the first error in its log, "" if there is none: later ones say that something else failed."""
        found = _RAISED.search(self.child.log)
        return found[1].strip() if found else ""

    def stop(self) -> None:
        """End it, and whatever it has started and left behind. Idempotent."""
        handles = []
        for pid in family(self.child.pid):
            with suppress(OSError):
                handles.append(os.pidfd_open(pid))
        self.child.stop()
        for handle in handles:
            with suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        for handle in handles:
            select.select([handle], [], [], _END_S)
        for handle in handles:
            # Those that were adopted.
            with suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOHANG)
            os.close(handle)


def vllm_command(settings: EngineSettings, port: int, offload: Sequence[str]) -> list[str]:
    """Return the command of a server; `offload` are vLLM's own options that say where KV goes."""
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(settings.model), "--served-model-name", SERVED),
        # In float32 a prefix that was loaded gives the very tokens of one that was computed.
        *("--dtype", "float32", "--enforce-eager"),
        *(() if settings.tokenizer else ("--skip-tokenizer-init",)),
        *("--max-model-len", str(settings.longest), "--block-size", str(BLOCK_TOKENS)),
        *("--kv-cache-memory-bytes", str(settings.kv_cache_bytes)),
        *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
        *offload,
    ]


def transfer(connector: str, options: Mapping[str, Any]) -> list[str]:
    """Return vLLM's options that select a KV connector, whose processor time is counted, with options of its own."""
    config = {
        "kv_connector": connector,
        "kv_connector_module_path": TIMED,
        "kv_role": "kv_both",
        # By default vLLM fails a request whose KV is lost.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": options,
    }
    return ["--kv-transfer-config", json.dumps(config)]


@contextmanager
def running_engine(
    name: str,
    settings: EngineSettings,
    offload: Sequence[str],
    cores: Sequence[int],
    directory: Path,
    more: Mapping[str, str] | None = None,
) -> Iterator[Engine]:
    """Yield a server that was started, and does not answer yet. It computes on `cores` only: else the number of its
    threads, and with them what it answers, would depend on whether it has a connector. `more` is for its environment.
    """
    port = free_port()
    connectors = directory / "connectors"
    connectors.mkdir(exist_ok=True)
    environment = {**_ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), FOLDER: str(connectors)}
    environment |= more or {}
    with ExitStack() as stack:
        command = vllm_command(settings, port, offload)
        child = stack.enter_context(running(name, command, directory, environment=environment))
        engine = Engine(name, port, child, connectors)
        stack.callback(engine.stop)
        yield engine


def family(pid: int) -> list[int]:
    """Return a process and its descendants, those that are there now."""
    found = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    return found


def processor_s(pid: int) -> float:
    """Return the processor time of a process, its ended threads included, in seconds; 0 if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
