"""`kvframework clear`: deletes what a running server caches, after a question; what a tenant, a conversation or a
prompt has left in L1 and every tier, with a receipt."""

from __future__ import annotations

import array
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from kvframework.api.command import AsJson, Endpoint, EndpointConfig, examples, read_file
from kvframework.api.console import print_document, print_text, stderr
from kvframework.api.plugin import ByteSize
from kvframework.client import Forget, Forgotten, StatusSource, quiet_connection, server_endpoint
from kvframework.errors import RequestError
from kvframework.status import Status

app = typer.Typer()


@app.command(
    epilog=examples(
        "kvframework clear                              L1 of this node's server",
        "kvframework clear --l2 --model Qwen/Qwen3-8B   one model, everywhere",
        "kvframework clear --tenant acme                of a tenant, everywhere, with a receipt",
        "kvframework clear --prefix tokens.json         the chunks of a prompt, a JSON array of its token ids",
        "kvframework clear --yes --json                 for scripts",
    )
)
def clear(
    l2: Annotated[
        bool, typer.Option("--l2", help="Also delete from every L2 tier, for all nodes that share the tier.")
    ] = False,
    model: Annotated[str, typer.Option(help="Delete only the objects of this model, as the engine names it.")] = "",
    tenant: Annotated[
        str, typer.Option(metavar="NAME", help="Delete the objects of this tenant from L1 and every tier.")
    ] = "",
    salts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Delete KV with these salts, one per line ('-': standard input); with --tenant, further salts.",
        ),
    ] = None,
    conversation: Annotated[
        str, typer.Option(metavar="ID", help="Delete the objects that requests of this conversation used or stored.")
    ] = "",
    prefix: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Delete the chunks of this prompt, a JSON array of token ids ('-': standard input)."
        ),
    ] = None,
    namespace: Annotated[
        str, typer.Option(metavar="HEX", help="Delete the objects of this namespace, 32 hexadecimal digits.")
    ] = "",
    wait: Annotated[
        float, typer.Option(min=0, max=600, help="Seconds to wait until no request uses the objects.")
    ] = 5.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    endpoint: Endpoint = None,
    config: EndpointConfig = None,
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to wait for the deletion.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Delete the objects that a running server caches. Engines then compute the KV again.

    Objects that a request uses at this moment stay. L2 is cleared of all that a tier lists; a tier that cannot list its
    values is cleared of what L1 holds too.

    With --tenant, --salts, --conversation, --prefix or --namespace the server deletes what fits all of them from L1 and
    every tier, overwrites free memory of L1, and returns a receipt. Exit status 2: something is left, or may be.
    """
    quiet_connection()
    order = _order(tenant, salts, model, namespace, conversation, prefix, wait)
    with closing(StatusSource(server_endpoint(endpoint, config), 5.0, name="clear")) as source:
        if not yes:
            status = msgspec.json.decode(source.ask(), type=Status)
            used = f"all {status.l1.objects} objects, {ByteSize(status.l1.used_bytes)},"
            places = " and of ".join(["L1", *(tier.name for tier in status.l2 if l2 or order)])
            what = f"the objects of {model!r}" if model else used
            if order is not None:
                what = "the named objects that no request uses"
            _confirm(f"Drop {what} of {places} at {status.server.endpoint}?")
        if order is not None:
            _show(source.forget(order, timeout=timeout), as_json=as_json)
            return
        cleared = source.clear(l2=l2, model=model, timeout=timeout)
    if as_json:
        print_document(msgspec.structs.asdict(cleared))
        return
    stay = f"kept {cleared.in_use} objects that are in use"
    print_text(f"L1: deleted {cleared.objects} objects, {ByteSize(cleared.nbytes)}; {stay}")
    if l2:
        print_text(f"L2: deleted {cleared.l2_objects} values, {ByteSize(cleared.l2_bytes)}")
    for name in cleared.unlisted:
        print_text(f"{name} cannot list its values, so values that L1 did not hold stay until they expire")


def _order(
    tenant: str, salts: Path | None, model: str, namespace: str, conversation: str, prefix: Path | None, wait: float
) -> Forget | None:
    """Return the order to forget, None if no option asks for one. Raises `RequestError`."""
    if not (tenant or salts or namespace or conversation or prefix):
        return None
    try:
        packed = bytes.fromhex(namespace)
    except ValueError:
        raise RequestError(
            "the namespace is not a number in hexadecimal digits",
            where="--namespace",
            available="32 hexadecimal digits",
        ) from None
    tokens = array.array("I")
    if prefix:
        try:
            tokens = array.array("I", msgspec.json.decode(read_file(prefix, "--prefix"), type=list[int]))
        except (msgspec.DecodeError, OverflowError) as error:
            raise RequestError(str(error), where="--prefix", available="a JSON array of token ids") from None
    if sys.byteorder == "big":
        tokens.byteswap()
    lines = read_file(salts, "--salts").decode(errors="replace").splitlines() if salts else []
    return Forget(tenant, tuple(filter(None, lines)), model, packed, conversation, tokens.tobytes(), wait_s=wait)


def _show(receipt: Forgotten, *, as_json: bool) -> None:
    """Print a receipt. Raises `typer.Exit` if something is left."""
    if as_json:
        print_document(msgspec.to_builtins(receipt))
    else:
        for place in receipt.places:
            left = f"{place.left} left" if place.left >= 0 else "an unknown number is left"
            why = f": {place.why}" if place.why else ""
            print_text(f"{place.place}: deleted {place.objects} objects, {ByteSize(place.nbytes)}; {left}{why}")
        print_text(f"L1: overwrote {ByteSize(receipt.erased_bytes)} of free memory with zeros")
        if receipt.reserved_bytes:
            print_text(f"L1: did not overwrite {ByteSize(receipt.reserved_bytes)} that requests are filling")
        if receipt.unknown_salts:
            print_text(
                f"values with {receipt.unknown_salts} salts stay, because their tenant is unknown: the server knows "
                "the salts of requests since its start; name a tenant's other salts with --salts"
            )
    if any(place.left for place in receipt.places):
        raise typer.Exit(2)


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
