"""`kvframework simulate`: what it prints of a trace, the speeds that it reads, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kvf_plan.cli.speeds import parse_tier
from kvf_plan.errors import SimulationError
from kvf_plan.simulation import SlowTime, TierSpeed
from tests.core.cli.command import run


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Ten prompts of four chunks; each comes again."""
    file = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 1000 * number,
            "input_length": 2100,
            "hash_ids": [10 * (number % 10) + chunk for chunk in range(4)],
        }
        for number in range(20)
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(file)


TIER = ("--set", "l2.0.use=redis", "--set", "l2.0.url=redis://nowhere", "--tier", "redis=1GB/s")


def test_the_outcome_as_tables_and_as_json(trace: str) -> None:
    arguments = ("simulate", trace, "--set", "l1.capacity=1GiB", *TIER, "--engines", "2", "--prefill", "10000")
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "trace.jsonl: 20 requests in 19 s, 42.0k tokens" in done.stdout.replace("42k", "42.0k")
    for word in ("L1", "together", "time to first token", "redis", "not simulated: decoding"):
        assert word in done.stdout
    document = json.loads(run(*arguments, "--json").stdout)
    assert document["l1_tokens"] + document["l2_tokens"] == 20480 == document["asked_tokens"] // 2
    assert document["ttft_s"]["p99"] > 0
    assert document["tiers"][0]["name"] == "redis"
    assert document["status"]["lookups"]["lookups"] == 20


REFUSED = {
    "no trace": (("nosuch.jsonl",), "trace.invalid"),
    "the tier's speed is missing": (("TRACE", *TIER[:4]), "--tier redis=3GB/s"),
    "engines without a speed": (("TRACE", "--engines", "3"), "the speed of the engines is missing"),
    "no size": (("TRACE", "--bytes-per-token", "many"), "'--bytes-per-token': expected a size such as"),
    "a chunk larger than L1": (("TRACE", "--bytes-per-token", "64MiB"), "one chunk of 64 tokens takes 4.0 GiB"),
    "a token of the default's size": (
        ("TRACE", "--set", "l1.capacity=1MiB"),
        "set --bytes-per-token to your model's, or raise [l1] capacity",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_with_a_hint(what: str, trace: str) -> None:
    arguments, text = REFUSED[what]
    done = run("simulate", *(trace if each == "TRACE" else each for each in arguments))
    assert done.returncode == 2
    assert done.stdout == ""
    assert text in done.stderr


def test_a_tier_in_full() -> None:
    text = "disk#2=3GB/s,write=500MiB/s,latency=0.5ms,capacity=2TiB,slow=0.2@10min-20min,slow=0@1h-1.5h"
    slow = [SlowTime(600, 1200, 0.2), SlowTime(3600, 5400, 0)]
    assert parse_tier(text) == TierSpeed("disk#2", 3e9, 500 * (1 << 20), 0.0005, 2 << 40, slow)
    assert parse_tier("redis=1B/s,write=free").write_bytes_per_s == math.inf


@pytest.mark.parametrize(
    "text",
    [
        "",
        "redis",
        "=3GB/s",
        "redis=3GB",
        "redis=3",
        "redis=fast/s",
        "redis=3GB/s,",
        "redis=3GB/s,read=1GB/s",
        "redis=3GB/s,write",
        "redis=3GB/s,latency=-1s",
        "redis=3GB/s,capacity=all",
        "redis=3GB/s,slow=0.2",
        "redis=3GB/s,slow=0.2@1s",
        "redis=3GB/s,slow=x@1s-2s",
    ],
)
def test_what_is_no_speed(text: str) -> None:
    with pytest.raises(SimulationError) as caught:
        parse_tier(text)
    assert caught.value.available
