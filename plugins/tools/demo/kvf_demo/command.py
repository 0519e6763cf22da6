"""The command `kvframework demo`: its options and exit statuses."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from kvframework.api.command import examples

EXIT_INTERRUPTED = 130
SHIPPED_TEXT = Path(__file__).with_name("declaration.txt")
_QUESTION = "What do the signers mutually pledge to each other?"
_EPILOG = examples(
    "kvframework demo                    a second process skips the prefill",
    "kvframework demo --model smollm2    a trained model answers a question",
    "kvframework demo --kill             the server is killed, its L1 is kept",
    "kvframework demo --l2 disk          the server is killed, a tier has all",
)
app = typer.Typer()


@app.command("demo", epilog=_EPILOG)
def demo(
    text: Annotated[
        Path,
        typer.Option(help="The prompt: a UTF-8 text. Default: the Declaration of Independence.", show_default=False),
    ] = SHIPPED_TEXT,
    question: Annotated[
        str | None,
        typer.Option(help="A question about the text. Default: one about the default text, if the model is trained."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="random|smollm2|DIR|FILE.gguf",
            help="A Llama with random weights, a trained model from its package, or a local transformers model.",
        ),
    ] = "random",
    kill: Annotated[
        bool,
        typer.Option(
            "--kill",
            help="Kill the server between the two engines; `kvframework hold` keeps L1 and restarts the server.",
        ),
    ] = False,
    l2: Annotated[
        str,
        typer.Option(
            "--l2",
            metavar="disk|NAME",
            help="Attach a tier, a temporary folder or the plugin NAME, and kill and restart the server between the "
            "two engines.",
        ),
    ] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="With --l2 NAME: set an option of the tier; repeatable."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Cut the text to this number of tokens; 0: the whole text.")] = 0,
    new_tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to generate.")] = 32,
    l1_capacity: Annotated[str, typer.Option(help="Memory of the server's cache.")] = "1GiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    size: Annotated[str, typer.Option(hidden=True)] = "full",
    corrupt_kv: Annotated[bool, typer.Option("--corrupt-kv", hidden=True)] = False,
) -> None:
    """Show how a model skips its prefill, because another process has stored the KV.

    Exit status 1: the tokens differ from those of a run without a cache, or nothing was hit. 2: an error.
    """
    import msgspec

    from kvf_demo.stage import DemoOptions, run_demo
    from kvf_demo.view import DemoView
    from kvframework.api.console import stderr, stdout

    options = DemoOptions(
        text=text,
        question=_question(text, model) if question is None else question,
        model=model,
        l2=l2,
        settings=settings or [],
        held=kill,
        capacity=l1_capacity,
        tokens=tokens,
        new_tokens=new_tokens,
        size=size,
        corrupt_kv=corrupt_kv,
    )
    view = DemoView(stderr if as_json else stdout)
    if question and model == "random":
        stderr.print("note: a model with random weights gives no useful answer; --model smollm2 does", style="dim")
    # SIGTERM raises KeyboardInterrupt, so that a terminated demo ends its processes.
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


def _question(text: Path, model: str) -> str:
    """Return what is asked if no question was given: random weights have no answer, and other texts others."""
    return _QUESTION if text == SHIPPED_TEXT and model != "random" else ""
