"""The process of `kvframework serve`, from its options to its end. Imports nothing of the command line."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import secrets
import select
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvframework.bounded_calls import bounded
from kvframework.errors import ArenaError, ConfigFileError, DeadlineExceeded, EndpointError, ServerGone

if TYPE_CHECKING:
    from kvframework.cli.signals import ServerSignals
    from kvframework.client import KVClient
    from kvframework.config.schema import Config
    from kvframework.keeper.sd_notify import Keeper
    from kvframework.preflight import RunningServer
    from kvframework.server import Server
    from kvframework.storage.recovery import Keeper as L1Keeper
    from kvframework.wire.messages import ConfigApplied

log = logging.getLogger(__name__)

# How long a computing thread may keep the interpreter from the serving thread at each step.
# Beside a flood of DUMPs a LOOKUP took 12 to 14 ms with Python's 5 ms and 3 ms with this, at a sixth fewer DUMPs.
_SWITCH_S = 0.0005
# Parameters of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The part of the available memory that L1 gets where nobody says how much, and the least that is worth a server.
L1_SHARE, LEAST_L1 = 0.25, 64 << 20
_LOG = {"--log-level": ("debug", "info", "warning", "error"), "--log-format": ("human", "json")}


class ServeOptions(NamedTuple):
    """What `kvframework.cli.serve` documents. `log` has the keys of `[log]` that the command line sets."""

    config: Path | None
    overrides: Sequence[str]
    log: Mapping[str, str]
    takeover: bool


def plain_options(arguments: Sequence[str]) -> ServeOptions | None:
    """Return the options of a command line that is `serve` with options in their usual form; None for any other, wrong
    ones and --help included. The whole command line takes a tenth of a second to import."""
    if arguments[:1] != ["serve"]:
        return None
    config, takeover = None, False
    overrides: list[str] = []
    log: dict[str, str] = {}
    words = iter(arguments[1:])
    for word in words:
        if word == "--takeover":
            takeover = True
            continue
        name, equals, value = word.partition("=")
        if not equals:
            value = next(words, "")
        if not value or value.startswith("-"):
            return None
        if name == "--config":
            config = Path(value)
        elif name == "--set":
            overrides.append(value)
        elif value in _LOG.get(name, ()):
            log[name.removeprefix("--log-")] = value
        else:
            return None
    return ServeOptions(config, overrides, log, takeover)


def run_server(options: ServeOptions) -> None:
    """Serve until a signal, which ends the process. In the main thread. Raises the error that keeps it from serving."""
    from kvframework.cli.signals import ServerSignals, StopRequested
    from kvframework.keeper.sd_notify import Keeper
    from kvframework.logs.process_log import configure_logging, end_logging

    # Until there is a server: its modules and the objects of an earlier one all stay, and to look through them for
    # garbage again and again is a third of what the objects cost.
    gc.disable()
    # Before any other process starts.
    keeper = Keeper.from_environment()

    def read() -> Config:
        from msgspec.structs import replace

        from kvframework.config.load import load_config

        config = load_config(options.config, options.overrides)
        return replace(config, log=replace(config.log, **options.log))

    def reload() -> ConfigApplied:
        if Path(settings.source).is_fifo():  # it would wait for a writer, and with it each later SIGHUP
            raise ConfigFileError("a pipe cannot be read twice", where=settings.source, hint="use a file")
        return server.running.apply(read())

    with ServerSignals() as signals:
        try:
            settings = read()
            configure_logging(settings.log.level, settings.log.format)
            running = None
            if options.takeover:
                from kvframework.preflight import running_server
                from kvframework.storage.recovery import ARENA

                running = running_server(settings, 0.0 if keeper and keeper.has(ARENA) else RESTART_S)
            if (sized := with_capacity(options, keeper, running)) is not options:
                options = sized
                settings = read()
            server = _started(settings, signals, keeper, running)
            signals.reload_by(reload)
            with bounded(None):  # a command has a bound for its own thread, which serves from here on
                server.serve_forever(process_ends=True)
            if keeper is not None and server.drain.by_itself:
                keeper.stopping()
        except StopRequested:
            log.info("the server was stopped before it was ready")
        finally:
            end_logging()


def with_capacity(options: ServeOptions, keeper: Keeper | None, running: RunningServer | None = None) -> ServeOptions:
    """Return the options with a capacity of L1, which is logged, where no file and no override names one: that of the
    L1 to go on with, else a share of the memory that is available. Raises `ArenaError` where that is too little."""
    from kvframework.api.memory import available_memory
    from kvframework.api.plugin import ByteSize
    from kvframework.config.load import CONFIG_VARIABLE
    from kvframework.storage.recovery import ARENA

    named = {each.partition("=")[0].strip() for each in options.overrides}
    if options.config is not None or os.environ.get(CONFIG_VARIABLE) or named & {"l1.use", "l1.capacity"}:
        return options
    capacity = running.capacity if running else keeper.nbytes(ARENA) if keeper else 0
    why = "the size of the kept L1"
    if not capacity:
        available = available_memory()
        capacity = int(available * L1_SHARE) >> 21 << 21
        why = f"{L1_SHARE:.0%} of the {ByteSize(available)} of available memory"
    if capacity < LEAST_L1:
        fact, hint = (
            f"L1 would get {ByteSize(capacity)}: {why}",
            "free memory, or set the size: --set l1.capacity=32MiB",
        )
        raise ArenaError(fact, where="[l1] capacity", available=f"{ByteSize(LEAST_L1)} or more", hint=hint)
    log.info("L1 has %s: %s; set [l1] capacity for another size", ByteSize(capacity), why)
    return options._replace(overrides=(*options.overrides, f"l1.capacity={capacity}"))


def _started(settings: Config, signals: ServerSignals, keeper: Keeper | None, running: RunningServer | None) -> Server:
    """Return a server that is bound, in the place of the `running` one."""
    # Imported only after signals can be handled: the import is most of the start.
    from kvframework.cli.signals import DEADLINE_S
    from kvframework.config.endpoint import default_endpoint
    from kvframework.preflight import check_room, refusals
    from kvframework.registry.registry import PluginRegistry
    from kvframework.server import Server
    from kvframework.storage.recovery import ARENA, free_recoverable

    _raise_descriptor_limit()
    _keep_freed_memory()
    sys.setswitchinterval(_SWITCH_S)
    registry = PluginRegistry()
    kept = keeper is not None and keeper.has(ARENA)
    for refusal in refusals(settings, registry, replaces=running.pid if running else None, kept=kept):
        raise refusal
    if running is not None:
        check_room(settings, registry, running)
    holding: L1Keeper | None = keeper
    if keeper is not None and settings.l1.keys.keep == "off":
        free_recoverable(keeper)  # what an earlier configuration gave it
        holding = None
    if running is not None:
        holding = take_over(settings.server.endpoint or default_endpoint(), holding)
    server = Server(settings, registry, holding)
    gc.freeze()
    gc.enable()
    drain_s = settings.server.drain_s

    def end(since: float) -> None:
        if keeper is not None and drain_s:
            keeper.extend(drain_s + DEADLINE_S)
        server.end(since)

    signals.serve(end, server.abandon, DEADLINE_S + drain_s)
    try:
        server.bind()
    except BaseException:
        server.close()
        raise
    if keeper is not None:
        try:
            keeper.ready()
        except OSError as error:
            log.warning("the server could not tell the keeper that it is ready: %s", error)
    return server


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


# Longer than a keeper takes to start a killed server again.
RESTART_S = 5.0
_HANDED = 2
_ANSWER_S = 10.0
_STEP_S = 0.005


class HandedOver:
    """A keeper of what the earlier server handed over (`kvframework.service.operator_requests`), which `keeper`, if
    any, holds already. `lock` has the arena's lock: until `kept` no other server, as of the old pod, can take it."""

    def __init__(self, found: dict[str, int], lock: int, keeper: L1Keeper | None) -> None:
        self.lasts = keeper is not None
        self.store: Callable[[str, int], None] = keeper.store if keeper else lambda _name, _fd: None
        self.remove: Callable[[str], None] = keeper.remove if keeper else lambda _name: None
        self._found, self._lock = found, lock

    def kept(self, names: Collection[str]) -> dict[str, int]:
        os.close(self._lock)
        return {name: self._found.pop(name) for name in names if name in self._found}


def take_over(endpoint: str, keeper: L1Keeper | None) -> HandedOver:
    """Have this user's server at `endpoint` hand over L1 and end: it may run in another container, of which this one
    sees the directory of the endpoint alone. Blocks for some seconds. Raises `ArenaError` if it does not end, and its
    refusal: nothing has changed then."""
    from kvframework.client import KVClient
    from kvframework.storage.recovery import ARENA, own_arena

    # Its own, beside another that takes over: no longer than the name of any endpoint's socket with its suffix.
    path = f"{os.path.dirname(endpoint.removeprefix('ipc://'))}/{secrets.token_hex(3)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with KVClient(endpoint, name="takeover") as client, contextlib.closing(listener):
        if not client.wait_up(_ANSWER_S):
            client.raise_down()
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        try:
            listener.listen(1)
            found = _handed_over(client, path, listener, keeper)
        finally:
            os.unlink(path)
    # The kernel releases the lock of the old server at its end, in any container.
    handed = HandedOver(found, own_arena(found[ARENA]), keeper)
    log.info("took over from the server at %s", endpoint)
    return handed


def _handed_over(client: KVClient, path: str, listener: socket.socket, keeper: L1Keeper | None) -> dict[str, int]:
    """Return what the server hands over, by name; from then on `keeper` holds it. Raises if the server goes on."""
    from kvframework.keeper.sd_notify import held_since
    from kvframework.storage.l1.journal import PREFIX, Cold, check_schema
    from kvframework.wire import messages as m

    answer = client.begin("HAND_OVER", m.HandOver(path, confirms=True, since=held_since()), m.Empty, waits=False)
    while not select.select([listener], [], [], _STEP_S)[0]:
        if answer.query():
            answer.result()
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(_ANSWER_S)
        _, descriptors, _, _ = socket.recv_fds(connection, 64, _HANDED)
        try:
            if len(descriptors) != _HANDED:
                raise Cold("incomplete", f"{len(descriptors)} of {_HANDED} descriptors")
            check_schema(os.pread(descriptors[1], PREFIX.size, 0))
        except Cold as cold:
            raise EndpointError(
                f"the running server has an L1 that this release cannot use: {cold.detail}",
                where=client.endpoint,
                hint="stop the running server first: the next server then begins with an empty L1",
            ) from None
        found = _stored(descriptors, keeper)
        with contextlib.suppress(OSError):  # it has ended; or a release before 0.3, which does not wait for this
            connection.send(b"1")
        with contextlib.suppress(ServerGone, DeadlineExceeded):  # it has ended: what it sent before counts
            answer.result(_ANSWER_S)
    return found


def _stored(descriptors: Sequence[int], keeper: L1Keeper | None) -> dict[str, int]:
    """Return arena and journal as descriptions of this process, as the lock of the earlier server lasts as long as its
    own, and have `keeper` hold those that it has not. Closes `descriptors`."""
    from kvframework.storage.l1.journal import own_description
    from kvframework.storage.recovery import ARENA, JOURNAL

    held, found = {} if keeper is None else keeper.kept((ARENA, JOURNAL)), {}
    for name, fd in zip((ARENA, JOURNAL), descriptors, strict=True):
        found[name] = own_description(fd)
        if keeper is not None and name not in held:
            keeper.store(name, found[name])
    for fd in (*held.values(), *descriptors):
        os.close(fd)
    return found
