"""`kvframework control`: orders of gateways and people over HTTP, in a separate process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvframework.api.command import Endpoint, EndpointConfig, examples

_EPILOG = examples(
    "kvframework control --token-file token",
    "kvframework control --control control.toml     its table [control] has the options",
    """curl -H "authorization: Bearer $TOKEN" 127.0.0.1:9320/v1/pin -d '{"tokens": [1, 2], "seconds": 3600}'""",
    """curl -H "authorization: Bearer $TOKEN" 127.0.0.1:9320/openapi.json""",
)

app = typer.Typer()


@app.command("control", epilog=_EPILOG)
def control(
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address to listen at, default 127.0.0.1:9320; port 0: any free port."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File of the token that every request must have; read for each request.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="File of the TLS certificate chain, for https.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="File of the TLS certificate's private key.")] = None,
    file: Annotated[
        Path | None, typer.Option("--control", metavar="FILE", help="TOML file with a table [control] of options.")
    ] = None,
    endpoint: Endpoint = None,
    config: EndpointConfig = None,
) -> None:
    """Accept orders over HTTP to prefetch, pin, hint and delete KV.

    Pins last as long as this process, also where the server is replaced. SIGINT (Ctrl-C) or SIGTERM ends this process.
    """
    from kvf_control.app import control as serve
    from kvf_control.settings import configured
    from kvframework.api.process import configure_logging, end_logging
    from kvframework.client import server_endpoint

    options = {"listen": listen, "token_file": token_file, "tls_cert": tls_cert, "tls_key": tls_key}
    settings = configured(file, {name: str(value) for name, value in options.items() if value is not None})
    where = server_endpoint(endpoint, config)
    configure_logging("info", "human")
    try:
        serve(where, settings)
    finally:
        end_logging()
