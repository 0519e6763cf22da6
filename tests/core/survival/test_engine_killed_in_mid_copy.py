"""An engine process is killed while the server copies for it: nobody else notices, and nothing of it stays.

That its mappings, pins and reservations go, and that CANCEL is answered only once the blocks are quiet, is shown by
`kvf_dev.testing.transport` in `tests/devices/test_conformance_simdev.py`; here is what happens meanwhile.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvf_dev.testing.accelerator import SimulatedNode
from kvf_dev.testing.accelerator.rig import SimulatedRig
from kvf_dev.testing.transport import RigSpec
from kvf_dev.testing.transport.engine import PAGED, PATIENCE_S, KitEngine, must_work
from kvf_dev.testing.transport.node import Program, client_of, endpoint_in, held_by, status_of
from kvframework.client import KVClient
from kvframework.wire import messages as m
from tests.devices.rigs import simdev
from tests.support.processes import busy_s, children, descriptors
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient

pytestmark = pytest.mark.timeout(300)

NHD = PAGED["nhd"]
DOOMED, BYSTANDER, CANCELLING = 1, 2, 3


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SimulatedNode]:
    with SimulatedNode(tmp_path) as made:
        yield made
        assert made.violations() == []


@pytest.fixture
def spec(node: SimulatedNode) -> RigSpec:
    # Nothing here lasts so long that a copier is taken for dead.
    return RigSpec("tests.devices.rigs:simdev", {"node": str(node.path), "stall_s": 60.0})


@pytest.fixture
def server(spec: RigSpec, short: Path) -> Iterator[Program]:
    with closing(Program("server", spec, endpoint_in(short))) as program:
        yield program


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose path is short enough for a socket's."""
    return tmp_path_factory.mktemp("s")


@pytest.fixture
def elsewhere(node: SimulatedNode) -> Iterator[SimulatedRig]:
    """The node's other device, with a copier of its own."""
    with closing(simdev(str(node.path), device=1, stall_s=60.0)) as rig:
        yield rig


@pytest.mark.parametrize("what", ["store", "load"])
def test_nobody_notices_while_the_copy_of_a_dead_engine_stands_still(
    spec: RigSpec, node: SimulatedNode, server: Program, short: Path, elsewhere: SimulatedRig, what: str
) -> None:
    endpoint = endpoint_in(short)
    pid = server.process.pid
    with client_of(elsewhere, endpoint) as client, contextlib.ExitStack() as stack:
        bystander = KitEngine(elsewhere, client, BYSTANDER, NHD, seed=BYSTANDER)
        must_work(bystander)
        doomed = Program("engine", spec, endpoint, str(DOOMED), "nhd")
        stack.callback(doomed.close)
        if what == "load":
            assert doomed.ask("store", DOOMED) is True
        copies = node.hits("hold")
        node.inject("hold", node.devices[0])
        stack.callback(node.release)
        doomed.send("begin", what, DOOMED)
        wait_until(lambda: node.hits("hold") > copies, PATIENCE_S, "a copy that is held")
        doomed.kill()
        wait_until(lambda: instances(client) == {BYSTANDER}, PATIENCE_S, "the end of the dead engine")

        # Whoever comes now gets what the dead one had, its descriptor's number among it.
        newcomers = [stack.enter_context(WireClient(endpoint)) for _ in range(4)]
        ended = counter(client, "sessions_ended")
        for _ in range(8):
            must_work(bystander)
            for newcomer in newcomers:
                newcomer.call("NOOP", m.Empty())
        assert counter(client, "sessions_ended") == ended
        assert not select.select([each._live for each in newcomers], [], [], 0)[0], "the server has ended a session"
        assert idles(pid)

        node.release()
        wait_until(lambda: held_by(status_of(client)) == (0, 0), PATIENCE_S, "the end of its pins and reservations")
        wait_until(lambda: node.mappings() == 2, PATIENCE_S, "the end of its mappings")
        request = bystander.request(DOOMED)
        assert bystander.hit(request) == (0 if what == "store" else 3 * 16)
        must_work(bystander)
        assert len(children(pid)) == 2, "no copier was lost"
        bystander.close()


def test_an_engine_that_ends_after_it_has_cancelled(
    spec: RigSpec, node: SimulatedNode, server: Program, short: Path, elsewhere: SimulatedRig
) -> None:
    """CANCEL is under way, and nobody is left to be answered."""
    endpoint = endpoint_in(short)
    with client_of(elsewhere, endpoint) as client, contextlib.ExitStack() as stack:
        bystander = KitEngine(elsewhere, client, BYSTANDER, NHD, seed=BYSTANDER)
        before = len(descriptors(server.process.pid))
        rig = stack.enter_context(closing(simdev(str(node.path), stall_s=60.0)))
        for turn in range(3):
            cancelling = client_of(rig, endpoint)
            engine = KitEngine(rig, cancelling, CANCELLING, NHD, seed=CANCELLING)
            request = engine.request()
            with rig.holding_copies():
                future = engine.store(request, engine.source())
                wait_until(rig.held, PATIENCE_S, "a copy that is held")
                future.cancel()
                with pytest.raises(TimeoutError):
                    future.result(0.2)
                cancelling.close()
                assert not future.result(PATIENCE_S).ok
                wait_until(lambda: instances(client) == {BYSTANDER}, PATIENCE_S, "the end of the session")
                must_work(bystander)
            wait_until(lambda: held_by(status_of(client)) == (0, 0), PATIENCE_S, "the end of its reservation")
            assert bystander.hit(request) == 0, f"turn {turn}: a cancelled store was published"
            wait_until(lambda: len(children(server.process.pid)) == 2, PATIENCE_S, "both copiers")
        # Of one more copier than before, of the device that was not in use: its socket, its pidfd, a wake.
        wait_until(lambda: len(descriptors(server.process.pid)) <= before + 3, PATIENCE_S, "its descriptors")
        bystander.close()


def idles(pid: int) -> bool:
    """Whether a process that nobody asks for anything uses next to no processor time, measured by its own."""
    began, used = time.monotonic(), busy_s(pid)
    time.sleep(0.5)
    return busy_s(pid) - used < (time.monotonic() - began) / 4


def instances(client: KVClient) -> set[int]:
    found = status_of(client)["instances"]
    assert isinstance(found, list)
    return {instance["instance_id"] for instance in found}


def counter(client: KVClient, name: str) -> int:
    messaging = status_of(client)["messaging"]
    assert isinstance(messaging, dict)
    counters = messaging["counters"]
    assert isinstance(counters, dict)
    return int(counters.get(name, 0))
