"""What an engine's KV goes to when its own cache is full: nowhere, vLLM's own offload, LMCache's server, ours, alone or
with a tier behind an L1 that is too small. `ideal` is an engine whose own cache is never full: no external cache can
be faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from kvframework_bench.errors import BenchUnavailable
from kvframework_bench.l2.redis_server import running_redis
from kvframework_bench.l2.tier import redis_settings
from kvframework_bench.lmcache_server import prepare, running_lmcache
from kvframework_bench.process import BenchChild
from kvframework_bench.server import running_server
from kvframework_bench.serving.engines import transfer

NONE, OWN, PEER, OURS = "no offload", "vLLM's own", "LMCache", "kvframework"
IDEAL, OFFLOADING = "ideal", "kvframework, offloading"
_CONNECTOR, _OFFLOADING = "KvFrameworkConnector", "KvFrameworkOffloading"
# An L1 of a sixteenth of the usual capacity holds a third of the usual load's KV.
_SMALLER = 16
# Yields the server's settings for a tier, which is there as long as the context.
Tier = Callable[[Path], AbstractContextManager[list[str]]]


class Offload(NamedTuple):
    """vLLM's options for it, and the server behind them, if there is one."""

    options: list[str]
    server: BenchChild | None = None


class Contender(NamedTuple):
    """`open(directory, capacity)` yields it ready, with `capacity` bytes for KV. One that is not `needed` is left out
    where it does not run."""

    name: str
    open: Callable[[Path, int], AbstractContextManager[Offload]]
    needed: bool


@contextmanager
def _none(_directory: Path, _capacity: int) -> Iterator[Offload]:
    yield Offload([])


@contextmanager
def _ideal(_directory: Path, capacity: int) -> Iterator[Offload]:
    # The last one of an option counts.
    yield Offload(["--kv-cache-memory-bytes", str(capacity)])


@contextmanager
def _own(_directory: Path, capacity: int) -> Iterator[Offload]:
    yield Offload(["--kv-offloading-backend", "native", "--kv-offloading-size", str(capacity / (1 << 30))])


@contextmanager
def _lmcache(directory: Path, capacity: int) -> Iterator[Offload]:
    prepare()
    with running_lmcache(directory, shared=True, l1_gb=capacity / (1 << 30)) as server:
        host, _, port = server.endpoint.rpartition(":")
        where = {"lmcache.mp.host": host, "lmcache.mp.port": int(port)}
        yield Offload(transfer("LMCacheMPConnector", where), server.child)


def _ours(connector: str, tier: Tier) -> Callable[[Path, int], AbstractContextManager[Offload]]:
    """Return what opens a server of ours. With a tier L1 has a `_SMALLER`th of the capacity."""

    @contextmanager
    def opened(directory: Path, capacity: int) -> Iterator[Offload]:
        with (
            tier(directory) as settings,
            running_server(directory, capacity // _SMALLER if settings else capacity, settings) as server,
        ):
            yield Offload(transfer(connector, {"kvframework.endpoint": server.endpoint}), server.child)

    return opened


@contextmanager
def _no_tier(_directory: Path) -> Iterator[list[str]]:
    yield []


@contextmanager
def _disk(directory: Path) -> Iterator[list[str]]:
    yield ["l2.0.use=filesystem", f"l2.0.path={directory / 'values'}"]


@contextmanager
def _redis(directory: Path) -> Iterator[list[str]]:
    with running_redis(directory) as redis:
        yield redis_settings(redis.url)


CONTENDERS = (
    Contender(NONE, _none, needed=True),
    Contender(IDEAL, _ideal, needed=True),
    Contender(OWN, _own, needed=False),
    Contender(PEER, _lmcache, needed=False),
    Contender(OURS, _ours(_CONNECTOR, _no_tier), needed=True),
)
# Those that run only if they are asked for.
MORE = (
    Contender(OFFLOADING, _ours(_OFFLOADING, _no_tier), needed=True),
    *(
        Contender(f"{name}, {tier}", _ours(connector, opened), needed=True)
        for name, connector in ((OURS, _CONNECTOR), (OFFLOADING, _OFFLOADING))
        for tier, opened in (("disk", _disk), ("Redis", _redis))
    ),
)


def chosen(names: Sequence[str]) -> Sequence[Contender]:
    """Return the contenders of these names, and the one without offload, to which all are compared; without names the
    usual ones. Raises `BenchUnavailable` for a name that is none."""
    if not names:
        return CONTENDERS
    known = {each.name: each for each in (*CONTENDERS, *MORE)}
    if unknown := [name for name in names if name not in known]:
        raise BenchUnavailable(f"unknown contender {unknown[0]!r}", where="--contender", available=", ".join(known))
    return [known[name] for name in dict.fromkeys((NONE, *names))]
