"""The bench of eviction policies: what it prints, and that its replay counts what a cache of that size finds."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import pytest

from benchmarks.tests.test_commands import SPREAD, document
from kvf_eviction import Lru
from kvframework_bench.errors import BenchFailed
from kvframework_bench.policy.replay import Replay
from kvframework_bench.policy.requests import Request, from_trace, made
from kvframework_bench.policy.run import QUICK, bench_policy


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


def lines(*requests: object) -> str:
    return "".join(f"{json.dumps(request)}\n" for request in requests)


def test_a_trace_is_read_as_mooncakes(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(lines({"timestamp": 0, "hash_ids": [0, 1]}, {"timestamp": 1500, "hash_ids": [0]}))
    requests = from_trace(file)
    assert [(at, [int.from_bytes(digest, "big") for digest in digests]) for at, digests in requests] == [
        (0.0, [0, 1]),
        (1.5, [0]),
    ]
    figures = bench_policy(QUICK, use=["lru"], trace=file)
    assert (figures.trace, figures.requests, figures.blocks) == ("trace.jsonl", 2, 3)
    assert figures.rows[0].hit_rate == pytest.approx(1 / 3)


BAD = {
    "cut off": '{"timestamp": 1, "hash_',
    "another format": lines({"t": 1, "requests": []}),
    "no blocks": lines({"timestamp": 1, "hash_ids": []}),
    "a negative time": lines({"timestamp": -1, "hash_ids": [1]}),
    "not in order": lines({"timestamp": 5, "hash_ids": [1]}, {"timestamp": 4, "hash_ids": [1]}),
    "a negative block": lines({"timestamp": 1, "hash_ids": [-1]}),
    "a block that is no number": lines({"timestamp": 1, "hash_ids": ["1"]}),
    "no object": "[1]\n",
    "a time that is none": '{"timestamp": NaN, "hash_ids": [1]}\n',
    "empty": "",
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_trace_is_refused(what: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(BAD[what])
    with pytest.raises(BenchFailed, match=r"is empty|line trace.jsonl:\d is no request"):
        from_trace(file)


def test_a_trace_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match="No such file"):
        from_trace(tmp_path / "none.jsonl")
