"""The spans of finished requests that are sampled, and the thread that asks the server for them, once a second, and
sends them to a collector by OTLP over HTTP.

A LOOKUP, STORE or RETRIEVE is a span below the one that its client named, with a span for each call to a tier below it.
Attributes hold no salt, token, digest, key or text of a prompt. The thread's bound is that of the server, which keeps
the last `MAX_RECENT` sampled requests: while a collector is slow or away it waits, and what the server has forgotten
meanwhile is counted.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
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

from kvf_observe.metrics import NOTHING_TRACED
from kvframework import __version__
from kvframework.api.listener import Finished, TierCall
from kvframework.client import StatusSource
from kvframework.errors import KVFrameworkError

_NS = 1_000_000_000
Attributes = Mapping[str, str | int]
log = logging.getLogger(__name__)
EVERY_S = 1.0
# For one batch, with what the exporter tries again; a wait in vain costs what the server forgets meanwhile.
EXPORT_S = 5.0
STOP_S = 2.0


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


class SpanExport:
    """Runs from `start` to `stop`. `counts` are sampled requests by what became of them, read from any thread. Owns
    `source`. The exporter reads the headers of its requests, which may be secret, from `OTEL_EXPORTER_OTLP_HEADERS`."""

    def __init__(self, source: StatusSource, collector: str) -> None:
        self.counts = NOTHING_TRACED.copy()
        self._source = source
        self._collector = collector
        # Its own lines repeat with each attempt, or quote a header that may be secret.
        self._last_error, header = _LastLine("opentelemetry.exporter"), _LastLine("opentelemetry.util.re")
        self._exporter = OTLPSpanExporter(collector, timeout=EXPORT_S)
        if header.text:
            log.warning("ignored a header in OTEL_EXPORTER_OTLP_HEADERS that is not a URL-encoded NAME=VALUE")
        self._maker = SpanMaker()
        self._began = time.time()
        # The server's start, the number of its last record that was taken, and its clock's offset.
        self._boot_id = b""
        self._after = 0
        self._wall_offset: float | None = None
        self._works = True
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvf-observe-spans", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after what is finished by now has been sent. Waits `STOP_S` at most."""
        self._stopping.set()
        self._thread.join(STOP_S)
        self._source.close()
        # Also ends its waits for another attempt.
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _run(self) -> None:
        log.info("spans of sampled requests are sent to the trace collector at %s", self._collector)
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(EVERY_S)
            try:
                self._export(self._taken())
            except KVFrameworkError as error:
                log.debug("finished requests cannot be read: %s", error)  # the poller says that the server is away
            except Exception:
                log.exception("spans of finished requests could not be made")
        self._source.close()

    def _taken(self) -> list[Finished]:
        """Return the sampled requests that have finished since the last call, and since this process began."""
        reply = self._source.finished(self._after, traced=True)
        if reply.boot_id != self._boot_id:
            first, self._boot_id, self._wall_offset = not self._boot_id, reply.boot_id, None
            if self._after:
                self._after = 0
                reply = self._source.finished(traced=True)
            if not first:
                self.counts["forgotten"] += reply.forgotten
        else:
            self.counts["forgotten"] += reply.forgotten
        self._after = reply.last
        return [record for record in reply.records if record.trace and record.at >= self._began]

    def _export(self, records: list[Finished]) -> None:
        if not records:
            return
        if self._wall_offset is None:
            # The server reads the wall clock first: what is held up in between makes it too small.
            self._wall_offset = max(record.at - record.monotonic for record in records)
        spans = self._maker.spans(records, self._wall_offset)
        try:
            works = self._exporter.export(spans) is SpanExportResult.SUCCESS
            why = self._last_error.text
        except Exception as error:  # noqa: BLE001  older releases raise what newer ones return
            works, why = False, f"{type(error).__name__}: {error}"
        self.counts["exported" if works else "failed"] += len(records)
        if works != self._works:
            self._works = works
            if works:
                log.warning("the trace collector at %s accepts spans again", self._collector)
            else:
                log.warning("the trace collector at %s does not accept spans: %s", self._collector, why)


class _LastLine(logging.Handler):
    """Keeps the warnings and errors of a library's logger out of the log; `text` is the last one."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
