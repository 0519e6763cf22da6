"""`kvframework new`: the folder of a new plugin, and the next steps for its author."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from kvframework.api.command import examples

# Those of `kvframework.registry.discovery.KINDS`, whose import would slow every help text.
KINDS = ("transport", "layout", "memory", "tier", "eviction", "hasher", "codec", "requests", "listener")
_EPILOG = examples(
    "kvframework new tier mystore                  into ./kvf-mystore",
    "kvframework new eviction slru --path ~/slru",
    "kvframework new tier mystore --helper         in a separate process",
    "kvframework new transport mydev --driver      of an accelerator",
    "kvframework new transport mydev --async       of one whose memory stays in the engine",
)


app = typer.Typer()


def _complete(incomplete: str) -> list[str]:
    return [kind for kind in KINDS if kind.startswith(incomplete)]


@app.command("new", epilog=_EPILOG)
def new(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(KINDS)}.", autocompletion=_complete)],
    name: Annotated[str, typer.Argument(metavar="NAME", help='The name of the plugin in a TOML file: use = "NAME".')],
    helper: Annotated[
        bool, typer.Option("--helper", help="A tier in a helper process, which is killed when it freezes.")
    ] = False,
    driver: Annotated[
        bool, typer.Option("--driver", help="A transport of an accelerator, whose memory the server copies.")
    ] = False,
    asynchronous: Annotated[
        bool, typer.Option("--async", help="A transport of an accelerator that copies while the engine computes.")
    ] = False,
    path: Annotated[Path | None, typer.Option("--path", help="The folder to make. Default: ./kvf-NAME.")] = None,
) -> None:
    """Write a new plugin: a distribution that works as it is, with tests, as a start for an author."""
    from rich.text import Text

    from kvf_dev.scaffold import choose_names, kits_requirement, render, write_distribution
    from kvframework.api.console import stdout

    names = choose_names(kind, name, *["helper"] * helper, *["driver"] * driver, *["async"] * asynchronous)
    folder = path if path is not None else Path(names.distribution)
    files = render(names)
    write_distribution(folder, files)
    stdout.print(Text(f"{folder}: {len(files)} files of a working plugin. Next:"))
    for command in (
        f"cd {shlex.quote(str(folder))} && pip install -e . {kits_requirement(names)}",
        "pytest",
        f"kvframework plugins check {names.title}",
    ):
        stdout.print(Text(f"  {command}"))
