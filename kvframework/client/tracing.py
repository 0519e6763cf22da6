"""The trace that the calling thread is in, for engines that are traced by OpenTelemetry in their own process."""

from __future__ import annotations

import sys

from kvframework.api.trace import sampled_parent


def current_trace() -> str:
    """The traceparent of the current span, for `RequestHashes`; "" if it is not sampled, or nothing here has imported
    OpenTelemetry. Never raises."""
    opentelemetry = sys.modules.get("opentelemetry.trace")
    if opentelemetry is None:
        return ""
    try:
        context = opentelemetry.get_current_span().get_span_context()
        return sampled_parent(f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}")
    except Exception:  # noqa: BLE001  a tracer of another kind, or one that is being imported
        return ""
