"""A server process with the plugin `faulty_plugin`, and how its requests are called."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvframework.wire.frames import decode, join
from tests.core.registry.fake_distributions import install
from tests.core.survival import faulty_plugin
from tests.core.survival.faulty_plugin import Answer, Ask
from tests.support.server_process import ServerProcess
from tests.support.wire_client import WireClient

_ids = itertools.count(1 << 32)


@contextmanager
def faulty_server(site: Path, *settings: str) -> Iterator[ServerProcess]:
    """`site` is an empty directory for the plugin's metadata."""
    install(site, "faulty-kvf", {"requests.faulty": faulty_plugin.__name__})
    with pytest.MonkeyPatch.context() as patch:
        path = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", f"{site}{os.pathsep}{path}" if path else str(site))
        with ServerProcess("requests.0.use=faulty", *settings) as process:
            yield process


def send(client: WireClient, name: str, until: str = "") -> int:
    """The request id; the answer is awaited by `answer`."""
    request_id = next(_ids)
    client.socket.send_multipart(join(request_id, f"faulty.{name}", Ask(until)))
    return request_id


def answer(client: WireClient, request_id: int, timeout: float | None = None) -> str:
    """Raises the typed error that the server answered with."""
    answered, _, payload = client.receive(timeout)
    assert answered == request_id
    if isinstance(payload, Exception):
        raise payload
    return decode(payload, Answer, where="test").text
