"""`kvframework clear`: drops what a running server caches, after a question."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from kvframework.api.command import AsJson, Endpoint, EndpointConfig, examples
from kvframework.api.console import print_document, print_text, stderr
from kvframework.api.plugin import ByteSize
from kvframework.client import StatusSource, quiet_connection, server_endpoint
from kvframework.status import Status

app = typer.Typer()


@app.command(
    epilog=examples(
        "kvframework clear                              L1 of this node's server",
        "kvframework clear --l2 --model Qwen/Qwen3-8B   one model, everywhere",
        "kvframework clear --yes --json                 for scripts",
    )
)
def clear(
    l2: Annotated[
        bool, typer.Option("--l2", help="Also delete from every L2 tier, for all nodes that share the tier.")
    ] = False,
    model: Annotated[str, typer.Option(help="Delete only the objects of this model, as the engine names it.")] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    endpoint: Endpoint = None,
    config: EndpointConfig = None,
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to wait for the deletion.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Delete the objects that a running server caches. Engines then compute the KV again.

    Objects that a request uses at this moment stay. L2 is cleared of all that a tier lists; a tier that cannot list its
    values is cleared of what L1 holds too.
    """
    quiet_connection()
    with closing(StatusSource(server_endpoint(endpoint, config), 5.0, name="clear")) as source:
        if not yes:
            status = msgspec.json.decode(source.ask(), type=Status)
            used = f"all {status.l1.objects} objects, {ByteSize(status.l1.used_bytes)},"
            places = " and of ".join(["L1", *(tier.name for tier in status.l2 if l2)])
            what = f"the objects of {model!r}" if model else used
            _confirm(f"Drop {what} of {places} at {status.server.endpoint}?")
        cleared = source.clear(l2=l2, model=model, timeout=timeout)
    if as_json:
        print_document(msgspec.structs.asdict(cleared))
        return
    stay = f"kept {cleared.in_use} objects that are in use"
    print_text(f"L1: dropped {cleared.objects} objects, {ByteSize(cleared.nbytes)}; {stay}")
    if l2:
        print_text(f"L2: deleted {cleared.l2_objects} values, {ByteSize(cleared.l2_bytes)}")
    for name in cleared.unlisted:
        print_text(f"{name} cannot list its values, so values that L1 did not hold stay until they expire")


def _confirm(question: str) -> None:
    """Ask a question. Raises `typer.Exit` for any answer but yes, `KeyboardInterrupt` for a Ctrl-C."""
    stderr.print(Text(f"{question} [y/N]: "), end="")
    answer = sys.stdin.readline() if sys.stdin else ""
    if answer.strip().lower() in ("y", "yes"):
        return
    # Behind a line of the terminal's own the next one begins by itself.
    stderr.print(
        "nothing was deleted" if answer.endswith("\n") else "\nnothing was deleted: the input has ended; give --yes"
    )
    raise typer.Exit(1)
