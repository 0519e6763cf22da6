"""DUMP of a server that has seen a thousand models, and REPORT_STATUS beside any number of DUMPs, TRACEs and CLEARs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvframework.wire import messages as m
from tests.support.server_process import ServerProcess
from tests.support.wire_client import WireClient, key_for

MODELS = 1000
TOKENS = list(range(256))
PATIENCE_S = 60.0
# More than a server has threads for any one of them.
EACH = 8
WITHOUT_END = {"DUMP": m.Empty(), "TRACE": m.Trace(after=0), "CLEAR": m.Clear()}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Clients have named a thousand models, and all of its finished requests name another one."""
    with ServerProcess() as process, process.client(timeout=PATIENCE_S) as client:
        for number in range(MODELS):
            name = f"acme/llama-3.1-8b-instruct-{number}"
            registered = client.register(model_name=name)
            client.lookup(key_for(registered, TOKENS, model_name=name, request_id=f"{number}"))
            client.call("UNREGISTER_KV_CACHE", m.Unregister(1))
        yield process


def dump(client: WireClient) -> Any:
    return msgspec.json.decode(client.call("DUMP", m.Empty()).document)


def test_a_dump_of_a_thousand_models_is_made_within_its_deadline(server: ServerProcess) -> None:
    with server.client(timeout=PATIENCE_S) as client:
        document = dump(client)
    requests = [each for each in document["requests"] if each["request"] == "LOOKUP"]
    assert len({each["model"] for each in requests}) == len(requests) == MODELS
    assert "acme" not in msgspec.json.encode(document).decode()


def test_status_is_answered_while_dumps_traces_and_clears_run(server: ServerProcess) -> None:
    """Each answer makes room for the next question: no thread that serves these is free for a moment."""
    stop = threading.Event()
    answered: dict[str, int] = {}
    failures: list[BaseException] = []

    def ask(name: str) -> None:
        try:
            with server.client(timeout=PATIENCE_S) as client:
                for _ in range(EACH):
                    client.send(name, WITHOUT_END[name])
                while not stop.is_set():
                    with contextlib.suppress(TimeoutError):
                        _, kind, _ = client.receive(1.0)
                        answered[kind] = answered.get(kind, 0) + 1
                        client.send(name, WITHOUT_END[name])
        except BaseException as error:  # noqa: BLE001  shown below
            failures.append(error)

    threads = [threading.Thread(target=ask, args=[name]) for name in WITHOUT_END for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        with server.client(timeout=PATIENCE_S) as client:
            for _ in range(10):
                assert client.status()["server"]["pid"] == server.pid, "within the deadline of the server"
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not failures
    assert answered.get("TRACE"), answered
    assert answered.get("CLEAR"), answered
