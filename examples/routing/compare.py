"""Two nodes with two engines each, a router, and the proxy under both policies: `python compare.py` prints hit rates.

A node here is a server of its own with its engines; all run on this machine, on the CPU.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from proxy import posted

HERE = Path(__file__).resolve().parent
CONVERSATIONS, TURNS, TURN_TOKENS, SYSTEM_TOKENS = 16, 4, 256, 256
CHUNK = 64
READY_S = 120.0


def started(stack: ExitStack, *command: str, says: str) -> str:
    """Start a process that ends with this one; return the rest of the first line that has `says`."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    seen = []
    for line in process.stdout:
        seen.append(line)
        if says in line:
            return line.partition(says)[2].strip()
    raise SystemExit("".join(seen))


def node(stack: ExitStack, name: str, folder: Path) -> tuple[list[str], list[str]]:
    """Start a server and its engines; return the router's arguments for it and the proxy's."""
    told, again = f"ipc://{folder}/{name}-told.sock", f"ipc://{folder}/{name}-again.sock"
    settings = {
        "server.endpoint": f"ipc://{folder}/{name}.sock",
        "server.chunk_size": CHUNK,
        "l1.capacity": "64MiB",
        "events.endpoint": told,
        "events.replay": again,
        "events.state": folder,
    }
    command = [sys.executable, "-m", "kvframework.cli.main", "serve"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    started(stack, *command, says="serving at")
    program = [sys.executable, str(HERE / "engine.py"), settings["server.endpoint"]]
    engines = [f"{name}=http{started(stack, *program, says='http')}" for _ in range(2)]
    return ["--node", f"{name}={told},{again}"], engines


def hit_rate(stack: ExitStack, router: str, engines: list[str], policy: str) -> float:
    """Hold conversations of which each turn repeats all before it; return the share of tokens that were hits."""
    program = [sys.executable, str(HERE / "proxy.py"), router, *engines, "--policy", policy]
    proxy = "http" + started(stack, *program, says="http")
    chance = random.Random(policy)  # other prompts for each policy: none finds what the other has stored
    system = chance.choices(range(32000), k=SYSTEM_TOKENS)
    prompts = [system[:] for _ in range(CONVERSATIONS)]
    tokens = hits = 0
    for _ in range(TURNS):
        for prompt in chance.sample(prompts, CONVERSATIONS):
            prompt += chance.choices(range(32000), k=TURN_TOKENS)
            answer = posted(f"{proxy}/generate", {"tokens": prompt}, READY_S)
            tokens, hits = tokens + answer["tokens"], hits + answer["hit_tokens"]
    return hits / tokens


def main() -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvf-")))
        nodes = [node(stack, name, folder) for name in ("a", "b")]
        engines = [url for _, urls in nodes for url in urls]
        command = [sys.executable, "-m", "kvframework.cli.main", "route", "--listen", "127.0.0.1:0"]
        command += ["--blocks", "100000", *(word for words, _ in nodes for word in words)]
        router = started(stack, *command, says="scores: ")
        for policy in ("round-robin", "score"):
            print(f"hit rate by {policy}: {hit_rate(stack, router.rstrip('/'), engines, policy):.0%}", flush=True)


if __name__ == "__main__":
    main()
