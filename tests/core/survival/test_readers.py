"""A reader that is stopped while it copies, and whose pins expire: COMMIT_RETRIEVE says so, and the engine computes
what it could not load, although foreign bytes lie in its blocks by then."""

from __future__ import annotations

import json
import signal

import pytest

from kvframework.wire import messages as m
from tests.core.survival import (
    looker_program,
    reader_program,
)
from tests.core.survival.reader_program import BLOCKS, COMPUTED, TOKENS, WIDE
from tests.support.engines import (
    BLOCK,
    CHUNK,
    PagedEngine,
)
from tests.support.line_process import LineProcess
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until

torch = pytest.importorskip("torch")


pytestmark = pytest.mark.torch

PATIENCE_S = 30.0


@pytest.mark.parametrize("path", ["arena", "wire"])
def test_a_reader_that_is_stopped_while_it_copies_computes_instead(path: str) -> None:
    # The arena has room for as many objects as the prompt has: what comes after it takes its place.
    with (
        ServerProcess(
            "server.retrieve_lease_s=1", "server.store_share=1.0", "server.pin_share=1.0", capacity="4MiB"
        ) as server,
        server.client(timeout=PATIENCE_S) as watcher,
        server.engine_client() as client,
    ):
        other = PagedEngine(client, 1, wide=WIDE)
        assert other.store(other.request(TOKENS), BLOCKS)
        with LineProcess("-m", reader_program.__name__, server.endpoint, path) as reader:
            assert reader.hear() == "copying"
            reader.signal(signal.SIGSTOP)
            wait_until(lambda: watcher.status()["l1"]["pins"] == 0, PATIENCE_S, "the lapse of the pins")
            assert other.store(other.request([7] * 1024, "foreign"), BLOCKS), other.last.result()
            assert other.scheduler.lookup(other.request(TOKENS)).hit_tokens == 0
            reader.signal(signal.SIGCONT)
            said = json.loads(reader.ask())
            assert said == {"loaded": False, "finished": ["r"], "failed": BLOCKS, "right": True, "stored": True}

            l1 = watcher.status()["l1"]
            assert (l1["pins"], l1["pin_leases"], l1["write_leases"]) == (0, 0, 0)
            assert other.retrieve(other.request(TOKENS), BLOCKS), "what it computed and stored is a hit"
            assert bool((other.tokens(BLOCKS) == COMPUTED).all())
            watcher.call("CLEAR", m.Clear())


# A STORE that has resolved is a hit for a LOOKUP that another process makes at once, by both ways that bytes take.


TIMES = 1000


def test_resolved_is_visible_in_another_process() -> None:
    with ServerProcess(capacity="32MiB") as server, server.engine_client() as client:
        engines = [PagedEngine(client, 1, path="arena", wide=2), PagedEngine(client, 2, path="wire", wide=2)]
        namespaces = {engine.registration.namespace.hex() for engine in engines}
        assert len(namespaces) == 1
        arguments = ("-m", looker_program.__name__, server.endpoint, *namespaces, str(CHUNK))
        with LineProcess(*arguments) as looker:
            assert looker.hear() == "ready"
            hits = {"arena": 0, "wire": 0}
            for number in range(2 * TIMES):
                engine, path = engines[number % 2], ("arena", "wire")[number % 2]
                assert engine.store(engine.request([number] * CHUNK), list(range(CHUNK // BLOCK)))
                hits[path] += looker.ask(str(number)) == str(CHUNK)
            assert hits == {"arena": TIMES, "wire": TIMES}
