"""What the status document counts of requests and lookups, in a real server with a filesystem tier. DUMP of a server
that has seen a thousand models, and REPORT_STATUS beside any number of DUMPs, TRACEs and CLEARs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS
from tests.core.server.in_process import serving
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

TOKENS = list(range(1024))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[WireClient]:
    disk = ("l2.0.use=filesystem", f"l2.0.path={tmp_path / 'l2'}", "l2.0.capacity=1GiB")
    with serving(*disk) as server, WireClient(server.endpoint) as connected:
        yield connected


def test_hits_are_counted_by_model_and_tier(client: WireClient) -> None:
    registered = client.register()
    whole, begin = key_for(registered, TOKENS), key_for(registered, TOKENS[:512])
    client.store(whole, b"x")
    wait_until(lambda: not client.status()["l2"][0]["write_pending"], what="the disk")
    client.call("CLEAR", m.Clear())
    assert client.settled(client.lookup(begin)).hit_tokens == 512
    assert client.settled(client.lookup(whole)).hit_tokens == 1024
    assert client.settled(client.lookup(whole)).hit_tokens == 1024
    lookups = client.status()["lookups"]
    assert lookups["by_model"] == {"tiny": {"lookups": 3, "asked_tokens": 2560, "l1_tokens": 1536, "l2_tokens": 1024}}
    assert (lookups["lookups"], lookups["asked_tokens"], lookups["hit_tokens"]) == (3, 2560, 2560)
    assert not any(lookups["misses"].values())


def test_a_lookup_that_ends_before_its_load_counts_what_was_there(client: WireClient) -> None:
    registered = client.register()
    client.store(key_for(registered, TOKENS[:256]), b"x")
    reply = client.lookup(key_for(registered, TOKENS))
    assert (reply.hit_tokens, reply.pending) == (256, True)
    client.call("FREE_LOOKUP_LOCKS", m.TicketRef(reply.ticket))
    lookups = client.status()["lookups"]
    assert lookups["by_model"] == {"tiny": {"lookups": 1, "asked_tokens": 1024, "l1_tokens": 256, "l2_tokens": 0}}
    assert {reason: count for reason, count in lookups["misses"].items() if count} == {"timed_out": 1}


def test_a_model_that_no_engine_registered_has_no_counters_of_its_own(client: WireClient) -> None:
    stranger = key_for(client.register(), TOKENS, namespace=b"unknown.........", model_name="a name of a client")
    assert client.settled(client.lookup(stranger)).hit_tokens == 0
    assert client.status()["lookups"]["by_model"].keys() == {"other"}


def test_every_answer_is_counted_by_its_duration(client: WireClient) -> None:
    before = client.status()["requests"]
    assert before.keys() == REQUESTS.keys()
    assert all(histogram["counts"] == [0] * 20 for name, histogram in before.items() if name != "HELLO")
    assert sum(before["HELLO"]["counts"]) == 1
    client.call("NOOP", m.Empty())
    with pytest.raises(Exception, match="start 0, end 0"):
        client.lookup(key_for(client.register(), TOKENS, end=0))
    after = client.status()["requests"]
    counted = {name: sum(histogram["counts"]) for name, histogram in after.items()}
    registering = "REGISTER_KV_CACHE_NON_GPU_CONTEXT"
    assert counted == {**dict.fromkeys(REQUESTS, 0), "HELLO": 1, "NOOP": 1, "LOOKUP": 1, "REPORT_STATUS": 1} | {
        registering: 1
    }
    assert all(histogram["sum"] > 0 for name, histogram in after.items() if counted[name])


def test_calls_of_a_tier_are_counted_by_their_duration(client: WireClient) -> None:
    seconds = client.status()["l2"][0]["seconds"]
    assert {"contains", "get_into", "put", "delete"} <= seconds.keys()
    assert sum(seconds["contains"]["counts"]) == 0
    client.settled(client.lookup(key_for(client.register(), TOKENS)))
    tier = client.status()["l2"][0]
    assert sum(tier["seconds"]["contains"]["counts"]) == tier["latency_ms"]["contains"]["count"] == 1


MODELS = 1000
MANY = list(range(256))
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
            client.lookup(key_for(registered, MANY, model_name=name, request_id=f"{number}"))
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
