"""`kvframework dump`: one file for a bug report, without secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvframework.api.command import Endpoint, examples
from kvframework.cli.usage import CONFIG_HELP, Overrides

_EPILOG = examples(
    "kvframework dump",
    "kvframework dump --config kvf.toml --out report.tar.gz",
)


def register(app: typer.Typer) -> None:
    app.command("dump", epilog=_EPILOG)(dump)


def dump(
    out: Annotated[
        Path | None, typer.Option(help="The file to write; without it kvframework-dump-TIME.tar.gz, here.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help=CONFIG_HELP)] = None,
    overrides: Overrides = None,
    endpoint: Endpoint = None,
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to wait for the server.")] = 10.0,
) -> None:
    """Write what a bug report needs into one file: of the server, and of this machine.

    That is the server's status, its configuration, its last log lines, the stacks of its threads and its last requests;
    versions; and the checks of `kvframework doctor`. Secrets, salts, keys, digests and the names of models are left
    out or replaced. Of a server that does not answer the file has the rest, and says what is missing. Run it as the
    server's user on its node.
    """
    from kvframework.cli.bundle import BundleFile, collect, default_name
    from kvframework.cli.console import print_text

    with BundleFile(out or Path(default_name())) as file:
        contents = collect(config, overrides or (), endpoint, timeout_s=timeout)
        file.write(contents.files)
    for reason in dict.fromkeys(contents.missing.values()):
        print_text(f"{', '.join(part for part, why in contents.missing.items() if why == reason)}: {reason}")
    print_text(f"{file.place}: read it before you send it")
