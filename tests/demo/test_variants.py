"""`kvframework demo` by its other choices: without a tier, with spoilt KV, on any tier, terminated; and blending."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from kvf_demo.redis_server import redis_binary
from tests.demo.test_demo import SMALL
from tests.support.demo import COMMAND, demo, left_behind
from tests.support.waiting import wait_until

BLEND = ["blend", "--size", "tiny", "--tokens", "600"]
TIER = "disk" if redis_binary() is None else "redis"


@pytest.mark.transformers
def test_the_second_engine_skips_what_the_first_has_computed(temporary):
    done = demo(temporary, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("512 of 600", "GB/s", "TTFT", "times shorter", "are equal to", "a miss"):
        assert text in done.stdout
    assert left_behind(temporary) == []


@pytest.mark.transformers
def test_corrupted_kv_changes_the_tokens_and_the_exit_status(temporary):
    done = demo(temporary, *SMALL, "--json", "--corrupt-kv")
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["warm"]["hit_tokens"] == 512
    assert len(result["cold"]["tokens"]) == len(result["warm"]["tokens"]) == 8
    assert result["cold"]["tokens"] != result["warm"]["tokens"]
    assert not result["tokens_equal"]
    assert not result["ok"]
    assert left_behind(temporary) == []


@pytest.mark.transformers
def test_any_tier_plugin_may_stand_behind_the_server(temporary, tmp_path):
    settings = ["--set", f"path={tmp_path / 'l2'}", "--set", "capacity=1GiB"]
    done = demo(temporary, *SMALL, "--json", "--l2", "filesystem", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["l2"], result["warm"]["hit_tokens"], result["ok"]) == ("filesystem", 512, True)
    assert "waiting until tier filesystem has all objects  3 values" in done.stderr
    assert list((tmp_path / "l2").iterdir()), "the folder that was named holds the values"


@pytest.mark.transformers
def test_a_terminated_demo_leaves_nothing_behind(temporary):
    process = subprocess.Popen(
        [*COMMAND, *SMALL], env={**os.environ, "TMPDIR": str(temporary)}, stdout=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: any("demo_engine" in line for line in left_behind(temporary)), 60, "engine A")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    assert left_behind(temporary) == []


@pytest.mark.transformers
def test_the_prefix_comes_from_the_disk_after_the_server_was_killed(temporary):
    done = demo(temporary, *SMALL, "--json", "--l2", "disk")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["l2"], result["warm"]["hit_tokens"], result["ok"]) == ("disk", 512, True)
    assert "waiting until the disk has all objects  3 values" in done.stderr
    assert left_behind(temporary) == []


@pytest.mark.transformers
def test_the_prefix_comes_from_l1_after_the_server_was_killed(temporary):
    done = demo(temporary, *SMALL, "--json", "--kill")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["l2"], result["warm"]["hit_tokens"], result["ok"]) == ("", 512, True)
    recovered = result["recovered"]
    assert (recovered["objects"], recovered["why_cold"]) == (2, "")
    assert recovered["hit_s"] == result["warm"]["asked_s"] > recovered["seconds"] > 0
    assert "killing the server (SIGKILL)  process " in done.stderr
    assert left_behind(temporary) == []


@pytest.mark.transformers
def test_documents_in_another_order_come_back_from_the_tier_after_the_server_was_killed(temporary):
    """Another process asks than the one that computed them, of a server that has never heard of them."""
    done = demo(temporary, *BLEND, "--l2", TIER, "--json", COLUMNS="80")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killing the server" in done.stderr
    result = json.loads(done.stdout)
    assert result["documents"] == [600] * 4
    assert result["prompt_tokens"] == 2400 + len("\n\nWhat do the signers mutually pledge to each other?\n")
    ways = result["ways"]
    assert [way["hit_tokens"] for way in ways.values()] == [0, 2400, 2400, 2400]
    assert {name: way["recomputed"] for name, way in ways.items()} == {
        "full": 0,
        "blend": 360,
        "rotated": 0,
        "naive": 0,
    }
    assert 0 < ways["blend"]["distance"] < ways["naive"]["distance"] / 3
    assert 0 < ways["blend"]["divergence"] < ways["naive"]["divergence"] / 9
    assert ways["blend"]["distance"] < ways["rotated"]["distance"]
    assert result["times_nearer"] == pytest.approx(ways["naive"]["distance"] / ways["blend"]["distance"], abs=0.01)
    assert left_behind(temporary) == []


@pytest.mark.transformers
def test_documents_without_room_in_l1_are_an_error(temporary):
    done = demo(temporary, *BLEND, "--l1-capacity", "2MiB", COLUMNS="80")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "stored 0 of 4 documents" in done.stderr
    assert left_behind(temporary) == []
