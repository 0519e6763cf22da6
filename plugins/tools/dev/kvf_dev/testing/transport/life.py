"""The transport kit's tests of life and death: processes killed at the worst moment, and the state that they leave."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvf_dev.testing.transport.cases import PAGED
from kvf_dev.testing.transport.engine import WRONG
from kvf_dev.testing.transport.kit import MakeEngine, TransportKit
from kvf_dev.testing.transport.node import (
    PATIENCE_S,
    EngineProgram,
    ServerProgram,
    client_of,
    endpoint_in,
    held_by,
    status_of,
    wait_until,
)
from kvf_dev.testing.transport.outcomes import must_miss, must_succeed
from kvf_dev.testing.transport.rig import RigSpec, TransportRig
from kvframework.client import KVClient
from kvframework.server import Server

NHD = PAGED["nhd"]


class Life(TransportKit):
    """The state that remains after the death of a process."""

    def test_engine_processes_share_what_one_server_process_keeps(self, spec: RigSpec) -> None:
        with tempfile.TemporaryDirectory(prefix="kvf-") as directory, contextlib.ExitStack() as stack:
            endpoint = endpoint_in(Path(directory))
            stack.callback(ServerProgram(spec, endpoint).close)
            engines = []
            for instance_id in (1, 2):
                engines.append(EngineProgram(spec, endpoint, instance_id, "hybrid"))
                stack.callback(engines[-1].close)
            for number, (one, other) in enumerate((engines, engines[::-1]), start=1):
                assert one.ask("store", number) is True, "a store of another process failed"
                assert other.ask("load", number) is True, "what one process stored is a miss for another"
            assert not engines[1].ask("check", 1), WRONG
            assert engines[0].ask("store", 1) is True, "a store of what is present fails"

    def test_after_the_end_of_an_instance_nothing_is_open(self, rig: TransportRig, make_engine: MakeEngine) -> None:
        make_engine(NHD).close()  # the copier, which keeps its streams, runs from here on
        before, events, streams = rig.open_elsewhere(), rig.events(), rig.streams()
        engine = make_engine(NHD)
        request = engine.request()
        for _ in range(3):
            event = engine.overwrite(later=True)
            must_succeed(engine.store(engine.request(), engine.source(), event=event))
        must_succeed(engine.store(request, engine.source()))
        must_succeed(engine.load(request, engine.target()))
        engine.close()
        left = rig.open_elsewhere() - before
        assert not left, f"{left} allocations are open: unregistering is answered once the memory is closed"
        left = rig.events() - events
        assert not left, f"{left} events are left: every event is closed and destroyed with its instance"
        wait_until(
            lambda: rig.streams() == streams, "the end of all streams of an instance that has ended", self.patience_s
        )

    def test_an_instance_registers_again(self, rig: TransportRig, make_engine: MakeEngine) -> None:
        """As an engine does that freed its memory and allocated other memory."""
        before = rig.open_elsewhere()
        one = make_engine(NHD)
        request = one.request()
        must_succeed(one.store(request, one.source()))
        stored = one.snapshot()
        one.close()
        other = make_engine(NHD)
        must_succeed(other.load(request, other.target()))
        other.expect_loaded(stored, one.source(), other.target())
        other.must_be_right()
        other.close()
        left = rig.open_elsewhere() - before
        assert not left, f"{left} allocations are open after the end of both instances"

    @pytest.mark.parametrize("what", ["store", "load"])
    def test_an_engine_killed_in_mid_copy_leaves_nothing(
        self,
        spec: RigSpec,
        rig: TransportRig,
        server: Server,
        client: KVClient,
        make_engine: MakeEngine,
        numbers: Iterator[int],
        what: str,
    ) -> None:
        bystander = make_engine(NHD)
        seed = next(numbers)
        open_before, instances_before = rig.open_elsewhere(), _instances(client)
        doomed = EngineProgram(spec, server.endpoint, seed, "nhd")
        try:
            if what == "load":
                assert doomed.ask("store", seed) is True, "a store of another process failed"
            with self.holding(rig) as held:
                doomed.send("begin", what, seed)
                wait_until(rig.held, "a copy that is held")
                doomed.kill()
                wait_until(lambda: _instances(client) <= instances_before, "the end of it")
                held.leave()
        finally:
            doomed.close()
        wait_until(lambda: held_by(status_of(client)) == (0, 0), "the end of its pins and reservations")
        wait_until(lambda: rig.open_elsewhere() == open_before, "the end of its mappings")
        request = bystander.request(seed)
        found, right = bystander.hit(request), 0 if what == "store" else 3 * 16
        assert found == right, f"{found} tokens are a hit after the death of an engine in mid-{what}, and not {right}"
        must_succeed(bystander.store(bystander.request(), bystander.source()))
        bystander.must_be_right()

    def test_a_server_killed_in_mid_copy_is_a_miss(self, spec: RigSpec, rig: TransportRig) -> None:
        from kvf_dev.testing.transport.engine import KitEngine

        with tempfile.TemporaryDirectory(prefix="kvf-") as directory:
            endpoint = endpoint_in(Path(directory))
            server = ServerProgram(spec, endpoint)
            try:
                with client_of(rig, endpoint) as client:
                    engine = KitEngine(rig, client, 1, NHD, seed=1)
                    request = engine.request(1)
                    must_succeed(engine.store(request, engine.source()))
                    self._kill_in_mid_load(rig, server, engine)
                    server.close()
                    # The blocks may have any content now, but no copy writes to them any more.
                    engine.overwrite()
                    server = ServerProgram(spec, endpoint)
                    wait_until(
                        lambda: client.usable and _instances(client) == {1}, "the registration at the new server"
                    )
                    engine.must_be_right()
                    must_miss(engine.load(request, engine.target()), "a new server is empty")
                    must_succeed(engine.store(request, engine.source()))
                    stored = engine.snapshot()
                    must_succeed(engine.load(request, engine.target()))
                    engine.expect_loaded(stored, engine.source(), engine.target())
                    engine.must_be_right()
                    engine.close()
            finally:
                server.close()

    def _kill_in_mid_load(self, rig: TransportRig, server: ServerProgram, engine) -> None:  # type: ignore[no-untyped-def]
        with self.holding(rig) as held:
            answered: list[bool] = []

            def load() -> None:
                answered.append(engine.load(engine.request(1), engine.target()).result(PATIENCE_S).ok)

            loading = threading.Thread(target=load)
            loading.start()
            wait_until(rig.held, "a copy that is held")
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
            if rig.synchronous:
                held.leave()
            loading.join(PATIENCE_S)
            assert answered != [True], (
                "the load was answered as done while its copy stood still: `reached` was true too early"
            )
            assert answered == [False], "the load was not answered after the death of its server"


def _instances(client: KVClient) -> set[int]:
    found = status_of(client)["instances"]
    assert isinstance(found, list)
    return {instance["instance_id"] for instance in found}
