"""Spans as they are made of records, the address of a collector, and a start without OpenTelemetry. Pure."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from kvf_observe import settings
from kvf_observe.spans import SpanMaker
from kvframework.api.endpoint import ObserveConfig, collector_url
from kvframework.api.installing import install_command
from kvframework.api.listener import Finished, TierCall
from kvframework.config.load import load_config
from kvframework.errors import ConfigFieldError, PluginUnavailable

TRACE, SPAN = "ab" * 16, "cd" * 8
PARENT = f"00-{TRACE}-{SPAN}-01"
LOOKUP = Finished(
    number=1,
    request="LOOKUP",
    at=1_700_000_000.5,
    monotonic=100.5,
    seconds=0.5,
    request_id="r1",
    client="vllm",
    pid=7,
    session_id=1,
    model="m",
    namespace="00ff",
    outcome="partial",
    asked_tokens=1024,
    l1_tokens=256,
    l2_tokens=512,
    missing=768,
    chunk_tokens=256,
    reason="evicted",
    tenant="acme",
    trace=PARENT,
    tier_calls=(
        TierCall("redis", "contains", 100.1, 0.1, 3, 2, True),
        TierCall("disk", "get", 100.3, 0.1, 2, 0, False),
    ),
)
OFFSET = LOOKUP.at - LOOKUP.monotonic


def made(*records: Finished) -> Sequence[ReadableSpan]:
    return SpanMaker().spans(records, OFFSET)


def seconds(span: ReadableSpan) -> tuple[float, float]:
    return span.start_time / 1e9 - OFFSET, span.end_time / 1e9 - OFFSET


def test_a_lookup_and_its_calls_to_tiers() -> None:
    asked, got, lookup = made(LOOKUP)
    assert [each.name for each in (asked, got, lookup)] == [
        "kvframework.l2.contains",
        "kvframework.l2.get",
        "kvframework.lookup",
    ]
    for span in (asked, got, lookup):
        assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{lookup.parent.span_id:016x}" == SPAN
    assert asked.parent == got.parent == lookup.context
    assert len({span.context.span_id for span in (asked, got, lookup)}) == 3
    assert seconds(lookup) == pytest.approx((100.0, 100.5), abs=1e-6)
    assert seconds(got) == pytest.approx((100.3, 100.4), abs=1e-6)
    assert lookup.attributes == {
        "gen_ai.request.id": "r1",
        "gen_ai.request.model": "m",
        "kvframework.client": "vllm",
        "kvframework.tenant": "acme",
        "kvframework.namespace": "00ff",
        "kvframework.outcome": "partial",
        "kvframework.miss.reason": "evicted",
        "kvframework.tokens.asked": 1024,
        "kvframework.tokens.l1": 256,
        "kvframework.tokens.l2": 512,
        "kvframework.tokens.missed": 256,
    }
    assert (asked.status.status_code, got.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
    assert got.attributes["error.type"] == "tier_error"


def test_a_transfer_that_failed_is_an_error_and_what_is_not_sampled_is_no_span() -> None:
    load = msgspec.structs.replace(
        LOOKUP, request="RETRIEVE", outcome="failed", objects=4, nbytes=4096, path="server", tier_calls=()
    )
    (span,) = made(load, msgspec.structs.replace(load, trace=""))
    assert span.name == "kvframework.retrieve"
    assert span.status.status_code is StatusCode.ERROR
    shown = {name.removeprefix("kvframework."): value for name, value in span.attributes.items()}
    assert (shown["objects"], shown["bytes"], shown["path"], shown["error.type"]) == (4, 4096, "server", "failed")


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://[::1]:1/otlp/v1/traces", "http://[::1]:1/otlp/v1/traces"),
    ],
)
def test_the_url_of_a_collector(given: str, url: str) -> None:
    assert collector_url(given) == url
    observe = load_config(overrides=[f"observe.traces={given}"], environ={}).observe
    assert observe.traces == given


@pytest.mark.parametrize(
    "given",
    [
        "collector:4317",
        "grpc://collector:4317",
        "http://",
        "http://x:99999",
        "http://a b",
        "http://x/#y",
        "http://[",
        "http://user:secret@collector",
        "http://collector/?token=secret",
    ],
)
def test_what_is_no_url_of_a_collector(given: str) -> None:
    with pytest.raises(ConfigFieldError, match=r"\[observe\]") as refused:
        load_config(overrides=[f"observe.traces={given}"], environ={})
    assert "secret@" not in str(refused.value)
    assert "=secret" not in str(refused.value)


def test_without_opentelemetry_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    here = importlib.util.find_spec
    monkeypatch.setattr(settings, "find_spec", lambda name: None if name.startswith("opentelemetry") else here(name))
    assert not list(settings.refusals(ObserveConfig("127.0.0.1:0"), "[observe]"))
    (refusal,) = settings.refusals(ObserveConfig("127.0.0.1:0", traces="http://127.0.0.1:4318"), "[observe]")
    assert isinstance(refusal, PluginUnavailable)
    assert install_command("otel", distribution="kvframework-observe") in str(refusal)
