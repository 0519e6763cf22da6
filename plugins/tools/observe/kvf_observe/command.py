"""`kvframework observe`: metrics, health and a page about a running server, over HTTP, in a separate process."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from kvframework.api.command import Endpoint, EndpointConfig, examples

_EPILOG = examples(
    "kvframework observe                        then open http://127.0.0.1:9309/",
    "kvframework observe --listen 0.0.0.0:9309 --token-file /run/secrets/token",
    "kvframework observe --traces http://127.0.0.1:4318",
    "curl -s 127.0.0.1:9309/metrics",
    "curl -s '127.0.0.1:9309/readyz?verbose'",
)
app = typer.Typer()


class Format(str, enum.Enum):
    human = "human"
    json = "json"


@app.command("observe", epilog=_EPILOG)
def observe(
    endpoint: Endpoint = None,
    config: EndpointConfig = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen at; port 0: any free port.")
    ] = "127.0.0.1:9309",
    tls_cert: Annotated[Path | None, typer.Option(help="File of the TLS certificate chain, for https.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="File of the TLS certificate's private key.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File of the token that HTTP clients must send; read for each request.")
    ] = None,
    traces: Annotated[
        str, typer.Option(metavar="URL", help="URL of an OTLP/HTTP trace collector, for spans of sampled requests.")
    ] = "",
    log_format: Annotated[Format, typer.Option(help="Format of the log lines on standard error.")] = Format.human,
) -> None:
    """Serve metrics, health checks and a live page of this node's server over HTTP.

    The server is asked once a second, however many callers there are, and need not run: it is found when it does.
    SIGINT (Ctrl-C) or SIGTERM ends this process.
    """
    if (tls_cert is None) != (tls_key is None):
        raise typer.BadParameter("--tls-cert and --tls-key must be given together", param_hint="--tls-cert")
    from kvf_observe import process
    from kvframework.api.endpoint import ObserveConfig
    from kvframework.api.process import configure_logging, end_logging
    from kvframework.client import server_endpoint

    given = {"tls_cert": tls_cert, "tls_key": tls_key, "token_file": token_file, "traces": traces or None}
    settings = ObserveConfig(listen, **{name: str(value) for name, value in given.items() if value is not None})
    address = server_endpoint(endpoint, config)
    process.check(address, settings)
    configure_logging("info", log_format.value)
    try:
        process.observe(address, settings)
    finally:
        end_logging()
