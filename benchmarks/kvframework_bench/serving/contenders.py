"""What an engine's KV goes to when its own cache is full: nowhere, vLLM's own offload, LMCache's server, ours. `ideal`
is an engine whose own cache is never full: no external cache can be faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from kvframework_bench.errors import BenchUnavailable
from kvframework_bench.lmcache_server import prepare, running_lmcache
from kvframework_bench.process import BenchChild
from kvframework_bench.server import running_server
from kvframework_bench.serving.engines import transfer

NONE, OWN, PEER, OURS = "no offload", "vLLM's own", "LMCache", "kvframework"
IDEAL, OFFLOADING = "ideal", "kvframework, offloading"


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


@contextmanager
def _kvframework(directory: Path, capacity: int) -> Iterator[Offload]:
    with running_server(directory, capacity) as server:
        yield Offload(transfer("KvFrameworkConnector", {"kvframework.endpoint": server.endpoint}), server.child)


@contextmanager
def _offloading(directory: Path, capacity: int) -> Iterator[Offload]:
    with running_server(directory, capacity) as server:
        yield Offload(transfer("KvFrameworkOffloading", {"kvframework.endpoint": server.endpoint}), server.child)


CONTENDERS = (
    Contender(NONE, _none, needed=True),
    Contender(IDEAL, _ideal, needed=True),
    Contender(OWN, _own, needed=False),
    Contender(PEER, _lmcache, needed=False),
    Contender(OURS, _kvframework, needed=True),
)
# Those that run only if they are asked for.
MORE = (Contender(OFFLOADING, _offloading, needed=True),)


def chosen(names: Sequence[str]) -> Sequence[Contender]:
    """Return the contenders of these names, and the one without offload, to which all are compared; without names the
    usual ones. Raises `BenchUnavailable` for a name that is none."""
    if not names:
        return CONTENDERS
    known = {each.name: each for each in (*CONTENDERS, *MORE)}
    if unknown := [name for name in names if name not in known]:
        raise BenchUnavailable(f"no contender {unknown[0]!r}", where="--contender", available=", ".join(known))
    return [known[name] for name in dict.fromkeys((NONE, *names))]
