"""`kvframework serve`: one server in the foreground, until SIGINT or SIGTERM. `kvframework hold`: starts it again after
its end, and keeps its memory until then."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from kvframework.api.command import EXIT_FOUND, AsJson, ConfigFile, Endpoint, EndpointConfig, Overrides, examples
from kvframework.api.console import print_document, print_text, stderr
from kvframework.api.plugin import ByteSize
from kvframework.cli.serving import ServeOptions, run_server
from kvframework.client.status_source import server_endpoint
from kvframework.config.endpoint import (
    check_private_directory,
    keeper_path,
    prepare_private_directory,
    trusted_server_uid,
)
from kvframework.config.load import load_config
from kvframework.config.schema import LogFormat, LogLevel
from kvframework.errors import EndpointError
from kvframework.keeper.sockets import CONTROL_SUFFIX, ask
from kvframework.keeper.supervisor import PATHS, become_supervisor
from kvframework.text import short_number

serve_app, hold_app = typer.Typer(), typer.Typer()


@serve_app.command(
    "serve",
    epilog=examples(
        "kvframework serve                          L1 gets 25 % of the available memory",
        "kvframework serve --config kvf.toml --log-format json",
        "kvframework serve --set l1.capacity=8GiB",
        "kvframework serve --set l2.0.use=redis --set l2.0.url=redis://cache:6379",
    ),
)
def serve(
    config: ConfigFile = None,
    overrides: Overrides = None,
    log_level: Annotated[LogLevel | None, typer.Option(help="The log level, instead of that in [log].")] = None,
    log_format: Annotated[LogFormat | None, typer.Option(help="The log format, instead of that in [log].")] = None,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Replace the server that runs at the endpoint, and take over its memory.")
    ] = False,
) -> None:
    """Run the server of this node in the foreground.

    SIGINT (Ctrl-C) or SIGTERM ends it within 5 seconds and with exit status 0: requests in flight finish or fail, and
    objects on their way to L2 have the rest of that time. A second signal ends it at once. SIGHUP makes it read its
    configuration again, see `kvframework config apply`; SIGUSR1 writes the stacks of its threads to standard error.

    With `--takeover` it checks all that can be checked, has the running server drain and hand over what it holds in L1,
    and goes on in its place; engines connect again by themselves."""
    log = {name: value for name, value in (("level", log_level), ("format", log_format)) if value}
    run_server(ServeOptions(config, overrides or (), log, takeover))


@hold_app.command(
    "hold",
    epilog=examples(
        "kvframework hold                         L1 gets 25 % of the available memory",
        "kvframework hold -- --config kvf.toml    with options of `kvframework serve`",
        "kvframework hold --status                the kept memory and its server",
        "kvframework hold --reload                the installed version takes over",
        "kvframework hold --drop --restart        free the kept memory, start cold",
    ),
)
def hold(
    context: typer.Context,
    serve: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTIONS OF SERVE]", help="The options of `kvframework serve`.")
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="Show the memory that the running keeper holds.")] = False,
    reload: Annotated[
        bool, typer.Option("--reload", help="Make the keeper start a new server that replaces the running one.")
    ] = False,
    drop: Annotated[bool, typer.Option("--drop", help="Make the keeper free the memory that it holds.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="With --drop: stop the server that uses the memory, and start it empty.")
    ] = False,
    endpoint: Endpoint = None,
    config: EndpointConfig = None,
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to wait for the keeper.")] = 300.0,
    as_json: AsJson = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", hidden=True)] = None,
) -> None:
    """Run the server in a child process, and keep L1 when that process ends.

    A server that ends, also by `kill -9`, starts again at once and has its objects again. SIGINT or SIGTERM ends both,
    and what is kept. SIGHUP and SIGUSR1 pass on to the server. Exit status 2: another one holds the endpoint, or the
    server refuses to start.

    --status, --reload and --drop ask the keeper that runs at the endpoint; their exit status is 1 if it refuses."""
    asked = [name for name, chosen in (("status", status), ("reload", reload), ("drop", drop)) if chosen]
    if len(asked) > 1 or (restart and not drop):
        raise typer.BadParameter("give only one of --status, --reload and --drop; --restart needs --drop")
    if not asked:
        if endpoint or config or as_json or overrides:
            raise typer.BadParameter("write the server's options after `--`: kvframework hold -- --config kvf.toml")
        _become(context, serve or [])
    if serve or overrides:
        raise typer.BadParameter("--status, --reload and --drop take no options of the server")
    _ask({"do": asked[0], "restart": restart}, keeper_path(server_endpoint(endpoint, config)), timeout, as_json)


def _become(context: typer.Context, serve: list[str]) -> NoReturn:
    assert context.parent is not None
    commands: Any = context.parent.command
    # Wrong options are refused before there is anything to keep.
    chosen = commands.get_command(context.parent, "serve").make_context("serve", [*serve], parent=context.parent).params
    # Earlier releases of typer leave them strings.
    settings = load_config(chosen["config"] and Path(chosen["config"]), chosen["overrides"] or ())
    form = chosen["log_format"] or settings.log.format
    base = keeper_path(settings.server.endpoint)
    prepare_private_directory(Path(base).parent, shared=bool(settings.server.admit_uids))
    program = PATHS + "from kvframework.cli.main import main; main()"
    try:
        become_supervisor([sys.executable, "-c", program, "serve", *serve], base, form, os.environ)
    except OSError as error:
        raise EndpointError(f"the keeper cannot be started: {error.strerror}", where=sys.executable) from error


def _ask(request: dict[str, object], base: str, timeout: float, as_json: bool) -> None:
    try:
        check_private_directory(Path(base).parent, owner=trusted_server_uid())
        reply = ask(base + CONTROL_SUFFIX, request, timeout)
    except (FileNotFoundError, ConnectionRefusedError):
        raise EndpointError(
            "no `kvframework hold` runs here",
            where=base,
            hint="start a keeper, or set --endpoint; for systemd: systemctl show kvframework -p NFileDescriptorStore",
        ) from None
    except PermissionError:
        raise EndpointError("the keeper answers only its own user and root", where=base) from None
    except TimeoutError:
        raise EndpointError(
            f"the keeper does not answer within {short_number(timeout)} s",
            where=base,
            hint="the keeper may still execute the request: see `kvframework hold --status`",
        ) from None
    except OSError as error:
        raise EndpointError(f"the keeper does not answer: {error.strerror or error}", where=base) from error
    if as_json:
        print_document(reply)
    elif "held" in reply:
        _print_status(reply)
    elif reply["done"]:
        print_text(reply["text"])
    else:
        stderr.print(reply["text"], markup=False)
    if not reply["done"]:
        raise typer.Exit(EXIT_FOUND)


def _print_status(status: dict[str, Any]) -> None:
    """Print the keeper's reply: the server, its starts, and a line for each thing that is kept."""
    server = status["server"]
    if server is not None:
        form = "ready" if server["ready"] else "not ready yet"
        text = f"server: process {server['pid']}, {form}, since {short_number(server['since_s'])} s"
    elif status["next_start_s"] is not None:
        text = f"server: none, the next start is in {short_number(status['next_start_s'])} s"
    else:
        text = "server: none"
    print_text(text)
    print_text(f"starts: {status['starts']}{'; ' + status['last_end'] if status['last_end'] else ''}")
    for row in status["held"]:
        print_text(f"kept: {row['name']}, {ByteSize(row['size'])}, {ByteSize(row['bytes'])} of memory")
    if not status["held"]:
        print_text("kept: nothing")
    print_text(f"keeper: process {status['pid']}")
