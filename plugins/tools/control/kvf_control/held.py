"""`kvframework prefetch` and `kvframework pin`: one order, carried out by the command's own process."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from kvframework.api.command import AsJson, Endpoint, EndpointConfig, examples, read_file
from kvframework.api.console import print_document, print_text
from kvframework.errors import RequestError

if TYPE_CHECKING:
    from kvf_control.orders import Directive

T = TypeVar("T")
prefetch_app, pin_app = typer.Typer(), typer.Typer()

Prefix = Annotated[
    Path, typer.Argument(metavar="FILE", help="The prompt, a JSON array of token ids ('-': standard input).")
]
Salt = Annotated[Path | None, typer.Option(metavar="FILE", help="File of the requests' cache_salt, on one line.")]
Model = Annotated[str, typer.Option(help="Only for this model, as the engine names it.")]
Namespace = Annotated[str, typer.Option(metavar="HEX", help="Only for this namespace, 32 hexadecimal digits.")]


@prefetch_app.command("prefetch", epilog=examples("kvframework prefetch tokens.json --model Qwen/Qwen3-8B"))
def prefetch(
    prefix: Prefix,
    salt: Salt = None,
    model: Model = "",
    namespace: Namespace = "",
    wait: Annotated[float, typer.Option(min=0, max=3600, help="Seconds to wait for the load.")] = 60.0,
    endpoint: Endpoint = None,
    config: EndpointConfig = None,
    as_json: AsJson = False,
) -> None:
    """Load the KV of a prompt from the tiers into L1, before its request.

    The load lets those of requests go first. Exit status 1: it had not ended in time.
    """
    from kvf_control.holder import Holder
    from kvf_control.orders import Prefetch
    from kvframework.client import quiet_connection, server_endpoint

    order = _order(Prefetch, prefix, salt, model, namespace)
    quiet_connection()
    with closing(Holder(server_endpoint(endpoint, config))) as holder:
        told = holder.prefetch(order)
        told = holder.wait(told.id, wait) or told
    _show(told, as_json=as_json)
    if told.state != "done":
        raise typer.Exit(1)


@pin_app.command("pin", epilog=examples("kvframework pin tokens.json --seconds 3600"))
def pin(
    prefix: Prefix,
    seconds: Annotated[float, typer.Option(min=0.1, max=604800, help="How long L1 keeps the KV.")],
    salt: Salt = None,
    model: Model = "",
    namespace: Namespace = "",
    endpoint: Endpoint = None,
    config: EndpointConfig = None,
    as_json: AsJson = False,
) -> None:
    """Keep the KV of a prompt in L1 for a while, after loading what only tiers have.

    The pin ends with this process; it outlasts the server. A quarter of L1 at most is pinned so.
    """
    from kvf_control.holder import Holder
    from kvf_control.orders import Pin
    from kvframework.client import quiet_connection, server_endpoint

    order = _order(Pin, prefix, salt, model, namespace, seconds=seconds)
    quiet_connection()
    with closing(Holder(server_endpoint(endpoint, config))) as holder:
        began = time.monotonic()
        told = holder.pin(order)
        _show(holder.wait(told.id, seconds) or told, as_json=as_json)
        sys.stdout.flush()
        try:
            time.sleep(max(began + seconds - time.monotonic(), 0.0))
        except KeyboardInterrupt:
            print_text("ended")


def _order(kind: type[T], prefix: Path, salt: Path | None, model: str, namespace: str, **more: float) -> T:
    """Return the order that the options name. Raises `RequestError`."""
    import msgspec

    lines = read_file(salt, "--salt").decode(errors="replace").splitlines() if salt else []
    try:
        tokens = msgspec.json.decode(read_file(prefix, "FILE"))
        fields = {"tokens": tokens, "salt": (lines or [""])[0], "model": model, "namespace": namespace, **more}
        return msgspec.convert(fields, kind)
    except msgspec.MsgspecError as error:
        raise RequestError(str(error), where="the order", available="a JSON array of token ids") from None


def _show(told: Directive, *, as_json: bool) -> None:
    import msgspec

    if as_json:
        print_document(msgspec.to_builtins(told))
        return
    print_text(f"{told.do}: {told.l1_tokens} of {told.asked_tokens} tokens are in L1, {told.state}")
