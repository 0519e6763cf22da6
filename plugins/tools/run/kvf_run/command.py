"""`kvframework run`: an engine's command behind it runs with the cache."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer

from kvf_run.engine import connected, environment, examined
from kvf_run.foreground import become, end_like, has_terminal, stay_in_front
from kvf_run.node_server import Wanted, ensure_server
from kvf_run.stats import read_stats, summary
from kvframework.api.command import Overrides, examples
from kvframework.api.plugin import ByteSize
from kvframework.client import server_endpoint
from kvframework.errors import ConfigFieldError, KVFrameworkError

app = typer.Typer()


@app.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        "kvframework run -- vllm serve MODEL",
        "kvframework run --l1 32GiB -- python -m sglang.launch_server --model-path MODEL",
        "kvframework run -- python script.py        a script with transformers or vllm.LLM",
        "kvframework run --l1 8GiB                  the server alone",
        "kvframework stop                           stop the server that `run` started",
    ),
)
def run(
    engine: Annotated[list[str] | None, typer.Argument(metavar="[-- ENGINE ...]", help="The engine's command.")] = None,
    l1: Annotated[
        str | None, typer.Option(help="Memory for the cache (L1), such as 8GiB. Default: 25 % of available memory.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file for a server that the command starts.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="The server's endpoint. Default: $KVFRAMEWORK_ENDPOINT, else this user's.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Run an engine with the cache: connect it to the server of this user, which is started if there is none.

    The server outlives the engine, so that the next one finds what this one has stored. It ends after 30 minutes
    without an engine. Options that connect vLLM or SGLang are added to the command; signals, standard streams and the
    exit code are the engine's own. Without a server the engine runs as well, and computes.
    """
    chosen = server_endpoint(endpoint, config)
    command = engine or []
    # Before a server is started: a contradiction is an error.
    asked = connected(command, examined(command), chosen) if command else None
    try:
        capacity = ByteSize.parse(l1) if l1 is not None else None
    except ValueError as error:
        raise ConfigFieldError(str(error), where="--l1", hint="write 8GiB") from None
    try:
        found = ensure_server(Wanted(chosen, capacity, config, overrides or ()))
    except KVFrameworkError as error:
        if asked is None:
            raise
        _say(f"no server is available, so the engine runs without the cache: {error}")
    else:
        for note in found.notes:
            _say(note)
        if found.started and os.getpid() == 1:
            _say("this command is the container's first process, so the server ends with it")
    if asked is None:
        return
    for note in asked.notes:
        _say(note)
    environ = environment(chosen)
    if not has_terminal():
        become(asked.command, environ)
    code = stay_in_front(asked.command, environ)
    with contextlib.suppress(KVFrameworkError):
        for line in summary(read_stats(chosen)):
            _say(line)
    end_like(code)


def _say(text: str) -> None:
    typer.echo(f"kvframework: {' '.join(text.split())}", err=True)
