"""What keeps a server from starting, found before it starts: `serve`, `config check` and `doctor` ask this one place.

Each refusal is the error that the start itself would raise, from the same functions. Nothing is created, locked or
changed, so the start may still fail: another process may take the port in between."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvframework.api.endpoint import parse_endpoint, try_bind
from kvframework.api.installing import install_command
from kvframework.api.memory import MemoryProvider, available_memory
from kvframework.api.plugin import ByteSize
from kvframework.api.tier import TierProvider
from kvframework.config.endpoint import default_endpoint, keeper_path
from kvframework.config.schema import Config
from kvframework.config.tenants import bytes_of_tenants
from kvframework.errors import ArenaError, ConfigFieldError, EndpointError, KVFrameworkError, PluginUnavailable
from kvframework.messaging.curve import ServerKeys
from kvframework.messaging.server.sockets import EndpointFiles
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import check_table, codec_tables, named_tables, resolve_table, server_terms
from kvframework.wire import messages as m

_ANSWER_S, _STEP_S = 1.0, 0.1


def refusals(
    config: Config, registry: PluginRegistry, *, replaces: int | None = None, kept: bool = False
) -> Iterator[KVFrameworkError]:
    """Yield every error with which a server of this configuration would refuse to start: of all tables together, then
    of each, so that a second server of one file is refused for its endpoint and not for its folder. What process
    `replaces` holds, this user's server at the endpoint, does not count: see `running_server`; nor does the
    memory of an earlier one that its keeper holds, if `kept`. Blocking: imports plugins."""
    yield from common_refusals(config, registry, running=replaces is not None)
    for table, descriptor in named_tables(config):
        try:
            provider, options = resolve_table(registry, table, descriptor)
            check_table(registry, table, provider, options, server=server_terms(config), replaces=replaces, kept=kept)
        except KVFrameworkError as error:
            yield error


def common_refusals(config: Config, registry: PluginRegistry, *, running: bool = False) -> Iterator[KVFrameworkError]:
    """Yield the refusals that are not of one table: of the endpoint, ports, stores and keys."""
    checks: list[Callable[[], object]] = [] if running else [lambda: _check_endpoint(config)]
    checks += [
        lambda: _check_ports(config, running=running),
        lambda: codec_tables(config),
        lambda: _check_stores(config, registry),
        lambda: _check_keys(config),
        lambda: _check_tenants(config, registry),
    ]
    for check in checks:
        try:
            check()
        except KVFrameworkError as error:
            yield error
    if config.observe is None:
        return
    where = f"{config.source}: [observe]"
    try:
        settings = import_module("kvf_observe.settings")  # of a distribution that few servers have
    except ModuleNotFoundError as error:
        if error.name != "kvf_observe":
            raise
        hint = install_command(distribution="kvframework-observe")
        yield PluginUnavailable("[observe] needs kvframework-observe, which is not installed", where=where, hint=hint)
    else:
        yield from settings.refusals(config.observe, where, running=running)


class RunningServer(NamedTuple):
    """This user's own server at the endpoint of a configuration, the source of its own configuration, and the bytes of
    its L1: what it holds is free once it has ended, so it keeps only a second one from starting."""

    pid: int
    source: str
    capacity: int

    def __str__(self) -> str:
        return (
            f"a server (process {self.pid}, configuration {self.source}) runs there; this configuration takes effect "
            "after that server ends"
        )


def running_server(config: Config, patience_s: float = 0.0) -> RunningServer | None:
    """Ask for the server of this user that answers at the local endpoint. A killed one leaves its socket: its keeper,
    perhaps in another container, has `patience_s` to start it again. Blocks for a second more at most."""
    endpoint = config.server.endpoint or default_endpoint()
    if not endpoint.startswith("ipc://"):
        return None
    until = time.monotonic() + patience_s
    while (found := _answering(endpoint)) is None:
        if time.monotonic() >= until or not os.path.exists(endpoint.removeprefix("ipc://")):
            break
        time.sleep(_STEP_S)
    return found


def _answering(endpoint: str) -> RunningServer | None:
    from kvframework.client import KVClient  # a server that starts needs no client

    try:
        if os.stat(endpoint.removeprefix("ipc://")).st_uid != os.geteuid():
            return None
        with KVClient(endpoint, name="preflight", connect_timeout_s=_ANSWER_S) as client:
            _ = client.hello
            reply = client.request("REPORT_STATUS", m.Empty(), m.StatusReply, timeout=_ANSWER_S)
        status = msgspec.json.decode(reply.document)
        return RunningServer(status["server"]["pid"], status["server"]["config"], status["l1"]["capacity_bytes"])
    except (KVFrameworkError, OSError, KeyError):
        return None


def check_room(config: Config, registry: PluginRegistry, running: RunningServer) -> None:
    """Raise `ArenaError` for an L1 larger than the running server's by more than the available memory."""
    _, options = resolve_table(registry, config.l1.memory, MemoryProvider)
    capacity, available = getattr(options, "capacity", 0), available_memory()
    if capacity - running.capacity > available:
        fact = f"L1 would grow from {ByteSize(running.capacity)} to {ByteSize(capacity)}"
        raise ArenaError(fact, where=config.l1.memory.where, available=f"{ByteSize(available)} more at most")


def keeper_status(endpoint: str) -> dict[str, Any] | None:
    """Ask the `kvframework hold` of an endpoint what it keeps; None where none runs. Blocks for a second at most."""
    from kvframework.keeper.sockets import CONTROL_SUFFIX, ask

    try:
        reply = ask(keeper_path(endpoint) + CONTROL_SUFFIX, {"do": "status"}, _ANSWER_S)
        return reply if isinstance(reply["held"], list) else None
    except (KVFrameworkError, OSError, ValueError, LookupError, TypeError):
        return None


def arena_is_kept(config: Config) -> bool:
    """Whether `kvframework hold` keeps L1 for the next server. Blocks for a second at most."""
    from kvframework.storage.recovery import ARENA

    keeper = keeper_status(config.server.endpoint)
    return keeper is not None and any(row["name"] == ARENA for row in keeper["held"])


def _check_stores(config: Config, registry: PluginRegistry) -> None:
    first: dict[tuple[str, str], str] = {}
    for table in (l2.tier for l2 in config.l2):
        try:
            provider, options = resolve_table(registry, table, TierProvider)
        except KVFrameworkError:
            continue  # refused as a table already
        store = provider.store(options) if provider.store is not None else None
        if store is not None and first.setdefault((table.use, store), table.where) != table.where:
            fact = f"{store} is already the store of {first[table.use, store].rpartition(': ')[2]}"
            raise ConfigFieldError(fact, where=table.where, hint="set another store, or leave out one of the tables")


def _check_keys(config: Config) -> None:
    keys = config.server.curve
    if keys is not None:
        ServerKeys.load(Path(keys.secret_key), Path(keys.clients))


def _check_tenants(config: Config, registry: PluginRegistry) -> None:
    """Check shares in bytes, if the options of the memory have its capacity."""
    if not config.tenants:
        return
    try:
        _, options = resolve_table(registry, config.l1.memory, MemoryProvider)
    except KVFrameworkError:
        return  # refused as a table already
    capacity = getattr(options, "capacity", None)
    if isinstance(capacity, int):
        bytes_of_tenants(config.tenants, capacity)


def _check_endpoint(config: Config) -> None:
    endpoint = config.server.endpoint or default_endpoint()
    if parse_endpoint(endpoint).kind == "ipc":
        EndpointFiles(endpoint, shared=bool(config.server.admit_uids)).check()


def _check_ports(config: Config, *, running: bool) -> None:
    addresses = [text for text in (config.server.endpoint, config.server.tcp) if text.startswith("tcp://")]
    if len(set(addresses)) < len(addresses):
        raise EndpointError("endpoint and tcp are the same", where=config.server.tcp, hint="leave out one of the two")
    any_host = {"*", *(name for _, name in socket.if_nameindex())}
    for address in addresses:
        parsed = parse_endpoint(address)
        try:
            try_bind(None if parsed.host in any_host else parsed.host, parsed.port)
        except OSError as error:
            if running and error.errno == errno.EADDRINUSE:
                continue  # it may be that of the running server
            hint = "use an address of this machine and a free port"
            if isinstance(error, PermissionError):
                hint = "use a port above 1023: lower ports need CAP_NET_BIND_SERVICE"
            raise EndpointError(f"cannot listen: {error.strerror or error}", where=address, hint=hint) from None
