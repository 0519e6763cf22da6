"""The transport kit's tests of life and death: processes killed at the worst moment, and the state that they leave."""

from __future__ import annotations

import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvf_dev.testing.kit import wait_until
from kvf_dev.testing.transport.cases import NHD
from kvf_dev.testing.transport.engine import PATIENCE_S, WRONG, KitEngine, must_miss, must_succeed
from kvf_dev.testing.transport.kit import MakeEngine, TransportKit
from kvf_dev.testing.transport.node import Program, endpoint_in, status_of
from kvf_dev.testing.transport.rig import RigSpec, TransportRig
from kvframework.client import KVClient
from kvframework.server import Server


class Life(TransportKit):
    """The state that remains after the death of a process."""

    def test_engine_processes_share_what_one_server_process_keeps(self, spec: RigSpec) -> None:
        with tempfile.TemporaryDirectory(prefix="kvf-") as directory, ExitStack() as stack:
            endpoint = endpoint_in(Path(directory))
            stack.callback(Program("server", spec, endpoint).close)
            engines = []
            for instance_id in (1, 2):
                engines.append(Program("engine", spec, endpoint, str(instance_id), "hybrid"))
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
        for _ in range(3):
            event = engine.overwrite(later=True)
            must_succeed(engine.store(engine.request(), engine.source(), event=event))
        must_succeed(engine.load(engine.stored(), engine.target()))
        engine.close()
        left = rig.open_elsewhere() - before
        assert not left, f"{left} allocations are open: unregistering is answered once the memory is closed"
        left = rig.events() - events
        assert not left, f"{left} events are left: every event is closed and destroyed with its instance"
        ended = "the end of all streams of an instance that has ended"
        wait_until(lambda: rig.streams() == streams, ended, self.patience_s)

    @pytest.mark.parametrize(("what", "hit"), [("store", 0), ("load", 3 * 16)], ids=["store", "load"])
    def test_an_engine_killed_in_mid_copy_leaves_nothing(
        self,
        spec: RigSpec,
        rig: TransportRig,
        server: Server,
        client: KVClient,
        engine: KitEngine,
        what: str,
        hit: int,
    ) -> None:
        seed = 900 + hit
        open_before, instances_before = rig.open_elsewhere(), _instances(client)
        doomed = Program("engine", spec, server.endpoint, str(90_000 + seed), "nhd")
        try:
            if what == "load":
                assert doomed.ask("store", seed) is True, "a store of another process failed"
            with rig.holding_copies():
                doomed.send("begin", what, seed)
                wait_until(rig.held, "a copy that is held")
                doomed.kill()
                wait_until(lambda: _instances(client) <= instances_before, "the end of it")
        finally:
            doomed.close()
        self.must_be_given_back(client, "an engine that was killed")
        wait_until(lambda: rig.open_elsewhere() == open_before, "the end of its mappings")
        found = engine.hit(engine.request(seed))
        assert found == hit, f"{found} tokens are a hit after the death of an engine in mid-{what}, and not {hit}"
        engine.stored()
        engine.must_be_right()

    def test_a_server_killed_in_mid_copy_is_a_miss(self, spec: RigSpec, rig: TransportRig) -> None:
        with self.doomed(spec, rig) as (server, client, engine), ExitStack() as stack:
            request = engine.stored(engine.request(1))
            self._kill_in_mid_load(rig, server, engine)
            # The blocks may have any content now, but no copy writes to them any more.
            engine.overwrite()
            stack.callback(Program("server", spec, server.endpoint).close)
            wait_until(lambda: client.usable and _instances(client) == {1}, "the registration at the new server")
            engine.must_be_right()
            must_miss(engine.load(request, engine.target()), "a new server is empty")
            engine.must_load(engine.stored(request))
            engine.close()

    def _kill_in_mid_load(self, rig: TransportRig, server: Program, engine: KitEngine) -> None:
        answered: list[bool] = []

        def load() -> None:
            answered.append(engine.load(engine.request(1), engine.target()).result(PATIENCE_S).ok)

        with ExitStack() as held:
            held.enter_context(rig.holding_copies())
            loading = threading.Thread(target=load)
            loading.start()
            wait_until(rig.held, "a copy that is held")
            server.kill()
            if rig.synchronous:
                held.close()
            loading.join(PATIENCE_S)
        assert answered != [True], (
            "the load was answered as done while its copy stood still: `reached` was true too early"
        )
        assert answered == [False], "the load was not answered after the death of its server"


def _instances(client: KVClient) -> set[int]:
    found = status_of(client)["instances"]
    assert isinstance(found, list)
    return {instance["instance_id"] for instance in found}
