"""`kvframework serve`: one server in the foreground, until SIGINT or SIGTERM."""

from __future__ import annotations

import contextlib
import enum
import gc
import logging
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvframework.cli.usage import EXIT_ERROR, EXIT_UNFORESEEN, ConfigFile, Overrides, examples
from kvframework.errors import ConfigFileError, KVFrameworkError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvframework.cli.shutdown import StopSignals
    from kvframework.config import Config
    from kvframework.keeper.notify import Keeper
    from kvframework.server import Server
    from kvframework.storage.l1.journal.kept import Keeper as L1Keeper

log = logging.getLogger(__name__)

_EPILOG = examples(
    "kvframework serve",
    "kvframework serve --config kvf.toml --log-format json",
    "kvframework serve --set l1.capacity=8GiB",
    "kvframework serve --set l2.0.use=redis --set l2.0.url=redis://cache:6379",
)


class Level(str, enum.Enum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class Format(str, enum.Enum):
    human = "human"
    json = "json"


def register(app: typer.Typer) -> None:
    app.command("serve", epilog=_EPILOG)(serve)


def serve(
    config: ConfigFile = None,
    overrides: Overrides = None,
    log_level: Annotated[Level | None, typer.Option(help="Instead of [log] level.")] = None,
    log_format: Annotated[Format | None, typer.Option(help="Instead of [log] format.")] = None,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Take the place and L1 of the server that runs at the endpoint.")
    ] = False,
) -> None:
    """Run the server of this node in the foreground.

    SIGINT (Ctrl-C) or SIGTERM ends it within 5 seconds and with exit status 0: requests in flight finish or fail, and
    objects on their way to L2 have the rest of that time. A second signal ends it at once. SIGHUP makes it read its
    configuration again, see `kvframework config apply`; SIGUSR1 writes the stacks of its threads to standard error.

    With `--takeover` it checks all that can be checked, has the running server drain and hand over what it holds in L1,
    and goes on in its place; engines connect again by themselves.
    """
    from kvframework.cli.reload import ReloadSignal
    from kvframework.cli.shutdown import StopRequested, StopSignals
    from kvframework.keeper.notify import Keeper
    from kvframework.logs.form import configure_logging, end_logging

    # Before any other process starts.
    keeper = Keeper.from_environment()

    def read() -> Config:
        from kvframework.config import load_config

        return _with_log(load_config(config, overrides or ()), log_level, log_format)

    def read_again() -> Config:
        if Path(settings.source).is_fifo():  # it would wait for a writer, and with it each later SIGHUP
            raise ConfigFileError("a pipe cannot be read again", where=settings.source, hint="write a file")
        return read()

    def serve_reloads(server: Server) -> None:
        reloads.serve(lambda: server.running.apply(read_again()))

    with StopSignals() as signals, ReloadSignal() as reloads:
        json_log = False
        try:
            settings = read()
            json_log = settings.log.format == "json"
            configure_logging(settings.log.level, settings.log.format)
            _run(settings, signals, serve_reloads, keeper, takeover)
        except StopRequested:
            log.info("stopped before it served")
        except Exception as error:
            if not json_log:
                raise
            # A reader of JSON logs gets the reason as JSON.
            foreseen = isinstance(error, KVFrameworkError)
            log.critical("%s", error if foreseen else "unforeseen error", exc_info=not foreseen)
            raise typer.Exit(EXIT_ERROR if foreseen else EXIT_UNFORESEEN) from None
        finally:
            end_logging()


def _with_log(config: Config, level: Level | None, form: Format | None) -> Config:
    import msgspec

    chosen = {"level": level.value if level else None, "format": form.value if form else None}
    changed = {name: value for name, value in chosen.items() if value}
    return msgspec.structs.replace(config, log=msgspec.structs.replace(config.log, **changed))


def _run(
    settings: Config, signals: StopSignals, bound: Callable[[Server], None], keeper: Keeper | None, takeover: bool
) -> None:
    # Imported only after signals can be handled: the import is most of the start.
    from kvframework.config import default_endpoint
    from kvframework.preflight import refusals, running_server
    from kvframework.registry import PluginRegistry
    from kvframework.server import Server
    from kvframework.storage.l1.journal.kept import ARENA, free_kept

    _raise_descriptor_limit()
    registry = PluginRegistry()
    running = running_server(settings) if takeover else None
    kept = keeper is not None and keeper.has(ARENA)
    for refusal in refusals(settings, registry, replaces=running.pid if running else None, kept=kept):
        raise refusal
    holding: L1Keeper | None = keeper
    if keeper is not None and settings.l1.keep == "off":
        free_kept(keeper)  # what an earlier configuration gave it
        holding = None
    if running is not None:
        from kvframework.cli.takeover import take_over

        holding = take_over(settings.server.endpoint or default_endpoint(), running.pid, holding)
    # Objects of an earlier server are many, and all stay: to look through them for garbage is a third of their cost.
    gc.disable()
    try:
        server = Server(settings, registry, holding)
    finally:
        gc.freeze()
        gc.enable()
    signals.serve(server.stop, server.abandon)
    try:
        server.bind()
    except BaseException:
        server.close()
        raise
    if keeper is not None:
        _say_ready(keeper)
    bound(server)
    server.serve_forever(process_ends=True)


def _say_ready(keeper: Keeper) -> None:
    try:
        keeper.ready()
    except OSError as error:
        log.warning("the keeper does not hear that this server is ready: %s", error)


def _raise_descriptor_limit() -> None:
    """Raise the soft limit, which is often 1024: ZMQ ends the process when it runs out of descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
