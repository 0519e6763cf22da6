"""The process of `kvframework serve`, from its options to its end. Imports nothing of the command line."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvframework.cli.serve_options import ServeOptions
from kvframework.errors import ConfigFileError, KVFrameworkError
from kvframework.overdue import bounded

if TYPE_CHECKING:
    from kvframework.cli.signals import StopSignals
    from kvframework.config import Config
    from kvframework.keeper.sd_notify import Keeper
    from kvframework.server import Server
    from kvframework.storage.l1.journal.kept import Keeper as L1Keeper

log = logging.getLogger(__name__)

# For how long a thread that computes in Python keeps the interpreter from the serving thread, at each of its steps.
# Beside a flood of DUMPs a LOOKUP took 12 to 14 ms with Python's 5 ms and 3 ms with this, at a sixth fewer DUMPs.
_SWITCH_S = 0.0005
# Of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class _Logged(Exception):
    """The log has the error, which is the argument."""


def run_server(options: ServeOptions) -> None:
    """Serve until a signal, which ends the process. In the main thread. Raises the error that keeps it from serving;
    where the log is read as JSON it has the error, and `SystemExit` is raised."""
    # Until there is a server: its modules and the objects of an earlier one all stay, and to look through them for
    # garbage again and again is a third of what the objects cost.
    gc.disable()
    try:
        _serve(options)
    except _Logged as logged:
        from kvframework.cli.usage import EXIT_ERROR, EXIT_UNFORESEEN

        sys.exit(EXIT_ERROR if isinstance(logged.args[0], KVFrameworkError) else EXIT_UNFORESEEN)


def _serve(options: ServeOptions) -> None:
    from kvframework.cli.signals import ReloadSignal, StopRequested, StopSignals
    from kvframework.keeper.sd_notify import Keeper
    from kvframework.logs.form import configure_logging, end_logging

    # Before any other process starts.
    keeper = Keeper.from_environment()

    def read() -> Config:
        from kvframework.config import load_config

        return _with_log(load_config(options.config, options.overrides), options)

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
            with bounded(partial(_end_at_once, json_log)):
                server = _started(settings, signals, keeper, options.takeover)
            serve_reloads(server)
            with bounded(None):  # a command has a bound for its own thread, which serves from here on
                server.serve_forever(process_ends=True)
        except StopRequested:
            log.info("stopped before it served")
        except Exception as error:
            if not json_log:
                raise
            # A reader of JSON logs gets the reason as JSON.
            foreseen = isinstance(error, KVFrameworkError)
            log.critical("%s", error if foreseen else "unforeseen error", exc_info=not foreseen)
            raise _Logged(error) from None
        finally:
            end_logging()


def _with_log(config: Config, options: ServeOptions) -> Config:
    import msgspec

    chosen = {"level": options.log_level, "format": options.log_format}
    changed = {name: each.value for name, each in chosen.items() if each}
    return msgspec.structs.replace(config, log=msgspec.structs.replace(config.log, **changed))


def _end_at_once(json_log: bool, error: KVFrameworkError) -> None:
    """End the process although its main thread waits, for a plugin that does not return."""
    from kvframework.cli.usage import EXIT_ERROR
    from kvframework.logs.form import end_logging

    if json_log:
        log.critical("%s", error)
    else:
        from kvframework.cli.console import print_error

        print_error(error)
    end_logging()
    os._exit(EXIT_ERROR)


def _started(settings: Config, signals: StopSignals, keeper: Keeper | None, takeover: bool) -> Server:
    """Return a server that is bound."""
    # Imported only after signals can be handled: the import is most of the start.
    from kvframework.config import default_endpoint
    from kvframework.preflight import refusals, running_server
    from kvframework.registry import PluginRegistry
    from kvframework.server import Server
    from kvframework.storage.l1.journal.kept import ARENA, free_kept

    _raise_descriptor_limit()
    _keep_freed_memory()
    sys.setswitchinterval(_SWITCH_S)
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
    server = Server(settings, registry, holding)
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
    return server


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


def _keep_freed_memory() -> None:
    """Have glibc's malloc keep what it comes to keep by itself at most: blocks below 32 MiB are parts of a heap, of
    whose free end 64 MiB stay. ZMQ receives each object into such a block: where malloc gives that back to the kernel
    and takes it again, a fault for each page costs half as much as to receive."""
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(_M_MMAP_THRESHOLD, 32 << 20):  # either one ends the growth of both
            mallopt(_M_TRIM_THRESHOLD, 64 << 20)
