"""`[observe]` of the TOML: what a server, which starts `kvframework observe`, and that process agree on."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from kvframework.errors import ConfigFieldError

__all__ = ["ObserveConfig", "collector_url"]

DEFAULT_PATH = "/v1/traces"


class ObserveConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[observe]`: the process of `kvframework observe` that the server starts, and starts again after its end. Without
    the table there is none. `listen` is HOST:PORT; port 0 is any free one, which the log names."""

    listen: Annotated[
        str,
        msgspec.Meta(min_length=1, description="`HOST:PORT` of metrics, health and the page; port 0: any free one"),
    ] = "127.0.0.1:9309"
    tls_cert: Annotated[str, msgspec.Meta(description="file of the certificate chain; empty: plain HTTP")] = ""
    tls_key: Annotated[str, msgspec.Meta(description="file of its key")] = ""
    token_file: Annotated[
        str,
        msgspec.Meta(description="file of the token that callers give; read for each request; empty: none is asked"),
    ] = ""
    traces: Annotated[
        str,
        msgspec.Meta(
            description="URL of a collector that takes OTLP over HTTP, for spans of sampled requests; empty: none"
        ),
    ] = ""


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
