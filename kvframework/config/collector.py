"""The address of a collector of traces, OTLP over HTTP. Pure."""

from __future__ import annotations

from urllib.parse import urlsplit

from kvframework.errors import ConfigFieldError

DEFAULT_PATH = "/v1/traces"


def collector_url(text: str, *, where: str = "") -> str:
    """The URL to which spans are sent: `text`, with `DEFAULT_PATH` if it has no path. Raises `ConfigFieldError`, also
    for a URL with a user or password, which would stand in the log."""
    try:
        parts = urlsplit(text)
        plain = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and text.isprintable()
    except ValueError:
        plain = False
    if not plain or parts.fragment or " " in text:
        raise ConfigFieldError(
            "`traces` is no URL of a collector", where=where, hint='write traces = "http://127.0.0.1:4318"'
        )
    if parts.username is not None or parts.password is not None or parts.query:
        raise ConfigFieldError(
            "the URL in `traces` has a user, a password or a query, which are secrets at a collector",
            where=where,
            hint="give them as a header, by the variable OTEL_EXPORTER_OTLP_HEADERS",
        )
    return text if parts.path not in ("", "/") else f"{parts.scheme}://{parts.netloc}{DEFAULT_PATH}"
