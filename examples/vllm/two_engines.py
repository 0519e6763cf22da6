"""One kvframework server, two OpenAI servers of vLLM: the second loads the KV that the first has computed.

python two_engines.py MODEL [--config kvf.toml] [--tokens N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvf_vllm import transfer_config

START_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--config", help="the kvframework server's TOML")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the prompt")
    parser.add_argument("--ports", type=int, nargs=2, default=[18100, 18101], help="of the two engines")
    parser.add_argument("--engine", default="", help='more arguments of the engines: --engine="--dtype float32 ..."')
    arguments = parser.parse_args()
    prompt = [1000 + index * 7 % 5000 for index in range(arguments.tokens)]
    with tempfile.TemporaryDirectory(prefix="kvf-") as directory, contextlib.ExitStack() as stack:
        endpoint = f"ipc://{directory}/s.sock"
        config = ["--config", arguments.config] if arguments.config else []
        stack.enter_context(
            started(
                "server",
                directory,
                "-m",
                "kvframework.cli.main",
                "serve",
                *config,
                "--set",
                f"server.endpoint={endpoint}",
            )
        )
        for port in arguments.ports:
            stack.enter_context(engine(directory, arguments.model, endpoint, port, shlex.split(arguments.engine)))
        answers = [ask(port, arguments.model, prompt) for port in arguments.ports]
    for name, (seconds, cached, tokens) in zip("AB", answers, strict=True):
        print(f"engine {name}: {cached} of {arguments.tokens} tokens cached, answer after {seconds:.3f} s: {tokens}")
    if answers[0][2] != answers[1][2]:
        sys.exit("the answers differ")


@contextlib.contextmanager
def started(name: str, directory: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    with Path(directory, f"{name}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def engine(directory: str, model: str, endpoint: str, port: int, more: list[str]) -> Iterator[None]:
    """An OpenAI server; the block begins once it answers."""
    connector = transfer_config({"kvframework.endpoint": endpoint})
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1", "--port", str(port)]
    # Usage then reports the number of cached tokens.
    command += ["--kv-transfer-config", json.dumps(connector), "--enable-prompt-tokens-details", *more]
    with started(f"engine-{port}", directory, *command) as process:
        deadline = time.monotonic() + START_S
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(Path(directory, f"engine-{port}.log").read_text()[-4000:])
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.5)
        yield


def ask(port: int, model: str, prompt: list[int]) -> tuple[float, int, list[int]]:
    """Seconds, cached tokens, and the tokens of the answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begun = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as reply:
        answer: dict[str, Any] = json.load(reply)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return time.perf_counter() - begun, details.get("cached_tokens") or 0, answer["choices"][0]["token_ids"]


if __name__ == "__main__":
    main()
