"""Owns the options that the demos share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[Path | None, typer.Option(help="A local transformers model with tokenizer. Default: a random Llama.")]
L2 = Annotated[
    str,
    typer.Option(
        "--l2",
        metavar="redis|disk|NAME",
        help="Put a Redis, a temporary folder or the tier plugin NAME behind the server, and kill and restart it "
        "in between.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="With --l2 NAME: an option of the tier; repeatable."),
]
RedisUrl = Annotated[str, typer.Option(help="With --l2 redis: use this one instead of starting one.")]
L1Capacity = Annotated[str, typer.Option(help="Memory of the server's cache.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Size = Annotated[str, typer.Option(hidden=True)]
