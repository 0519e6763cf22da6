"""A reader that is held up while it copies, and whose pins expire: COMMIT_RETRIEVE says so, and the engine computes
what it could not load, although foreign bytes lie in its blocks by then."""

from __future__ import annotations

import threading

import pytest

from kvframework.api.transport import LoadOutcome
from kvframework.wire import messages as m
from tests.support.engines import BLOCK, CHUNK, PagedEngine
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient

pytestmark = pytest.mark.torch

PATIENCE_S = 30.0
TOKENS = list(range(1024))
BLOCKS = list(range(64))
WIDE = 256  # objects of 1 MiB
COMPUTED = 3.0


class Held:
    """An engine's event that comes when the test says so."""

    def __init__(self) -> None:
        self.reached, self.comes = threading.Event(), threading.Event()

    def synchronize(self) -> None:
        self.reached.set()
        assert self.comes.wait(PATIENCE_S)


@pytest.mark.parametrize("path", ["arena", "wire"])
def test_a_reader_that_is_held_up_while_it_copies_computes_instead(path: str) -> None:
    # The arena has room for as many objects as the prompt has: what comes after it takes its place.
    with (
        ServerProcess(
            "server.retrieve_lease_s=1", "server.store_share=1.0", "server.pin_share=1.0", capacity="4MiB"
        ) as server,
        server.client(timeout=PATIENCE_S) as watcher,
        server.engine_client() as client,
        server.engine_client() as slow,
    ):
        other, reader = PagedEngine(client, 1, wide=WIDE), PagedEngine(slow, 50, path=path, wide=WIDE)
        assert other.store(other.request(TOKENS), BLOCKS)
        held, outcomes = Held(), list[LoadOutcome]()

        def load() -> None:
            future = reader.worker.submit_retrieve(reader.request(TOKENS), 0, len(TOKENS), [BLOCKS], event=held)  # type: ignore[arg-type]
            outcomes.append(future.result(PATIENCE_S))

        loading = threading.Thread(target=load)
        loading.start()
        assert held.reached.wait(PATIENCE_S)
        wait_until(lambda: watcher.status()["l1"]["pins"] == 0, PATIENCE_S, "the lapse of the pins")
        assert other.store(other.request([7] * 1024, "foreign"), BLOCKS), other.last.result()
        assert other.scheduler.lookup(other.request(TOKENS)).hit_tokens == 0
        held.comes.set()
        loading.join(PATIENCE_S)
        assert [each.ok for each in outcomes] == [False]
        assert reader.worker.get_finished() == (set(), {"r"})
        (failed,) = reader.worker.take_failed_blocks()
        assert failed == set(BLOCKS)
        for tensor in reader.kv.values():
            tensor[:, sorted(failed)] = COMPUTED
        assert reader.store(reader.request(TOKENS, "again"), BLOCKS)
        l1 = watcher.status()["l1"]
        assert (l1["pins"], l1["pin_leases"], l1["write_leases"]) == (0, 0, 0)
        assert other.retrieve(other.request(TOKENS), BLOCKS), "what it computed and stored is a hit"
        assert bool((other.tokens(BLOCKS) == COMPUTED).all())
        watcher.call("CLEAR", m.Clear())


# A STORE that has resolved is a hit for a LOOKUP that another client makes at once, by both ways that bytes take.
TIMES = 1000


def test_resolved_is_visible_to_another_client() -> None:
    with (
        ServerProcess(capacity="32MiB") as server,
        server.engine_client() as client,
        WireClient(server.endpoint) as looker,
    ):
        engines = {
            path: PagedEngine(client, number, path=path, wide=2) for number, path in enumerate(("arena", "wire"))
        }
        hits = dict.fromkeys(engines, 0)
        for number in range(TIMES):
            for at, (path, engine) in enumerate(engines.items()):
                request = engine.request([2 * number + at] * CHUNK)
                key = engine.worker.key(request, 0, CHUNK)
                assert engine.store(request, list(range(CHUNK // BLOCK)))
                hits[path] += looker.hit(key) == CHUNK
        assert hits == dict.fromkeys(engines, TIMES)
