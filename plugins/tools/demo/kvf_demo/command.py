"""The commands `kvframework demo` and `kvframework demo blend`: their options and exit statuses."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer

from kvframework.api.command import QuickGroup, examples

if TYPE_CHECKING:
    from kvf_demo.result import BlendResult, DemoResult

R = TypeVar("R", "BlendResult", "DemoResult")
EXIT_INTERRUPTED = 130
SHIPPED_TEXT = Path(__file__).with_name("declaration.txt")
_QUESTION = "What do the signers mutually pledge to each other?"


Model = Annotated[
    str,
    typer.Option(
        metavar="random|smollm2|DIR|FILE.gguf",
        help="A Llama with random weights, a trained model from its package, or a local transformers model.",
    ),
]
L2 = Annotated[
    str,
    typer.Option(
        "--l2",
        metavar="redis|s3|disk|NAME",
        help="Put a Redis, an S3 store (SeaweedFS), a temporary folder or the tier plugin NAME behind the server, and "
        "kill and restart it in between.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="With --l2 NAME: an option of the tier; repeatable.",
    ),
]
Kill = Annotated[
    bool,
    typer.Option(
        "--kill",
        help="Kill the server in between, without a tier: `kvframework hold` keeps L1 and starts it again.",
    ),
]
RedisUrl = Annotated[str, typer.Option(help="With --l2 redis: use this one instead of starting one.")]
L1Capacity = Annotated[str, typer.Option(help="Memory of the server's cache.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Size = Annotated[str, typer.Option(hidden=True)]

app = typer.Typer(
    cls=QuickGroup,
    invoke_without_command=True,
    epilog=examples(
        "kvframework demo                    a second process skips the prefill",
        "kvframework demo --model smollm2    a trained model answers a question",
        "kvframework demo --kill             the server is killed, its L1 is kept",
        "kvframework demo --l2 redis         the server is killed, a tier has all",
        "kvframework demo blend              documents in another order",
    ),
)


@app.callback()
def demo(
    context: typer.Context,
    text: Annotated[
        Path,
        typer.Option(help="The prompt: a UTF-8 text. Default: the Declaration of Independence.", show_default=False),
    ] = SHIPPED_TEXT,
    question: Annotated[
        str | None,
        typer.Option(
            help="A question about the text. Default: one about the shipped text, if the model is no random one."
        ),
    ] = None,
    model: Model = "random",
    kill: Kill = False,
    l2: L2 = "",
    settings: Settings = None,
    redis_url: RedisUrl = "",
    tokens: Annotated[int, typer.Option(min=0, help="Cut the text to so many tokens; 0: all of it.")] = 0,
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
    from kvf_demo.prefix import DemoOptions, run_demo
    from kvf_demo.stage import StageOptions
    from kvf_demo.view import DemoView
    from kvframework.api.console import stderr, stdout

    options = DemoOptions(
        text=text,
        question=_question(text, model) if question is None else question,
        model=model,
        stage=StageOptions(l2=l2, settings=settings or [], redis_url=redis_url, capacity=l1_capacity, held=kill),
        tokens=tokens,
        new_tokens=new_tokens,
        size=size,
        corrupt_kv=corrupt_kv,
    )
    view = DemoView(stderr if as_json else stdout)
    if question and model == "random":
        stderr.print("note: random weights have tokens and no answer: --model smollm2 has one", style="dim")
    _run(lambda: run_demo(options, view), view.show, as_json=as_json)


@app.command(
    "blend",
    epilog=examples(
        "kvframework demo blend              a random Llama, nothing is downloaded",
        "kvframework demo blend --l2 redis   the server is killed in between",
        "kvframework demo blend --model smollm2 --share 0.2",
    ),
)
def blend(
    text: Annotated[
        Path,
        typer.Option(
            help="A UTF-8 text, whose quarters are the documents. Default: the Declaration of Independence.",
            show_default=False,
        ),
    ] = SHIPPED_TEXT,
    question: Annotated[str, typer.Option(help="The question about the four documents.")] = _QUESTION,
    model: Model = "random",
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
    from kvf_demo.blend import BlendDemoOptions, run_blend_demo
    from kvf_demo.stage import StageOptions
    from kvf_demo.view import DemoView, show_blend
    from kvframework.api.console import stderr, stdout

    console = stderr if as_json else stdout
    stage = StageOptions(l2=l2, settings=settings or [], redis_url=redis_url, capacity=l1_capacity, requests="blend")
    options = BlendDemoOptions(text, question, model, stage, tokens, share, size)
    _run(
        lambda: run_blend_demo(options, DemoView(console)), lambda result: show_blend(result, console), as_json=as_json
    )


def _run(demo: Callable[[], R], show: Callable[[R], None], *, as_json: bool) -> NoReturn:
    """Run a demo, print its result, and end with its exit status."""
    import msgspec

    from kvframework.api.console import stdout

    # SIGTERM raises KeyboardInterrupt, so that a terminated demo ends its processes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = demo()
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        stdout.print(msgspec.json.encode(result.document()).decode(), markup=False)
    else:
        show(result)
    raise typer.Exit(result.exit_status)


def _question(text: Path, model: str) -> str:
    """Return what is asked if no question was given: random weights have no answer, and other texts others."""
    return _QUESTION if text == SHIPPED_TEXT and model != "random" else ""


def _refuse_options(context: typer.Context) -> None:
    """Refuse options before the name of another demo, where they would have no effect."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        # By name: from some release on, typer contains its own copy of click.
        if source is not None and source.name == "COMMANDLINE":
            where = f"give it behind {context.invoked_subcommand!r}"
            raise typer.BadParameter(where, ctx=context, param_hint=f"'{option.opts[0]}'")
