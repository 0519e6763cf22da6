"""The server's side of the tier: a helper tier, the client that its process makes, and the checks of `doctor`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from kvf_mooncake import MooncakeOptions, place
from kvf_mooncake.tier import SEAL_BYTES, MooncakeTier, in_words
from kvframework.api.helper_tier import HelperTier
from kvframework.api.installing import install_command
from kvframework.api.plugin import Finding, TableContext
from kvframework.api.tier import Outcome, PackedKey
from kvframework.errors import TierError

# Bytes in which the client keeps what it copies itself. The tier reads and writes where the values lie.
_LOCAL_BYTES = 16 << 20
_CONNECT_S = 1.0
_SYSTEM = "libibverbs1 librdmacm1 libnuma1 liburing2 (Debian's names)"
_MODESTY = 15
# Unless the operator has said otherwise: errors alone to standard error; and over TCP fewer system calls than one for
# 64 KiB, and one connection to a peer, which stays, instead of four at a time, for each value another: a fifth faster.
_ENVIRONMENT = {
    "GLOG_minloglevel": "2",
    "MC_LOG_LEVEL": "ERROR",
    "MC_STORE_CLIENT_METRIC": "0",
    "MC_TCP_SLICE_SIZE": str(1 << 20),
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_LANES_PER_PEER": "1",
}


def make_tier(options: MooncakeOptions, where: str) -> MooncakeTier:
    """Connect to the master. Raises `TierError`; may block, and hold the interpreter, for a minute and a half."""
    own_address = reach_master(options, where, time.monotonic() + _CONNECT_S)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    store = library(where)
    client = store.MooncakeDistributedStore()
    code = client.setup(
        options.host or own_address,
        options.metadata_server,
        0,  # no segment of its own: this process may be killed at any time
        _LOCAL_BYTES,
        options.protocol,
        options.devices,
        options.master,
    )
    if code:
        raise TierError(
            f"Mooncake's client could not start: {in_words(code)}",
            where=where,
            hint="see its lines on standard error, and compare metadata_server and protocol with the peers",
        )
    # Of this thread, and of those that it starts from now on, which make the calls. They wait by asking without a
    # pause: that takes a processor, which Mooncake's own threads, that move the bytes, may need.
    os.nice(_MODESTY)
    replication = store.ReplicateConfig()
    replication.replica_num = options.replicas
    return MooncakeTier(client, replication, prefix=options.prefix, where=where)


def reach_master(options: MooncakeOptions, where: str, deadline: float) -> str:
    """Return this node's address towards the master. Raises `TierError` where nothing listens: Mooncake itself would
    ask again for a minute and a half, and hold the interpreter."""
    try:
        with socket.create_connection(place(options.master), max(deadline - time.monotonic(), 0.01)) as sock:
            return str(sock.getsockname()[0])
    except OSError as error:
        raise TierError(
            f"no mooncake_master answers at {options.master}: {error.strerror or error}",
            where=where,
            hint="start mooncake_master, or correct master",
        ) from error


def library(where: str) -> ModuleType:
    """Mooncake's client, imported. Raises `TierError` where it, or a library of the system, is missing."""
    try:
        return import_module("mooncake.store")
    except ImportError as error:
        hint = f"install {_SYSTEM}" if find_spec("mooncake") else missing()
        raise TierError(f"Mooncake's client cannot be imported: {error}", where=where, hint=hint) from error


def missing() -> str:
    """What to install."""
    return f"{install_command(distribution='kvframework-mooncake')}, and install {_SYSTEM}"


# Seconds for imports, and for a setup that gets an answer; without one it would take a minute and a half.
_START_S = 10.0


class MooncakeHelperTier(HelperTier):
    """Mooncake's client in a helper process. The client and what it imports are in that process alone."""

    def __init__(self, options: MooncakeOptions, *, where: str) -> None:
        super().__init__(make_tier, options, name="mooncake", where=where, start_s=_START_S)

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        return super().get_into(keys, [[*each, _room()] for each in parts], deadline=deadline)

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        return super().put(keys, [[*each, _room()] for each in parts], deadline=deadline)


def _room() -> memoryview:
    return memoryview(bytearray(SEAL_BYTES))


def diagnose(options: MooncakeOptions, context: TableContext, deadline: float) -> list[Finding]:
    """Ask nothing of the master: a client that joins would be one of the store's."""
    try:
        library(context.where)
    except TierError as error:
        return [Finding("mooncake.client", "fail", error.fact, error.hint)]
    try:
        own_address = reach_master(options, context.where, deadline)
    except TierError as error:
        advice = f"{error.hint}: until then the server runs without this tier"
        return [Finding("mooncake.master", "fail", error.fact, advice)]
    fact = f"{options.master} answers, and peers know this node as {options.host or own_address}"
    if not options.host and own_address.startswith("127."):
        advice = "set host if peers run on other machines"
        return [
            Finding("mooncake.master", "ok", fact),
            Finding("mooncake.host", "warn", "the address of this node is a loopback address", advice),
        ]
    return [Finding("mooncake.master", "ok", fact)]
