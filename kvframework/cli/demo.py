"""Owns the command `kvframework demo`: its options and its exit status. `kvframework demo blend` is a command of its
own, see `kvframework.cli.demo_blend`.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvframework.cli import demo_blend
from kvframework.cli.console import examples, stderr, stdout
from kvframework.cli.demo_blend import EXIT_INTERRUPTED, SHIPPED_TEXT
from kvframework.cli.demo_options import L2, AsJson, L1Capacity, Model, RedisUrl, Settings, Size

_app = typer.Typer(
    invoke_without_command=True,
    epilog=examples(
        "kvframework demo                          a second process skips the prefill",
        "kvframework demo --l2 redis               the server is killed in between",
        "kvframework demo blend                    documents in another order than they were computed in",
    ),
)


def register(app: typer.Typer) -> None:
    demo_blend.register(_app)
    app.add_typer(_app, name="demo")


@_app.callback()
def demo(
    context: typer.Context,
    text: Annotated[
        Path,
        typer.Option(help="The prompt: a UTF-8 text. Default: the Declaration of Independence.", show_default=False),
    ] = SHIPPED_TEXT,
    model: Model = None,
    l2: L2 = "",
    settings: Settings = None,
    redis_url: RedisUrl = "",
    tokens: Annotated[int, typer.Option(min=0, help="Cut the prompt to so many tokens; 0: all of it.")] = 0,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 32,
    l1_capacity: L1Capacity = "1GiB",
    as_json: AsJson = False,
    size: Size = "full",
    corrupt_kv: Annotated[bool, typer.Option("--corrupt-kv", hidden=True)] = False,
) -> None:
    """See a real model skip its prefill, because another process already paid for it.

    Exit status 1: the tokens differ from those of a run without a cache, or nothing was hit. 2: an error.
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    # A server starts by way of this module too, and has no use for spinners.
    from kvframework.cli.demo_run import DemoOptions, run_demo
    from kvframework.cli.demo_stage import StageOptions
    from kvframework.cli.demo_view import DemoView

    options = DemoOptions(
        text=text,
        model=model,
        stage=StageOptions(l2=l2, settings=settings or [], redis_url=redis_url, capacity=l1_capacity),
        tokens=tokens,
        new_tokens=new_tokens,
        size=size,
        corrupt_kv=corrupt_kv,
    )
    view = DemoView(stderr if as_json else stdout)
    # A terminated demo leaves no processes behind either.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = run_demo(options, view)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        stdout.print(msgspec.json.encode(result.document()).decode(), markup=False)
    else:
        view.show(result)
    raise typer.Exit(result.exit_status)


def _refuse_options(context: typer.Context) -> None:
    """Options before the name of another demo would do nothing."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        # By name: typer brings click with it from some release on.
        if source is not None and source.name == "COMMANDLINE":
            where = f"give it behind {context.invoked_subcommand!r}"
            raise typer.BadParameter(where, ctx=context, param_hint=f"'{option.opts[0]}'")
