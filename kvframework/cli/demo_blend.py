"""Owns the command `kvframework demo blend`: its options and its exit status."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvframework.cli.console import examples, stderr, stdout
from kvframework.cli.demo_options import L2, AsJson, L1Capacity, Model, RedisUrl, Settings, Size

EXIT_INTERRUPTED = 130
SHIPPED_TEXT = Path(__file__).with_name("declaration.txt")
_QUESTION = "What do we mutually pledge to each other?"


def register(app: typer.Typer) -> None:
    app.command(
        "blend",
        epilog=examples(
            "kvframework demo blend                    a random Llama, nothing is downloaded",
            "kvframework demo blend --l2 redis         the server is killed in between",
            "kvframework demo blend --model DIR --share 0.2",
        ),
    )(blend)


def blend(
    text: Annotated[
        Path,
        typer.Option(
            help="A UTF-8 text, whose quarters are the documents. Default: the Declaration of Independence.",
            show_default=False,
        ),
    ] = SHIPPED_TEXT,
    question: Annotated[str, typer.Option(help="What is asked over the four of them.")] = _QUESTION,
    model: Model = None,
    share: Annotated[float, typer.Option(min=0.0, max=1.0, help="How much of the documents is computed again.")] = 0.15,
    l2: L2 = "",
    settings: Settings = None,
    redis_url: RedisUrl = "",
    tokens: Annotated[int, typer.Option(min=0, help="Cut each document to so many tokens; 0: all of it.")] = 1024,
    l1_capacity: L1Capacity = "1GiB",
    as_json: AsJson = False,
    size: Size = "full",
) -> None:
    """See a question answered over four documents whose KV was computed in another order, by another process.

    Exit status 1: not all documents were hit, or blending is not far nearer to the full computation than the stored KV
    as it is. 2: an error.
    """
    # A server starts by way of this module too, and has no use for spinners.
    from kvframework.cli.demo_blend_run import BlendDemoOptions, run_blend_demo
    from kvframework.cli.demo_blend_view import show_blend
    from kvframework.cli.demo_stage import StageOptions
    from kvframework.cli.demo_view import DemoView

    console = stderr if as_json else stdout
    stage = StageOptions(l2=l2, settings=settings or [], redis_url=redis_url, capacity=l1_capacity, requests="blend")
    options = BlendDemoOptions(text, question, model, stage, tokens, share, size)
    # A terminated demo leaves no processes behind either.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = run_blend_demo(options, DemoView(console))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        stdout.print(msgspec.json.encode(result.document()).decode(), markup=False)
    else:
        show_blend(result, console)
    raise typer.Exit(result.exit_status)
