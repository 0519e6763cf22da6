"""`kvframework route`: which node holds how much of a prompt, over HTTP, in a separate process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvframework.api.command import examples

_EPILOG = examples(
    "kvframework route --node a=tcp://10.0.0.1:5557 --node b=tcp://10.0.0.2:5557",
    "kvframework route --nodes nodes.toml       SIGHUP reads it again",
    """curl -s 127.0.0.1:9310/score -d '{"tokens": [1, 2, 3], "model": "m"}'""",
    "curl -s 127.0.0.1:9310/publishers",
)


app = typer.Typer()


@app.command("route", epilog=_EPILOG)
def route(
    node: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=EVENTS[,REPLAY]", help="A node's name and the endpoint of its events; repeatable."),
    ] = None,
    nodes: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file with a table [[node]] for each node and [route] for options."),
    ] = None,
    blocks: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 31, help="Capacity of the index, in blocks of 40 bytes; default: 10 million."),
    ] = None,
    client_key: Annotated[
        Path | None, typer.Option(help="File of this router's secret CURVE key, for nodes with a server_key.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address to listen at, default 127.0.0.1:9310; port 0: any free port."),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="File of the TLS certificate chain, for https.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="File of the TLS certificate's private key.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File of the token that HTTP clients must send; read for each request.")
    ] = None,
) -> None:
    """Answer over HTTP which node holds how much of a prompt.

    The nodes' events are followed, those of kvframework's servers and of vLLM's own publishers. A node need not run: it
    is found when it does. SIGINT (Ctrl-C) or SIGTERM ends this process.
    """
    from kvf_route.app import check
    from kvf_route.app import route as serve
    from kvf_route.settings import configured
    from kvframework.api.process import configure_logging, end_logging

    files = {"client_key": client_key, "tls_cert": tls_cert, "tls_key": tls_key, "token_file": token_file}
    asked = {"listen": listen, "blocks": blocks, **{name: str(file) for name, file in files.items() if file}}
    given = {name: value for name, value in asked.items() if value is not None}
    config = configured(node or (), "" if nodes is None else str(nodes), given)
    check(config)
    configure_logging("info", "human")
    try:
        serve(config)
    finally:
        end_logging()
