"""A real Redis Cluster on loopback for tests: masters, a replica for each or none, slots moved, masters killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import redis
from tests.support.certificates import Certificate
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

T = TypeVar("T")

SLOTS = 1 << 14
_PATIENCE_S = 60.0
# Short at first, because a new cluster waits this long. Then long, so that a slow machine does not look like a dead
# one; tests of a failover make it short again.
_STARTING_TIMEOUT_MS = 1_000
_NODE_TIMEOUT_MS = 30_000


class RedisCluster:
    """`masters[i]` serves the i-th part of the slots at first, and `replicas[i]` follows it. Use as a context manager.

    Slots without a server do not stop the other slots (`cluster-require-full-coverage no`).
    """

    def __init__(
        self,
        directory: Path,
        *,
        masters: int = 3,
        replicas: bool = True,
        password: str = "",
        certificate: Certificate | None = None,
        executable: str = "",
        options: Sequence[str] = (),
    ) -> None:
        options = [*options, "--cluster-node-timeout", str(_STARTING_TIMEOUT_MS)]
        options += ["--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"]
        # Redis 7 does not list a replica that has no word from its master yet, and an idle master sends only pings.
        options += ["--cluster-require-full-coverage", "no", "--repl-ping-replica-period", "1"]
        servers = []
        for index in range(masters * (2 if replicas else 1)):
            (directory / str(index)).mkdir()
            servers.append(
                RedisServer(
                    directory / str(index),
                    cluster=True,
                    password=password,
                    certificate=certificate,
                    executable=executable,
                    options=options,
                )
            )
        self.masters, self.replicas = servers[:masters], servers[masters:]
        self.servers = servers
        self.password = password

    @property
    def nodes(self) -> list[str]:
        """For the tier's option of that name."""
        return [f"127.0.0.1:{server.port}" for server in self.servers]

    def __enter__(self) -> RedisCluster:
        with ExitStack() as stack:
            for server in self.servers:
                server.launch()
                stack.callback(server.stop)
            for server in self.servers:
                server.await_answer()
            self._introduce()
            self.set_everywhere("cluster-node-timeout", str(_NODE_TIMEOUT_MS))
            stack.pop_all()
        return self

    def __exit__(self, *_exc: object) -> None:
        for server in self.servers:
            server.stop()

    def on(self, server: RedisServer, *words: str | int | bytes) -> object:
        """Return the server's answer to a command."""
        with server.client() as client:
            return client.execute_command(*words)

    def id_of(self, server: RedisServer) -> str:
        return _text(self.on(server, "CLUSTER", "MYID"))

    def master_of(self, slot: int) -> RedisServer:
        """Return the one server that claims the slot; waits while none or two claim it."""
        found: list[RedisServer] = []

        def agreed() -> bool:
            found[:] = [server for server in self.running if slot in self._slots(server)]
            return len(found) == 1

        wait_until(agreed, _PATIENCE_S, f"one server that says that it serves slot {slot}")
        return found[0]

    @contextmanager
    def killed(self, master: RedisServer) -> Iterator[None]:
        """The server is dead within the block. Afterwards it is a replica again and all slots are served, whatever the
        test did: other tests share the cluster."""
        master.kill9()
        try:
            yield
        except BaseException:
            # Where no replica was promoted, it is a master again, with no data.
            master.start()
            self.await_ok()
            raise
        master.start()
        self.await_replica(master)
        self.await_ok()

    def other_than(self, server: RedisServer) -> RedisServer:
        """Return another master."""
        return next(each for each in self.running if each is not server and self.is_master(each))

    def replica_of(self, master: RedisServer) -> RedisServer:
        port = master.port
        return next(each for each in self.running if _role(self.on(each, "ROLE")) == ("slave", port))

    def is_master(self, server: RedisServer) -> bool:
        return _role(self.on(server, "ROLE"))[0] == "master"

    def move(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        """Move a slot to another master, without the keys that tests left in it; all masters know when it returns."""
        left = self.on(source, "CLUSTER", "GETKEYSINSLOT", slot, 1000)
        assert isinstance(left, list)
        if left:
            self.on(source, "DEL", *left)
        # Only the importing server raises its epoch when it takes the slot; else old claims of other servers may win.
        self.on(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
        self.on(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(target))
        others = [each for each in self.running if each not in (source, target) and self.is_master(each)]
        for server in (target, source, *others):
            self.on(server, "CLUSTER", "SETSLOT", slot, "NODE", self.id_of(target))

    @contextmanager
    def migrating(self, slot: int, source: RedisServer, target: RedisServer) -> Iterator[None]:
        """Within the block, `source` answers ASK for keys of the slot that it does not hold; afterwards all is as
        before."""
        self.on(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
        self.on(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(target))
        try:
            yield
        finally:
            for server in (source, target):
                self.on(server, "CLUSTER", "SETSLOT", slot, "STABLE")

    def await_promotion(self, replica: RedisServer) -> None:
        """Wait until the replica is a master, and each slot is served by one server that the others know."""
        wait_until(lambda: self.is_master(replica), _PATIENCE_S, "the promotion")
        self.await_ok()

    def await_ok(self) -> None:
        wait_until(self._all_served, _PATIENCE_S, "a cluster whose slots are all served")

    def await_replica(self, server: RedisServer) -> None:
        """Wait until the server follows a master."""
        wait_until(lambda: self._follows(server), _PATIENCE_S, "a replica in step")

    @property
    def running(self) -> list[RedisServer]:
        return [server for server in self.servers if server.running]

    def set_everywhere(self, option: str, value: str) -> None:
        for server in self.running:
            self.on(server, "CONFIG", "SET", option, value)

    def _introduce(self) -> None:
        size = -(-SLOTS // len(self.masters))
        for index, server in enumerate(self.servers):
            self.on(server, "CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for index, master in enumerate(self.masters):
            self.on(master, "CLUSTER", "ADDSLOTS", *range(index * size, min((index + 1) * size, SLOTS)))
        for index, server in enumerate(self.servers):  # each with each, since gossip would take seconds
            for other in self.servers[:index]:
                self.on(server, "CLUSTER", "MEET", "127.0.0.1", other.port)
        known = f"cluster_known_nodes:{len(self.servers)}"
        wait_until(lambda: all(known in self._info(each) for each in self.servers), _PATIENCE_S, "that all have met")
        for master, replica in zip(self.masters, self.replicas, strict=bool(self.replicas)):
            identity = self.id_of(master)
            _eventually(lambda replica=replica, identity=identity: self.on(replica, "CLUSTER", "REPLICATE", identity))
        for replica in self.replicas:
            self.await_replica(replica)
        self.await_ok()
        told = len(self.servers) // len(self.masters)
        wait_until(lambda: all(self._told(each) == told for each in self.servers), _PATIENCE_S, "replicas in all maps")

    def _info(self, server: RedisServer) -> str:
        return _text(self.on(server, "CLUSTER", "INFO"))

    def _all_served(self) -> bool:
        """Wait until one server serves each slot, and every server knows it."""
        served = [slot for server in self.running for slot in self._slots(server)]
        return len(served) == SLOTS == len(set(served)) and all(self._is_ok(server) for server in self.running)

    def _is_ok(self, server: RedisServer) -> bool:
        info = self._info(server)
        return "cluster_state:ok" in info and f"cluster_slots_ok:{SLOTS}" in info

    def _follows(self, server: RedisServer) -> bool:
        role = self.on(server, "ROLE")
        return isinstance(role, list) and _text(role[0]) == "slave" and _text(role[3]) == "connected"

    def _told(self, server: RedisServer) -> int:
        """Return the number of nodes that the server names for the slots with the fewest."""
        slots = self.on(server, "CLUSTER", "SLOTS")
        assert isinstance(slots, list)
        return min((len(each) - 2 for each in slots), default=0)

    def _slots(self, server: RedisServer) -> list[int]:
        """Return the slots that the server claims for itself."""
        mine = next(line for line in _text(self.on(server, "CLUSTER", "NODES")).splitlines() if "myself" in line)
        if "master" not in mine.split()[2]:
            return []
        # A slot in migration is listed there in brackets, too.
        spans = [word.partition("-") for word in mine.split()[8:] if not word.startswith("[")]
        return [slot for first, _, last in spans for slot in range(int(first), int(last or first) + 1)]


def _eventually(action: Callable[[], T]) -> None:
    def worked() -> bool:
        try:
            action()
        except redis.ResponseError:
            return False
        return True

    wait_until(worked, _PATIENCE_S, "what the cluster refuses at first")


def _role(reply: object) -> tuple[str, int]:
    """Return the role, and of a replica the port of its master."""
    assert isinstance(reply, list)
    role = _text(reply[0])
    return role, int(reply[2]) if role == "slave" else 0


def _text(reply: object) -> str:
    return reply.decode() if isinstance(reply, bytes) else str(reply)
