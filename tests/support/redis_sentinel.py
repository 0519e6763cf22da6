"""A real Redis with a replica and three sentinels on loopback, for tests."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import redis
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer, redis_executable
from tests.support.store_process import StoreProcess
from tests.support.waiting import wait_until

MASTER = "kvf-master"
_PATIENCE_S = 60.0
# Long, so that a slow machine does not look like a dead one; see `fail_over_soon`.
_DOWN_MS = 60_000


class Sentinel(StoreProcess):
    """One sentinel process."""

    def __init__(self, directory: Path, number: int, password: str) -> None:
        super().__init__(directory)
        self.name = f"sentinel-{number + 1:x}"
        self.identity = f"{number + 1:x}" * 40
        self.port = free_port()
        self.password = password
        self._config = directory / f"{self.name}.conf"

    def command(self) -> list[str]:
        return [redis_executable(), str(self._config), "--sentinel"]

    def introduce(self, servers: list[RedisServer], sentinels: list[Sentinel]) -> None:
        """Introduce all sentinels to each other, which would otherwise take seconds, before they are launched."""
        master, replica = servers
        lines = [f"port {self.port}", "bind 127.0.0.1", f"dir {self.directory}", f"sentinel myid {self.identity}"]
        lines += [f"sentinel monitor {MASTER} 127.0.0.1 {master.port} 2"]
        lines += [f"sentinel down-after-milliseconds {MASTER} {_DOWN_MS}", f"sentinel failover-timeout {MASTER} 3000"]
        if master.password:
            lines += [f"sentinel auth-pass {MASTER} {master.password}"]
        if self.password:
            lines += [f"requirepass {self.password}", f"sentinel sentinel-pass {self.password}"]
        lines += [f"sentinel known-replica {MASTER} 127.0.0.1 {replica.port}"]
        for other in sentinels:
            if other is not self:
                lines += [f"sentinel known-sentinel {MASTER} 127.0.0.1 {other.port} {other.identity}"]
        self._config.write_text("\n".join(lines) + "\n")

    def on(self, *words: str | int) -> object:
        with redis.Redis(port=self.port, password=self.password or None) as client:
            return client.execute_command(*words)

    def knows_all(self) -> bool:
        """True once it is in contact with the master, its replica and the other sentinels."""
        try:
            found = self.on("SENTINEL", "CKQUORUM", MASTER)
            told = self.on("SENTINEL", "REPLICAS", MASTER)
        except (redis.ConnectionError, redis.ResponseError):
            return False
        return "3 usable" in str(found) and "ok" in str(told)


class RedisWithSentinels:
    """A context manager. `master` and `replica` are the servers in these roles now."""

    def __init__(self, directory: Path, *, password: str = "", sentinel_password: str = "") -> None:
        self.servers = []
        for name in ("one", "two"):
            (directory / name).mkdir()
            options = ["--repl-diskless-sync-delay", "0"]
            self.servers.append(RedisServer(directory / name, password=password, options=options))
        self.sentinels = [Sentinel(directory, number, sentinel_password) for number in range(3)]

    @property
    def master(self) -> RedisServer:
        (found,) = [each for each in self.servers if each.running and _role(each)[0] == b"master"]
        return found

    @property
    def replica(self) -> RedisServer:
        return next(each for each in self.servers if each is not self.master)

    def __enter__(self) -> RedisWithSentinels:
        with ExitStack() as stack:
            for each in (*self.servers, *self.sentinels):
                stack.callback(each.kill9)
            for server in self.servers:
                server.start()
            with self.servers[1].client() as client:
                client.replicaof("127.0.0.1", self.servers[0].port)
            self.await_replica(self.servers[1])
            for sentinel in self.sentinels:
                sentinel.introduce(self.servers, self.sentinels)
                sentinel.launch()
            self.await_sentinels()
            stack.pop_all()
        return self

    def __exit__(self, *_exc: object) -> None:
        for each in (*self.sentinels, *self.servers):
            each.kill9()

    def await_sentinels(self) -> None:
        wait_until(lambda: all(each.knows_all() for each in self.sentinels), _PATIENCE_S, "sentinels in contact")

    def await_replica(self, server: RedisServer) -> None:
        """Wait until the server follows the master."""

        def follows() -> bool:
            role = _role(server)
            return role[0] == b"slave" and role[3] == b"connected"

        wait_until(follows, _PATIENCE_S, "a replica in step")

    def await_promotion(self, server: RedisServer) -> None:
        """Wait until the server is the master, and all sentinels report it."""

        def told() -> bool:
            asked = [each.on("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER) for each in self.sentinels]
            return all(str(server.port) in str(each) for each in asked)

        wait_until(lambda: _role(server)[0] == b"master" and told(), _PATIENCE_S, "the promotion")

    def bring_back(self, server: RedisServer) -> None:
        """Start a killed server as a replica; the sentinels would do that after ten seconds."""
        master = self.master
        server.start()
        with server.client() as client:
            client.replicaof("127.0.0.1", master.port)
        self.await_replica(server)

    def set_down_after(self, milliseconds: int = _DOWN_MS) -> None:
        """Set how long a server is silent until the sentinels declare it dead."""
        for sentinel in self.sentinels:
            sentinel.on("SENTINEL", "SET", MASTER, "down-after-milliseconds", milliseconds)


def _role(server: RedisServer) -> list[object]:
    with server.client() as client:
        try:
            role = client.execute_command("ROLE")
        except redis.ConnectionError:  # a server that changes its role drops its clients
            return [b"changing"]
    assert isinstance(role, list)
    return role
