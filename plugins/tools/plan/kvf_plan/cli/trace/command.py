"""The commands of `kvframework trace`: their options and what they print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvf_plan.cli.amounts import seconds_of
from kvframework.api.command import AsJson, Endpoint, EndpointConfig, QuickGroup, examples

app = typer.Typer(
    cls=QuickGroup,
    help="Record, check and describe traces: the times of requests and the tokens that they share.",
    no_args_is_help=True,
)


File = Annotated[Path, typer.Argument(metavar="FILE", help="The trace file.")]
ChunkTokens = Annotated[
    int,
    typer.Option(min=0, max=1 << 20, help="Tokens per chunk, if the file does not say; 0: 512."),
]


@app.command(
    "record",
    epilog=examples(
        "kvframework trace record --for 10m -o node.jsonl",
        "kvframework trace record -o node.jsonl              until Ctrl-C",
    ),
)
def record(
    output: Annotated[Path, typer.Option("--output", "-o", help="The new file to write.")],
    seconds: Annotated[
        float | None,
        typer.Option("--for", metavar="TIME", parser=seconds_of, help="How long to record, such as 90s, 10m or 2h."),
    ] = None,
    endpoint: Endpoint = None,
    config: EndpointConfig = None,
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to wait for the server.")] = 5.0,
) -> None:
    """Record a running server's lookups into a trace, without text, tokens and names.

    A line holds the time of a lookup, its length, what was hit, and an id for each chunk, which is equal where prompts
    are equal. The ids mean nothing outside of this file. Run it as the server's user on its node. Whatever ends it,
    what it has written stays, and the server records no more.
    """
    from kvf_plan.cli.trace.recording import Recorder
    from kvframework.api.console import print_text
    from kvframework.client import KVClient
    from kvframework.client.status_source import quiet_connection, server_endpoint

    quiet_connection()
    with KVClient(server_endpoint(endpoint, config), name="trace", connect_timeout_s=timeout) as client:
        recorder = Recorder(client, output, timeout_s=timeout)
        try:
            recorder.run(seconds or float("inf"))
        finally:
            if recorder.begun:
                print_text(f"{output}: {recorder.said()}")


@app.command("info", epilog=examples("kvframework trace info node.jsonl", "kvframework trace info node.jsonl --json"))
def info(
    file: File,
    chunk_tokens: ChunkTokens = 0,
    as_json: AsJson = False,
) -> None:
    """Show the requests of a trace, and the smallest memory that holds all KV it uses again."""
    import msgspec

    from kvf_plan.cli.trace.recording import table_of
    from kvf_plan.trace.reading import open_trace
    from kvf_plan.trace.summary import summarise
    from kvframework.api.console import print_document, print_view

    trace = open_trace(file, chunk_tokens=chunk_tokens)
    summary = summarise(trace)
    if as_json:
        print_document(msgspec.structs.asdict(trace.header) | msgspec.structs.asdict(summary))
    else:
        print_view(table_of(trace.header, summary))
