"""The thread that asks the server for its sampled requests, once a second, and sends their spans to a collector by OTLP
over HTTP.

Its bound is that of the server, which keeps the last `MAX_RECENT` sampled requests: while a collector is slow or away
the thread waits, and what the server has forgotten meanwhile is counted.
"""

from __future__ import annotations

import logging
import threading
import time

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from kvf_observe.metrics import NOTHING_TRACED
from kvf_observe.spans import SpanMaker
from kvframework.client.status_source import StatusSource
from kvframework.errors import KVFrameworkError
from kvframework.wire.messages import Finished

log = logging.getLogger(__name__)

EVERY_S = 1.0
# For one batch, with what the exporter tries again; a wait in vain costs what the server forgets meanwhile.
EXPORT_S = 5.0
STOP_S = 2.0


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
            log.warning("a header in OTEL_EXPORTER_OTLP_HEADERS is not NAME=VALUE, in the form of URLs: it is not sent")
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
        log.info("spans of sampled requests go to %s", self._collector)
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(EVERY_S)
            try:
                self._export(self._taken())
            except KVFrameworkError as error:
                log.debug("no finished requests: %s", error)  # the poller says that the server is away
            except Exception:
                log.exception("spans were not made")
        self._source.close()

    def _taken(self) -> list[Finished]:
        """Return the sampled requests that have finished since the last call, and since this process began."""
        reply = self._source.sampled(self._after)
        if reply.boot_id != self._boot_id:
            first, self._boot_id, self._wall_offset = not self._boot_id, reply.boot_id, None
            if self._after:
                self._after = 0
                reply = self._source.sampled(0)
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
                log.warning("the collector at %s takes spans again", self._collector)
            else:
                log.warning("the collector at %s takes no spans: %s", self._collector, why)


class _LastLine(logging.Handler):
    """Keeps the warnings and errors of a library's logger out of the log; `text` is the last one."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
