"""A listener of a `[[listener]]`: what a real server's requests did comes to it, and its status into the document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvframework.api.listener import Listener, ListenerContext, ListenerProvider, Records, RequestRecord, hookimpl
from kvframework.api.plugin import NoOptions
from tests.core.server.in_process import serving
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for


class Tally(Listener):
    """Counts records by their kind, requests by their name and outcome."""

    def __init__(self, _options: NoOptions, context: ListenerContext) -> None:
        self.context = context
        self.counts: Counter[str] = Counter()

    def listen(self, records: Records) -> None:
        for batch in records:
            for record in batch.records:
                if isinstance(record, RequestRecord):
                    self.counts[f"{record.request} {record.outcome}"] += 1
                else:
                    self.counts[type(record).__name__] += len(getattr(record, "keys", "1"))

    def status(self) -> Mapping[str, object]:
        return dict(self.counts)


class Broken(Tally):
    def listen(self, records: Records) -> None:
        raise ValueError("it cannot listen")


class Plugin:
    def __init__(self, kind: type[Tally]) -> None:
        self._kind = kind

    @hookimpl
    def kvf_listeners(self) -> list[ListenerProvider[NoOptions]]:
        return [ListenerProvider(name="tally", summary="counts records", create=self._kind)]


def test_it_hears_requests_and_objects() -> None:
    with (
        serving("listener.0.use=tally", "server.chunk_size=32", plugins=(Plugin(Tally),)) as server,
        WireClient(server.endpoint) as client,
    ):
        registered = client.register(1, hidden_dim_size=64)
        key = key_for(registered, range(64))
        assert not client.lookup(key).hit_tokens
        client.store(key, b"kv")
        assert client.lookup(key).hit_tokens == 64

        def counts() -> dict[str, int]:
            found: dict[str, int] = client.status()["listeners"]["tally"]
            return found

        wait_until(lambda: counts().get("LOOKUP hit"), what="the second lookup")
        assert counts()["LOOKUP miss"] == counts()["STORE stored"] == counts()["LOOKUP hit"] == 1
        assert counts()["Added"] == 2


def test_one_that_fails_is_a_problem_of_the_server_which_serves() -> None:
    with serving("listener.0.use=tally", plugins=(Plugin(Broken),)) as server, WireClient(server.endpoint) as client:
        wait_until(lambda: client.status()["problems"], what="the problem")
        (problem,) = client.status()["problems"]
        assert problem["fact"] == "listener tally: the listener failed: ValueError('it cannot listen')"
        client.register(1, hidden_dim_size=64)
