"""`kvframework demo` by its other choices: without a tier, with spoilt KV, on any tier, terminated."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from tests.demo.test_demo import SMALL
from tests.support.demo import COMMAND, demo, left_behind
from tests.support.waiting import wait_until


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
