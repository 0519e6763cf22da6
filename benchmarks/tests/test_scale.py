"""The bench of many clients and many objects: with real servers and client processes, and tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import msgspec
import pytest
import zmq

from kvframework.client.kv_client import bare_transfer
from kvframework_bench.errors import BenchFailed, WrongBytes
from kvframework_bench.process import scratch
from kvframework_bench.scale.client import OPERATIONS, Clear, ClientProcess, Fill, Report, Run, running_clients
from kvframework_bench.scale.client_process import Requests
from kvframework_bench.scale.run import FullServer, bench_scale
from kvframework_bench.scale.samples import Sample, rows, take
from kvframework_bench.scale.workload import CHUNKS, FULL, MODEL, QUICK, Sizes, fitting
from kvframework_bench.server import running_server, status
from kvframework_bench.zmq_reference import ZmqPeer, running_zmq_peer

TINY = Sizes(clients=(1, 2), objects=(256, 512), base_objects=256, spare_bytes=16 << 20, rounds=1, seconds=0.02)
SETTINGS = ["server.chunk_size=16"]


@contextmanager
def client_process(capacity: int) -> Iterator[tuple[ClientProcess, FullServer, ZmqPeer]]:
    """Yield a client of a server with `capacity` bytes of L1."""
    with (
        scratch() as directory,
        running_zmq_peer(directory) as peer,
        running_server(directory, capacity, SETTINGS) as server,
        server.client() as own,
        running_clients(
            1, directory, server=server.endpoint, echo=peer.endpoint, seed=1, chunks=CHUNKS, advance=lambda: None
        ) as (clients, about),
    ):
        assert own.usable
        assert about.object_bytes == 1024
        yield clients[0], FullServer(server.child.pid, clients[0], 0, 0), peer


def test_every_step_has_its_figures() -> None:
    figures = bench_scale(TINY, seed=3)
    assert figures.seed == 3
    assert figures.skipped == []
    assert figures.request_bytes > CHUNKS * 32
    operations = ("echo", "lookup", "store", "retrieve")
    assert [(row.operation, row.clients) for row in figures.by_clients] == [(o, n) for o in operations for n in (1, 2)]
    assert [(row.operation, row.objects) for row in figures.by_objects] == [
        (o, n) for o in operations for n in (256, 512)
    ]
    for row in figures.by_clients + figures.by_objects:
        assert row.latency.samples >= row.clients
        assert row.requests_s.min > 0
        assert row.server_us.min > 0
        assert (row.ratio_to_echo is None) == (row.operation == "echo")
    for row in (figures.by_clients[0], figures.by_objects[0]):
        assert (row.cost_to_first.median, row.p50_to_first.median, row.p99_to_first) == (1, 1, 1)


def test_the_command_measures_the_steps_it_is_told() -> None:
    command = [sys.executable, "-m", "kvframework.cli.main", "bench", "scale"]
    arguments = ["--quick", "--clients", "1", "--objects", "256", "--seed", "7", "--json"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["bench"], document["quick"], document["figures"]["seed"]) == ("scale", True, 7)
    assert {row["clients"] for row in document["figures"]["by_clients"]} == {1}
    assert {row["objects"] for row in document["figures"]["by_objects"]} == {256}


def test_a_full_server_still_has_what_is_asked_for() -> None:
    """Its stores evict, and the requested prompts must not be among the evicted."""
    prompts = 8
    with client_process(prompts * CHUNKS * 4096) as (client, server, peer):
        client.do(Fill(0, prompts))
        server.prompts = server.newest = prompts
        for operation in OPERATIONS:
            assert server.sample(operation, peer, 0.02).latencies
        # One request each: what is looked up overtakes what was stored later.
        for operation in (OPERATIONS[1], OPERATIONS[2]) * 20:
            assert len(server.sample(operation, peer, 0.0).latencies) == 1
        assert server.newest > 2 * prompts
        with pytest.raises(BenchFailed, match="a lookup found 0 tokens"):
            client.do(Run("lookup", 0, 1, 0.0, 0.0))


def test_the_server_s_time_counts_from_the_first_order() -> None:
    """Next to other processes the clients may have finished before the bench runs again."""

    class Prompt:
        """A client that has answered by the time it got its command."""

        def send(self, _command: object) -> None:
            until = time.process_time() + 0.05
            while time.process_time() < until:
                pass

        def receive(self) -> Report:
            return Report(latencies=[0.05], took=0.05)

    sample = take([cast("ClientProcess", Prompt())], [0], "lookup", count=1, seconds=0.0, server_pid=os.getpid())
    assert sample.server_s >= 0.045


def test_a_client_that_ends_is_told_with_its_log() -> None:
    with client_process(1 << 20) as (client, _, _):
        client._child._process.kill()
        with pytest.raises(BenchFailed, match=r"client 1 (ended|takes no input)"):
            client.do(Clear())


def test_wrong_bytes_make_no_figures() -> None:
    with (
        scratch() as directory,
        running_server(directory, 1 << 20, SETTINGS) as server,
        server.client() as client,
    ):
        context = zmq.Context()
        requests = Requests(client, context.socket(zmq.DEALER), instance_id=1, seed=1, chunks=4)
        try:
            assert requests.store(5) > 0
            assert requests.lookup(5) > 0
            assert requests.retrieve(5) > 0
            assert status(client)["l1"]["objects"] == 4
            with pytest.raises(BenchFailed, match="stored 0 of 4 chunks"):
                requests.store(5)
            with pytest.raises(BenchFailed, match="is a miss"):
                requests.retrieve(6)
            key = requests._prompts.key(requests._prompts.digests(5), rank=0)
            assert key.model_name == MODEL
            plan = client.prepare_load(bare_transfer(requests._registration, key)).result(20)
            plan.arena[plan.ranges[2].offset + 7] ^= 1
            with pytest.raises(WrongBytes, match="differs from the stored object"):
                requests.retrieve(5)
        finally:
            context.destroy(0)


def test_ratios_are_taken_round_by_round() -> None:
    def samples(*costs: float) -> list[Sample]:
        return [Sample([cost, cost], 1 / cost, cost / 2) for cost in costs]

    # The machine was three times slower in the second round.
    made = rows(
        {
            ("echo", 1, 64): samples(1, 3),
            ("lookup", 1, 64): samples(4, 12),
            ("echo", 2, 64): samples(2, 6),
            ("lookup", 2, 64): samples(8, 24),
        },
        first=(1, 64),
    )
    assert [(row.operation, row.clients) for row in made] == [("echo", 1), ("echo", 2), ("lookup", 1), ("lookup", 2)]
    lookup = made[3]
    assert (lookup.cost_to_first.min, lookup.cost_to_first.max) == (2, 2)
    assert (lookup.server_to_first.median, lookup.p50_to_first.median, lookup.p99_to_first) == (2, 2, 2)
    assert lookup.ratio_to_echo is not None
    assert (lookup.ratio_to_echo.rate.median, lookup.ratio_to_echo.p50.median, lookup.ratio_to_echo.p99) == (0.25, 4, 4)
    assert made[0].ratio_to_echo is None


def test_what_does_not_fit_is_left_out_and_named() -> None:
    everything, nothing = fitting(FULL, 64 << 30)
    assert (everything, nothing) == (FULL, [])
    sizes, skipped = fitting(FULL, 2 << 30)
    assert sizes.objects == FULL.objects[:-1]
    assert sizes.clients == (1, 2, 4, 8, 16)
    assert "1,048,576 objects do not fit into 2.0 GiB of available memory" in skipped
    assert fitting(FULL, 0)[0].objects == FULL.objects[:1]


def test_steps_are_bounded_by_what_is_asked() -> None:
    assert FULL.upto(5, 20_000).clients == (1, 2, 4)
    assert FULL.upto(5, 20_000).objects == (1024, 10240)
    assert QUICK.upto(1, 1) == msgspec.structs.replace(QUICK, clients=(1,), objects=(256,))
    assert all(objects % CHUNKS == 0 for objects in (*FULL.objects, *QUICK.objects, FULL.base_objects))


def test_a_client_process_ends_with_its_input() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvframework_bench.scale.client_process"],
        input=b'{"type":"clear"}\n',
        capture_output=True,
        timeout=240,
        check=True,
        env=dict(os.environ),
    )
    assert json.loads(done.stdout)["error"] == "the bench client was not started"
