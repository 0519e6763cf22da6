"""`kvframework demo blend`, the real thing with a tiny model: server, two engine processes, a tier, and the logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvframework.cli.app import app
from kvframework.cli.demo import blend as demo_blend_run
from kvframework.cli.demo.redis_server import redis_binary
from kvframework.cli.demo.result import OWN_MODEL, BlendResult, WayResult
from kvframework.cli.demo.view import show_blend
from tests.cli.test_demo import left_behind

COMMAND = [sys.executable, "-m", "kvframework.cli.main", "demo"]
TINY = ["blend", "--size", "tiny", "--tokens", "600"]
TIER = "disk" if redis_binary() is None else "redis"


@pytest.fixture
def temporary():
    """Where the demo puts its directory, short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="kvf-t-") as directory:
        yield Path(directory)


def run(temporary, *arguments):
    # The model is so small that threads only wait for each other.
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    return subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.transformers
def test_documents_in_another_order_come_back_from_the_tier_after_the_server_was_killed(temporary):
    """Another process asks than the one that computed them, of a server that has never heard of them."""
    done = run(temporary, *TINY, "--l2", TIER, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killing the server" in done.stderr
    result = json.loads(done.stdout)
    assert result["documents"] == [600] * 4
    assert result["prompt_tokens"] == 2441
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
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["blend", "--text", "/nowhere"], "/nowhere"),
        (["blend", "--model", "/nowhere"], "/nowhere"),
        (["blend", "--question", ""], "--question"),
        (["blend", "--share", "1.5"], "--share"),
        (["blend", "--redis-url", "redis://localhost"], "--l2 redis"),
        (["--l2", "redis", "blend"], "give it behind 'blend'"),
        ([*TINY, "--l1-capacity", "2MiB"], "stored 0 of 4 documents"),
    ],
)
def test_errors_have_status_2_and_say_what_to_do(temporary, arguments, text):
    done = run(temporary, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert text in done.stderr
    assert left_behind(temporary) == []


def result_of(*, hit=40, naive=0.3, blend=0.01, model="mine"):
    def way(hit_tokens, distance, ttft_s=1.0):
        return WayResult(ttft_s, hit_tokens, hit_tokens // 10, distance, distance / 2, same_token=distance < 0.1)

    ways = {"full": way(0, 0.0, 4.0), "blend": way(hit, blend), "rotated": way(hit, 0.02), "naive": way(hit, naive)}
    return BlendResult(model=model, documents=[10] * 4, prompt_tokens=50, ways=ways)


@pytest.mark.parametrize(
    ("result", "status", "text"),
    [
        (result_of(), 0, "30.0 times nearer"),
        (result_of(naive=0.03, blend=0.01), 0, "3.0 times nearer"),
        (result_of(naive=0.02, blend=0.01), 1, "2.0 times nearer"),
        (result_of(hit=30), 1, "Not all documents were hit"),
    ],
)
def test_it_passes_only_with_every_document_hit_and_far_nearer(result, status, text):
    assert result.exit_status == status
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=80, file=nowhere)
        show_blend(result, console)
        shown = console.export_text()
    assert text in shown
    assert "4.0 times shorter" in shown
    assert "random weights" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_what_it_prints_is_the_table_or_the_document(monkeypatch):
    monkeypatch.setattr(demo_blend_run, "run_blend_demo", lambda *_given: result_of(model=OWN_MODEL + "x"))
    monkeypatch.setattr("signal.signal", lambda *_given: None)
    shown = CliRunner().invoke(app, ["demo", "blend"])
    assert shown.exit_code == 0
    (blend,) = [line.split() for line in shown.stdout.splitlines() if line.startswith("blend")]
    assert blend == ["blend", "1.00", "s", "40", "10%", "1.00%", "0.005", "same"]
    assert "random weights; attention falls with distance" in shown.stdout
    document = json.loads(CliRunner().invoke(app, ["demo", "blend", "--json"]).stdout)
    assert (document["ok"], document["times_nearer"], document["ttft_ratio"]) == (True, 30.0, 4.0)
