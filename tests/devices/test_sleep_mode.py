"""An engine that gives its KV memory away for a while (sleep mode): closes, frees, allocates, registers again."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvf_dev.testing.accelerator import AcceleratorError, SimulatedNode
from kvf_dev.testing.accelerator.rig import SimulatedRig
from kvf_dev.testing.transport.engine import PAGED, PATIENCE_S, KitEngine, must_work
from kvf_dev.testing.transport.node import status_of
from kvframework.client import KVClient
from tests.devices.rigs import kvf_simdev
from tests.support.waiting import wait_until

NHD = PAGED["nhd"]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    # Room for the engine's memory, and not for as much again.
    with SimulatedNode(tmp_path_factory.mktemp("node"), nbytes=24_000, max_delay_s=0.0005) as made:
        yield made
        assert made.violations() == []


class Sleeper:
    """An engine that can sleep: its memory is another one afterwards."""

    def __init__(self, rig: SimulatedRig, client: KVClient) -> None:
        self.engine = KitEngine(rig, client, 1, NHD, seed=1)
        self.rig = rig
        self.runtime = kvf_simdev.runtime(str(rig.engine_options["node"]))

    def free(self) -> None:
        for tensor in self.engine.tensors.values():
            _, _, _, offset = self.runtime.export_memory(tensor.data_ptr())
            self.runtime.free(tensor.data_ptr() - offset)
        self.engine.tensors.clear()

    def allocate(self) -> None:
        for name, shape in self.engine.model.shapes.items():
            self.engine.tensors[name] = self.rig.empty(shape, NHD[name[0]].dtype)

    def wake(self) -> None:
        """Allocates, and registers what then holds something else than before."""
        engine = self.engine
        self.allocate()
        engine.overwrite()
        engine.caches = engine._caches()
        engine.registration = engine.worker.register_kv_caches(engine.caches, block_size=NHD[0].block_size)


@pytest.fixture
def sleeper(rig: SimulatedRig, client: KVClient) -> Iterator[Sleeper]:
    made = Sleeper(rig, client)
    yield made
    made.engine.close()
    made.free()


def instances(client: KVClient) -> object:
    return status_of(client)["instances"]


def test_what_was_stored_before_a_sleep_is_a_hit_in_the_memory_after_it(
    sleeper: Sleeper, rig: SimulatedRig, client: KVClient
) -> None:
    engine = sleeper.engine
    request = engine.stored()
    stored = engine.snapshot()
    assert rig.open_elsewhere() == len(engine.tensors)
    engine.close()
    assert rig.open_elsewhere() == 0, "the copier still has the memory"
    assert instances(client) == []
    sleeper.free()
    sleeper.wake()
    assert engine.hit(request) == 48
    engine.must_load(request, stored)


def test_the_memory_is_not_to_be_had_while_a_copier_has_it(sleeper: Sleeper) -> None:
    """That is why `close` comes first; and the device has room for one of both only, so the test above means it."""
    sleeper.free()
    with pytest.raises(AcceleratorError, match="out of memory"):
        sleeper.allocate()
    sleeper.engine.close()
    sleeper.wake()


@pytest.mark.parametrize("what", ["store", "load"])
def test_falling_asleep_waits_for_a_copy_that_is_under_way(
    sleeper: Sleeper, rig: SimulatedRig, client: KVClient, what: str
) -> None:
    engine = sleeper.engine
    request, other = engine.request(), engine.request()
    assert engine.store(request, engine.source()).result(PATIENCE_S).ok
    stored = engine.snapshot()
    with rig.holding_copies():
        under_way = engine.store(other, engine.target()) if what == "store" else engine.load(request, engine.target())
        wait_until(rig.held, PATIENCE_S, "a copy that is held")
        falling_asleep = threading.Thread(target=engine.close)
        falling_asleep.start()
        wait_until(lambda: instances(client) == [], PATIENCE_S, "the request to let go")
        falling_asleep.join(0.2)
        assert falling_asleep.is_alive(), "the copier still writes to the memory, or reads it"
        assert rig.open_elsewhere() == len(engine.tensors)
    falling_asleep.join(PATIENCE_S)
    assert not falling_asleep.is_alive()
    assert rig.open_elsewhere() == 0
    assert under_way.query()
    sleeper.free()
    sleeper.wake()
    assert engine.hit(other) in (0, 48), "published whole or not at all"
    engine.must_load(request, stored)


def test_nothing_is_asked_of_a_sleeping_engine(sleeper: Sleeper, rig: SimulatedRig) -> None:
    engine = sleeper.engine
    request = engine.request()
    engine.close()
    assert not engine.store(request, engine.source()).result(0).ok
    assert not engine.load(request, engine.target()).result(0).ok
    sleeper.free()
    sleeper.wake()
    must_work(engine)
