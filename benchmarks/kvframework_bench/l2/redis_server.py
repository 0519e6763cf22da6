"""The Redis under measurement: a redis-server of the benchmark's own on a Unix socket, with nothing on disk."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvf_demo.processes import uninterrupted
from kvframework_bench.errors import BenchUnavailable
from kvframework_bench.l2.redis_binary import INSTALL_HINT, redis_binary, redis_command
from kvframework_bench.process import BenchChild

_START_S = 30.0
_POLL_S = 0.005


class RedisChild(BenchChild):
    """A running Redis; `running_redis` starts it."""

    def __init__(self, binary: Path, directory: Path) -> None:
        self.binary = binary
        self.socket = directory / "redis.sock"
        self.url = f"unix://{self.socket}"
        super().__init__("redis", redis_command(binary, self.socket), directory)

    def stop(self) -> None:
        """Kill it at once: there is nothing to save, and a stalled process reacts to no other signal."""
        self.kill()

    def stall(self) -> None:
        """Stop the process: connections stay, but get no answer."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End a stall. Does nothing to a process that has ended."""
        self._process.send_signal(signal.SIGCONT)

    def await_ready(self) -> None:
        """Wait until it accepts connections. Raises `BenchFailed`."""
        deadline = time.monotonic() + _START_S
        while not self._accepts():
            self.check_alive()
            if time.monotonic() > deadline:
                raise self.failure(f"does not accept connections within {_START_S:.0f} s")
            time.sleep(_POLL_S)

    def _accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0


@contextmanager
def running_redis(directory: Path) -> Iterator[RedisChild]:
    """Yield a new Redis with its socket and log in `directory`, which ends with the context. Raises `BenchUnavailable`
    without a redis-server, and `BenchFailed`."""
    binary = redis_binary()
    if binary is None:
        raise BenchUnavailable("redis-server is not installed", hint=INSTALL_HINT)
    with ExitStack() as stack:
        with uninterrupted():
            redis = stack.enter_context(RedisChild(binary, directory))
        redis.await_ready()
        yield redis
