"""Owns the command `kvframework demo`: its options and its exit status."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvframework.cli.console import stderr, stdout

_EXIT_INTERRUPTED = 130
_SHIPPED_TEXT = Path(__file__).with_name("declaration.txt")


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    text: Annotated[
        Path, typer.Option(help="The prompt: a UTF-8 text. Default: the Declaration of Independence.")
    ] = _SHIPPED_TEXT,
    model: Annotated[
        Path | None, typer.Option(help="A local transformers model with tokenizer. Default: a random Llama.")
    ] = None,
    l2: Annotated[
        str,
        typer.Option(
            "--l2",
            metavar="redis|disk|NAME",
            help="Put a Redis, a temporary folder or the tier plugin NAME behind the server, and kill and restart it "
            "in between.",
        ),
    ] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="With --l2 NAME: an option of the tier; repeatable."),
    ] = None,
    redis_url: Annotated[str, typer.Option(help="With --l2 redis: use this one instead of starting one.")] = "",
    tokens: Annotated[int, typer.Option(min=0, help="Cut the prompt to so many tokens; 0: all of it.")] = 0,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 32,
    l1_capacity: Annotated[str, typer.Option(help="Memory of the server's cache.")] = "1GiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    size: Annotated[str, typer.Option(hidden=True)] = "full",
    corrupt_kv: Annotated[bool, typer.Option("--corrupt-kv", hidden=True)] = False,
) -> None:
    """See a real model skip its prefill, because another process already paid for it.

    Exit status 1: the tokens differ from those of a run without a cache, or nothing was hit. 2: an error.
    """
    # A server starts by way of this module too, and has no use for spinners.
    from kvframework.cli.demo_run import DemoOptions, run_demo
    from kvframework.cli.demo_view import DemoView

    options = DemoOptions(
        text=text,
        model=model,
        l2=l2,
        settings=settings or [],
        redis_url=redis_url,
        tokens=tokens,
        new_tokens=new_tokens,
        capacity=l1_capacity,
        size=size,
        corrupt_kv=corrupt_kv,
    )
    view = DemoView(stderr if as_json else stdout)
    # A terminated demo leaves no processes behind either.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = run_demo(options, view)
    except KeyboardInterrupt:
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    if as_json:
        stdout.print(msgspec.json.encode(result.document()).decode(), markup=False)
    else:
        view.show(result)
    raise typer.Exit(result.exit_status)
