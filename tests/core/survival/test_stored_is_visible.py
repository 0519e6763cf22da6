"""A STORE that has resolved is a hit for a LOOKUP that another process makes at once: 1000 times in 1000, by both ways
that bytes take."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from tests.core.survival import looker_program  # noqa: E402
from tests.core.wire_path.engine import BLOCK, CHUNK, Engine  # noqa: E402
from tests.support.server_process import ServerProcess  # noqa: E402

pytestmark = pytest.mark.torch

TIMES = 1000


def test_resolved_is_visible_in_another_process() -> None:
    with ServerProcess(capacity="32MiB") as server, server.engine_client() as client:
        engines = [Engine(client, 1, path="arena", wide=2), Engine(client, 2, path="wire", wide=2)]
        namespaces = {engine.registration.namespace.hex() for engine in engines}
        assert len(namespaces) == 1
        command = [sys.executable, "-m", looker_program.__name__, server.endpoint, *namespaces, str(CHUNK)]
        looker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        assert looker.stdin is not None
        assert looker.stdout is not None
        try:
            assert looker.stdout.readline() == "ready\n"
            hits = {"arena": 0, "wire": 0}
            for number in range(2 * TIMES):
                engine, path = engines[number % 2], ("arena", "wire")[number % 2]
                blocks = list(range(CHUNK // BLOCK))
                assert engine.store(engine.request([number] * CHUNK), blocks)
                looker.stdin.write(f"{number}\n")
                hits[path] += looker.stdout.readline() == f"{CHUNK}\n"
            assert hits == {"arena": TIMES, "wire": TIMES}
        finally:
            looker.kill()
            looker.communicate()
