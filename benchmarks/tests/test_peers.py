"""The figures of the peers tier: that they are printed, and that what a fleet finds by hints adds up."""

from __future__ import annotations

import subprocess
import sys

from kvframework_bench.peers.fleet import Fleet


def test_the_figures_of_peers() -> None:
    command = [sys.executable, "-m", "kvframework_bench.peers", "--nodes", "8", "--turns", "20", "--mib", "1"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--lookups", "1"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[2].startswith("| 1 MiB | ")
    assert lines[6].startswith("| 1k tokens | ")
    assert lines[11].startswith("| 8 | ")


def test_what_a_fleet_finds_it_has() -> None:
    fleet = Fleet(4)
    for _ in range(400):
        fleet.request()
    counts = fleet.counts
    assert counts["requests"] == 400
    assert 0 < counts["peers"] <= counts["told"]
    assert counts["own"] + counts["told"] == counts["chunks"]
    assert counts["vain"] <= counts["asked"]


def test_a_fleet_of_one_node_has_no_peers() -> None:
    fleet = Fleet(1)
    for _ in range(200):
        fleet.request()
    assert fleet.counts["peers"] == fleet.counts["asked"] == 0
    assert fleet.counts["own"] > 0
