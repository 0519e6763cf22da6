"""A request's trace: the engine's span, those of the server and of Redis behind it, in one collector; texts that are no
traceparent. Real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import format_span_id, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvframework.client import RequestHashes, SchedulerAdapter
from kvframework.errors import KVFrameworkError
from kvframework.wire import messages as m
from tests.support.collector import Collector, Received
from tests.support.observe_process import SLOW_S
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess, fixture_of, server_fixture
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, key_for

TOKENS = list(range(2048))
CHUNK = 256
SALT = "a-salt-that-is-secret"
PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


collector = fixture_of(Collector)
server = server_fixture(scope="module")


@pytest.mark.redis
def test_one_trace_from_the_engine_to_the_tier(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TracerProvider()
    engine.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{collector.url}/v1/traces")))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20of-a-test")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=node-7")
    settings = ("observe.listen=127.0.0.1:0", f"observe.traces={collector.url}")
    tier = ("l2.0.use=redis", "l2.0.timeout_s=60.0")
    with RedisServer(tmp_path) as redis, ServerProcess(*settings, *tier, f"l2.0.url={redis.url}") as server:
        wait_until(lambda: "spans of sampled requests are sent to" in server.log, SLOW_S, "the observing process")
        with engine.get_tracer("engine").start_as_current_span("llm_request") as span:
            headers: dict[str, str] = {}
            TraceContextTextMapPropagator().inject(headers)
            _serve(server, headers["traceparent"])
        parent = span.get_span_context()
        wanted = ("llm_request", "kvframework.store", "kvframework.lookup", "kvframework.retrieve")
        wait_until(lambda: all(map(collector.named, wanted)), SLOW_S, "the spans")
        assert "Bearer" not in server.log
    assert collector.headers["authorization"] == "Bearer of-a-test"
    assert {each.trace for each in collector.spans} == {format_trace_id(parent.trace_id)}
    ours = [each for each in collector.spans if each.name.startswith("kvframework.")]
    assert {(each.resource["service.name"], each.resource["k8s.pod.name"]) for each in ours} == {
        ("kvframework", "node-7")
    }
    (stored,), (found,), (loaded,) = map(collector.named, wanted[1:])
    assert {each.parent for each in (stored, found, loaded)} == {format_span_id(parent.span_id)}
    assert (stored.attributes["kvframework.outcome"], stored.attributes["kvframework.objects"]) == ("stored", 8)
    tokens = {name: found.attributes[f"kvframework.tokens.{name}"] for name in ("asked", "l1", "l2", "missed")}
    assert tokens == {"asked": 2048, "l1": 512, "l2": 1536, "missed": 0}
    assert found.attributes["gen_ai.request.id"] == "r1"
    assert loaded.attributes["kvframework.outcome"] == "hit"
    calls = collector.named("kvframework.l2.contains") + collector.named("kvframework.l2.get")
    assert {(each.parent, each.attributes["kvframework.tier"]) for each in calls} == {(found.id, "redis")}
    assert sum(each.attributes["kvframework.values.found"] for each in collector.named("kvframework.l2.get")) == 6
    for call in calls:
        assert _times(found)[0] <= _times(call)[0] <= _times(call)[1] <= _times(found)[1]
    assert _times(stored)[1] <= _times(found)[0] <= _times(found)[1] <= _times(loaded)[0]
    # The wall clock that both have, read by two processes, which may be held up between two readings.
    assert abs(_times(collector.named("llm_request")[0])[0] - _times(stored)[0]) < SLOW_S * 1e9
    assert SALT not in str(collector.spans)


def _serve(server: ServerProcess, traceparent: str) -> None:
    """Store a prompt, lose most of it from L1, look it up and load it; beside it an unsampled request."""
    with server.client() as client, server.engine_client() as library:
        registered = client.register()
        fields = {"request_id": "r1", "cache_salt": SALT}
        key = key_for(registered, TOKENS, trace=traceparent, **fields)
        client.store(key, b"kept in the tier")
        wait_until(lambda: client.status()["l2"][0]["write_pending"] == 0, SLOW_S, "the write to L2")
        assert client.call("CLEAR", m.Clear()).objects == 8
        scheduler = SchedulerAdapter(library, model_name="tiny", namespace=registered.namespace)
        unsampled = RequestHashes(
            library.hasher, CHUNK, request_id="r0", cache_salt=SALT, trace=traceparent[:-2] + "00"
        )
        request = RequestHashes(library.hasher, CHUNK, trace=traceparent, **fields)
        for hashes, tokens in ((unsampled, TOKENS[:512]), (request, TOKENS)):
            hashes.extend(tokens)
            result = scheduler.wait(scheduler.lookup(hashes), SLOW_S)
            assert result.hit_tokens == len(tokens)
        assert client.retrieve(key) is not None
        scheduler.free(result)


def _times(received: Received) -> tuple[int, int]:
    return received.span.start_time_unix_nano, received.span.end_time_unix_nano


HOSTILE = [
    "x",
    "x" * 1_000_000,
    "\0" * 55,
    "00-" + "\u0661" * 32 + f"-{'cd' * 8}-01",  # digits of another alphabet
    PARENT.upper(),
    PARENT[:-1],
    PARENT + "-more",
    PARENT + "\n",
    " " + PARENT,
    "ff" + PARENT[2:],
    f"00-{'0' * 32}-{'cd' * 8}-01",
    f"00-{'ab' * 16}-{'0' * 16}-01",
    PARENT[:-2] + "00",
    PARENT[:-2] + "fe",
]


def last_record(client: WireClient) -> m.Finished:
    return client.call("RECENT", m.Recent()).records[-1]


@pytest.mark.parametrize("trace", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_sampled_traceparent_is_ignored(server: ServerProcess, trace: str) -> None:
    with server.client() as client:
        key = key_for(client.register(), TOKENS, trace=trace)
        assert client.lookup(key).hit_tokens == 0
        assert last_record(client).trace == ""
        client.store(key, b"as every other..")
        assert last_record(client).trace == ""
        client.call("CLEAR", m.Clear())


def test_a_later_version_is_read_as_this_one(server: ServerProcess) -> None:
    with server.client() as client:
        client.lookup(key_for(client.register(), TOKENS, trace=f"cc{PARENT[2:]}-what-comes-later"))
        assert last_record(client).trace == PARENT


def test_a_trace_that_is_no_text_is_refused_and_the_server_lives(server: ServerProcess) -> None:
    with server.client() as client:
        registered = client.register()
        for trace in (1, None, b"x", ["x"], {"a": 1}):
            with pytest.raises(KVFrameworkError):
                client.call("LOOKUP", {"key": _with(key_for(registered, TOKENS), trace)})
        assert client.lookup(key_for(registered, TOKENS)).hit_tokens == 0


def _with(key: object, trace: object) -> dict[str, object]:
    import msgspec

    return msgspec.structs.asdict(key) | {"trace": trace}  # type: ignore[arg-type]
