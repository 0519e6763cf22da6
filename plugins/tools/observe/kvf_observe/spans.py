"""The spans of finished requests that are sampled: names, times and attributes. No I/O.

A LOOKUP, STORE or RETRIEVE is a span below the one that its client named, with a span for each call to a tier below
it. Attributes hold no salt, token, digest, key or text of a prompt.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from kvframework import __version__
from kvframework.wire.messages import Finished, TierCall

_NS = 1_000_000_000
Attributes = Mapping[str, str | int]


class SpanMaker:
    """For one thread. Random ids; the resource is this node's, with `OTEL_SERVICE_NAME` and
    `OTEL_RESOURCE_ATTRIBUTES`."""

    def __init__(self) -> None:
        self._made: list[ReadableSpan] = []
        named = {"service.name": "kvframework", "service.version": __version__, "host.name": socket.gethostname()}
        provider = TracerProvider(
            sampler=ALWAYS_ON, resource=Resource(named).merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        provider.add_span_processor(_Ended(self._made.append))
        self._tracer = provider.get_tracer("kvframework", __version__)

    def spans(self, records: Iterable[Finished], wall_offset: float) -> list[ReadableSpan]:
        """Return the spans of the records with a trace. `wall_offset` is the wall clock less the server's monotonic
        clock, in seconds: one for all records of a server, so that they keep their order."""
        for record in records:
            if record.trace:
                self._add(record, wall_offset)
        made = self._made.copy()
        self._made.clear()
        return made

    def _add(self, record: Finished, wall_offset: float) -> None:
        began, ended = record.monotonic - record.seconds + wall_offset, record.monotonic + wall_offset
        parent = NonRecordingSpan(_context_of(record.trace))
        span = self._span(f"kvframework.{record.request.lower()}", parent, SpanKind.SERVER, began, attributes(record))
        for call in record.tier_calls:
            at = call.began + wall_offset
            child = self._span(f"kvframework.l2.{call.operation}", span, SpanKind.CLIENT, at, _of_call(call))
            _end(child, at + call.seconds, "" if call.ok else "tier_error")
        _end(span, ended, "failed" if record.outcome == "failed" else "")

    def _span(self, name: str, parent: Span, kind: SpanKind, began: float, values: Attributes) -> Span:
        context = set_span_in_context(parent)
        return self._tracer.start_span(name, context, kind, values, start_time=round(began * _NS))


class _Ended(SpanProcessor):
    """Passes on each span at its end."""

    def __init__(self, take: Callable[[ReadableSpan], None]) -> None:
        self._take = take

    def on_end(self, span: ReadableSpan) -> None:
        self._take(span)


def attributes(record: Finished) -> Attributes:
    """Return the attributes of a request's span; names of OpenTelemetry where it has one."""
    values: dict[str, str | int] = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.request.model": record.model,
        "kvframework.client": record.client,
        "kvframework.tenant": record.tenant,
        "kvframework.namespace": record.namespace,
        "kvframework.outcome": record.outcome,
        "kvframework.miss.reason": record.reason,
        "kvframework.path": record.path,
    }
    values = {name: value for name, value in values.items() if value}
    values["kvframework.tokens.asked"] = record.asked_tokens
    if record.request == "LOOKUP":
        values["kvframework.tokens.l1"] = record.l1_tokens
        values["kvframework.tokens.l2"] = record.l2_tokens
        values["kvframework.tokens.missed"] = record.asked_tokens - record.l1_tokens - record.l2_tokens
    else:
        values["kvframework.objects"] = record.objects
        values["kvframework.bytes"] = record.nbytes
    return values


def _of_call(call: TierCall) -> Attributes:
    return {
        "kvframework.tier": call.tier,
        "db.operation.name": call.operation,
        "db.operation.batch.size": call.values,
        "kvframework.values.found": call.found,
    }


def _end(span: Span, at: float, error: str) -> None:
    if error:
        span.set_attribute("error.type", error)
        span.set_status(Status(StatusCode.ERROR))
    span.end(round(at * _NS))


def _context_of(traceparent: str) -> SpanContext:
    _, trace, span, flags = traceparent.split("-")
    return SpanContext(int(trace, 16), int(span, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
