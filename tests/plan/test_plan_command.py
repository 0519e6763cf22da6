"""`kvframework plan` on made traces: what it prints, writes and refuses, and a real server with what it wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvf_plan.planning.goal import Setting, toml_of
from kvf_plan.planning.offers import TierOffer
from kvframework.config.load import load_config
from tests.core.cli.command import run
from tests.plan.planning.traces import conversations
from tests.support.server_process import ServerProcess

# Sizes of L1 in MiB: 16 KiB a chunk.
ENGINE = ("--prefill", "2000", "--attention", "0", "--bytes-per-token", "1KiB", "--engines", "1")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("traces") / "made.jsonl"
    file.write_text(conversations(200, every_s=0.08).lines())
    return str(file)


def test_it_writes_the_cheapest_that_meets_the_goal(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "kvf.toml"
    done = run("plan", trace, *ENGINE, "--ttft", "0.5", "--tier", "disk=1GB/s", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "the live set is" in done.stdout
    chosen = re.search(r"chosen, the cheapest that meets the goal: (.*) of L1 by (\w+)", done.stdout)
    config = load_config(out, environ={})
    assert config.l1.eviction.use == chosen[2]
    assert config.server.chunk_size == 16
    assert f"kvframework doctor --config {out}" in done.stderr
    assert out.read_text().startswith("# Planned by kvframework")


@pytest.mark.parametrize("tiered", [False, True])
def test_a_real_server_starts_with_what_it_wrote(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiered: bool
) -> None:
    out = tmp_path / "kvf.toml"
    done = run("plan", trace, *ENGINE, "--ttft", "5", "--l1", "2MiB", "--eviction", "two_queues", "--out", str(out))
    assert done.returncode == 0, done.stderr
    if tiered:
        tier = TierOffer("disk", 1e9)
        text = toml_of(Setting(16, 2 << 20, "two_queues", tier, 64 << 20, "write_back"))
        out.write_text(text.replace("/var/cache/kvframework", str(tmp_path / "cache")))
    assert run("config", "check", str(out)).returncode == 0
    monkeypatch.setenv("KVFRAMEWORK_CONFIG", str(out))
    with ServerProcess(capacity="2MiB") as server:
        status = server.status()
    assert status["l1"]["capacity_bytes"] == 2 << 20
    assert [tier["write_policy"] for tier in status["l2"]] == (["write_back"] if tiered else [])


def test_a_goal_that_nothing_meets_is_named_and_nothing_is_written(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "kvf.toml"
    done = run("plan", trace, *ENGINE, "--ttft", "0.001", "--out", str(out))
    assert done.returncode == 1
    assert "no tried configuration meets the goal, so none is chosen" in done.stdout
    assert re.search(r"mean time to the first token: at best [\d.]+ s, not 0.001 s, \d+% over", done.stdout)
    assert "the closest configuration:" in done.stdout
    assert not out.exists()


def test_a_saturated_tier_is_never_chosen(trace: str) -> None:
    """The disk writes 0.4 MB/s of the 0.9 MB/s that are computed, and what it has would meet the goal."""
    options = ("--l1", "1MiB", "--write-policy", "write_through", "--tier", "disk=20MB/s,write=400KB/s")
    done = run("plan", trace, *ENGINE, *options, "--ttft", "0.13")
    assert done.returncode == 1, done.stdout
    assert "a saturated tier would meet the goal" in done.stdout
    assert re.search(r"through .* \*\d+%", done.stdout)
    assert re.search(r"the closest configuration: 1.0 MiB of L1 by \w+, chunks", done.stdout)
    idle = run("plan", trace, *ENGINE, *options[:-1], "disk=20MB/s,write=4MB/s", "--ttft", "0.13")
    assert idle.returncode == 0, idle.stdout


@pytest.mark.parametrize("tiers", [(), ("disk=3GB/s", "disk=150MB/s,write=123MB/s,capacity=768GiB", "redis=1GB/s")])
def test_it_has_100_columns_and_ends_with_the_toml(trace: str, tmp_path: Path, tiers: tuple[str, ...]) -> None:
    out = tmp_path / "kvf.toml"
    options = [word for each in tiers for word in ("--tier", each)]
    done = run("plan", trace, *ENGINE, "--l1", "192GiB", "--ttft", "0.5", *options, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    written = [line for line in out.read_text().splitlines() if not line.startswith("#")]
    assert done.stdout.endswith("\n\n" + "\n".join(written).strip("\n") + "\n")


def test_progress_has_a_count_and_an_estimate(trace: str) -> None:
    done = run("plan", trace, *ENGINE, "--tier", "disk=1GB/s", "--l1", "1MiB", "--json")
    assert done.stderr == "simulation 1 of about 8, about 1 s left: 1.0 MiB, lru\n"


def test_a_budget_that_nothing_keeps_is_named(trace: str) -> None:
    done = run("plan", trace, *ENGINE, "--ttft", "5", "--budget", "1MiB", "--l1", "4MiB")
    assert done.returncode == 1
    assert re.search(r"cost: at best [\d.]+, not [\d.]+, 300% over", done.stdout)


def test_the_document(trace: str) -> None:
    done = run("plan", trace, *ENGINE, "--ttft", "0.5", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["chunks"]["chunk_tokens"] == 16
    assert document["chosen"] in document["rows"]
    assert document["engine"]["basis"] == "yours"
    assert document["chunks"]["endless_hit"] > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--tier", "disk"), "the tier's speed is missing"),
        (("--ttft", "0"), "'--ttft': expected a time such as"),
        (("--ttft", "soon"), "'--ttft': expected a time such as"),
        (("--prefill", "20 kilo"), "'--prefill': expected a positive number such as 25000 or 25k"),
        (("--tier", "disk=1Gbit/s"), "'1Gbit/s' is not a rate"),
        (("--out", "never.toml"), "--out needs a goal"),
        (("--drive-writes", "nan"), "nan is not a limit"),
        (("--l1", "0"), "'--l1': expected a size such as"),
        (("--eviction", "mine"), "mine"),
        (("--engine", "llama-3-8c", "--gpu", "h100"), "did you mean 'llama-3-8b'?"),
    ],
)
def test_what_cannot_be_is_said(trace: str, options: tuple[str, ...], says: str) -> None:
    done = run("plan", trace, *ENGINE, *options)
    assert done.returncode == 2
    assert says in done.stderr


def test_no_file_is_overwritten(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "kvf.toml"
    out.write_text("mine")
    done = run("plan", trace, *ENGINE, "--ttft", "5", "--out", str(out))
    assert done.returncode == 2
    assert "the file exists" in done.stderr
    assert out.read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "unknown"),
    [
        ((), "the engine's speed and the KV of a token"),
        (("--engine", "llama-3-8b"), "the engine's speed and the KV of a token"),
        (("--prefill", "2000"), "the KV of a token"),
        (("--bytes-per-token", "1KiB"), "the engine's speed"),
    ],
)
def test_an_engine_is_needed(trace: str, options: tuple[str, ...], unknown: str) -> None:
    done = run("plan", trace, *options)
    assert done.returncode == 2
    assert f"not known: {unknown}\n" in done.stderr
    assert "--prefill TOKENS/S --bytes-per-token SIZE" in done.stderr


def test_a_trace_of_short_prompts_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "short.jsonl"
    file.write_text(
        '{"kvframework_trace": 1, "chunk_tokens": 64}\n{"timestamp": 0, "input_length": 3, "hash_ids": []}\n'
    )
    done = run("plan", str(file), *ENGINE)
    assert done.returncode == 2
    assert "no prompt of the trace fills a chunk of 64 tokens" in done.stderr


def test_the_catalogue_names_its_sources() -> None:
    done = run("plan", "--catalogue")
    assert done.returncode == 0
    assert "https://docs.nvidia.com/nim/benchmarking" in done.stdout
    tables = [line for line in done.stdout.splitlines() if not re.match(r"\d+: |other speeds", line)]
    assert max(map(len, tables)) <= 80, "notes and sources stand below"
    assert json.loads(run("plan", "--catalogue", "--json").stdout)["models"]["deepseek-v3"]["latent"] == 576
