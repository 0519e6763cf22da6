"""A reader that is stopped while it copies, and whose pins expire: COMMIT_RETRIEVE says so, and the engine computes
what it could not load, although foreign bytes lie in its blocks by then."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from kvframework.wire import messages as m  # noqa: E402
from tests.core.survival import reader_program  # noqa: E402
from tests.core.survival.reader_program import BLOCKS, COMPUTED, TOKENS, WIDE  # noqa: E402
from tests.core.wire_path.engine import Engine  # noqa: E402
from tests.support.processes import send  # noqa: E402
from tests.support.server_process import ServerProcess  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402

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
        other = Engine(client, 1, wide=WIDE)
        assert other.store(other.request(TOKENS), BLOCKS)
        command = [sys.executable, "-m", reader_program.__name__, server.endpoint, path]
        reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert reader.stdout is not None
        assert reader.stdin is not None
        try:
            assert reader.stdout.readline() == "copying\n"
            send(reader.pid, signal.SIGSTOP)
            wait_until(lambda: watcher.status()["l1"]["pins"] == 0, PATIENCE_S, "the lapse of the pins")
            assert other.store(other.request([7] * 1024, "foreign"), BLOCKS), other.last.result()
            assert other.scheduler.lookup(other.request(TOKENS)).hit_tokens == 0
            reader.send_signal(signal.SIGCONT)
            reader.stdin.write("\n")
            reader.stdin.flush()
            said = json.loads(reader.stdout.readline())
            assert said == {"loaded": False, "finished": ["r"], "failed": BLOCKS, "right": True, "stored": True}

            l1 = watcher.status()["l1"]
            assert (l1["pins"], l1["pin_leases"], l1["write_leases"]) == (0, 0, 0)
            assert other.retrieve(other.request(TOKENS), BLOCKS), "what it computed and stored is a hit"
            assert bool((other.tokens(BLOCKS) == COMPUTED).all())
            watcher.call("CLEAR", m.Clear())
        finally:
            reader.kill()
            reader.communicate()
