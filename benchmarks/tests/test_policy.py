"""The bench of eviction policies: what it prints, and that its replay counts what a cache of that size finds."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path

import pytest

from benchmarks.tests.test_commands import SPREAD, document
from kvf_eviction import Lru
from kvf_plan.simulation import Settings, simulate
from kvf_plan.trace.reading import open_trace
from kvframework.config.load import load_config
from kvframework_bench.policy.replay import Replay
from kvframework_bench.policy.requests import Request, made
from kvframework_bench.policy.run import PolicySizes, bench_policy


def test_the_figures_of_policies() -> None:
    figures = document("policy", "--use", "lru")
    assert (figures["trace"], [row["policy"] for row in figures["rows"]]) == ("", ["lru"])
    assert all(set(row["us"]) == SPREAD and 0 < row["hit_rate"] < 1 for row in figures["rows"])


def in_lru(requests: list[Request], room: int) -> int:
    """The blocks that are found as prefixes in an LRU, which learns of each prompt from its end."""
    held: OrderedDict[bytes, None] = OrderedDict()
    found = 0
    for _, digests in requests:
        hit = next((at for at, digest in enumerate(digests) if digest not in held), len(digests))
        found += hit
        for digest in reversed(digests[:hit]):
            held.move_to_end(digest)
        present, absent = [[each for each in digests if (each in held) == here] for here in (True, False)]
        while len(held) + len(absent) > room:
            del held[next(each for each in held if each not in present)]
        held.update(dict.fromkeys(reversed(absent)))
        for digest in reversed(present):
            held.move_to_end(digest)
    return found


@pytest.mark.parametrize("room", [120, 600])
def test_the_replay_finds_what_such_a_cache_finds(room: int) -> None:
    requests = made(6000, 3)
    replay = Replay(Lru(), room)
    replay.run(requests)
    assert replay.blocks == sum(len(request.digests) for request in requests)
    assert replay.hits == in_lru(requests, room) > replay.blocks // 20


def test_a_trace_is_read_and_the_simulation_finds_as_much(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    chance = random.Random(7)
    prompts = [[100 * number + chunk for chunk in range(chance.randint(1, 12))] for number in range(300)]
    with file.open("w") as out:
        for number in range(400):
            prompt = chance.choice(prompts)
            line = {"timestamp": 100 * number, "input_length": 512 * len(prompt), "hash_ids": prompt}
            out.write(f"{json.dumps(line)}\n")
    figures = bench_policy(PolicySizes((512,), 0, 1), use=["lru"], trace=file)
    settings = ("server.chunk_size=512", "l1.capacity=2MiB", "l1.eviction.use=lru")
    config = load_config(overrides=settings, environ={})
    outcome = simulate(open_trace(file), Settings(config, bytes_per_token=8))
    assert (figures.trace, figures.requests, figures.blocks) == ("trace.jsonl", 400, outcome.blocks)
    assert figures.rows[0].hit_rate == outcome.l1_blocks / outcome.blocks > 0.05
