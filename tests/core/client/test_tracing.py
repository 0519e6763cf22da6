"""The trace of the calling thread, with OpenTelemetry here, absent, or of another kind."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from kvframework.client import current_trace

TRACE, SPAN = 0xAB, 0xCD


@pytest.mark.parametrize(("flags", "traced"), [(1, f"00-{TRACE:032x}-{SPAN:016x}-01"), (0, "")])
def test_the_current_span_is_the_parent_if_it_is_sampled(flags: int, traced: str) -> None:
    with use_span(NonRecordingSpan(SpanContext(TRACE, SPAN, is_remote=False, trace_flags=TraceFlags(flags)))):
        assert current_trace() == traced


def test_outside_of_a_span_there_is_none() -> None:
    assert current_trace() == ""


@pytest.mark.parametrize("module", [None, SimpleNamespace(), SimpleNamespace(get_current_span=lambda: None)])
def test_without_opentelemetry_or_with_another_there_is_none(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    if module is None:
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    else:
        monkeypatch.setitem(sys.modules, "opentelemetry.trace", module)
    assert current_trace() == ""
