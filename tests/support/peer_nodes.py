"""Nodes for the peers tier without a server: what a `Node` gives is a dict of values here."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from kvf_peers import PeersOptions
from kvf_peers.tier import PeersTier, open_tier
from kvframework.api.plugin import ByteSize
from kvframework.api.tier import Loan, Node, NodeIdentity, Outcome, PackedKey, Tier
from tests.support.ports import free_port

WHERE = "[[l2]] #1"


class HeldValue(Loan):
    def __init__(self, node: ValuesNode, value: bytes) -> None:
        self.nbytes = len(value)
        self._node, self._value, self._closed = node, value, False

    def parts(self) -> Sequence[memoryview]:
        view = memoryview(self._value)
        return view[:80], view[80:]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._node.end_loan()


class ValuesNode(Node):
    """Lends `values`. `loans` counts those that are open."""

    def __init__(self, *, chunk_size: int = 256, hasher: str = "sha256/0") -> None:
        self.identity = NodeIdentity(os.urandom(16), chunk_size, hasher)
        self.arena_fd, self.arena_bytes = -1, 0
        self.values: dict[PackedKey, bytes] = {}
        self.told: dict[str, list[bytes]] = {}
        self.loans = 0
        self._lock = threading.Lock()

    def set(self, key: PackedKey, value: bytes) -> None:
        self.values[key] = value

    def holds(self, keys: Sequence[PackedKey]) -> Sequence[bool]:
        return [key in self.values for key in keys]

    def lend(self, key: PackedKey) -> Loan | None:
        value = self.values.get(key)
        if value is None:
            return None
        with self._lock:
            self.loans += 1
        return HeldValue(self, value)

    def end_loan(self) -> None:
        with self._lock:
            self.loans -= 1

    def models(self) -> Mapping[str, Collection[bytes]]:
        return self.told


class Lender:
    """A node with a tier that lends at `address`, on loopback, until `close`."""

    def __init__(self, token_file: Path, node: ValuesNode | None = None, **options: object) -> None:
        self.node = node or ValuesNode()
        self.address = str(options.pop("listen", "")) or f"127.0.0.1:{free_port()}"
        self.tier = peers_tier(token_file, listen=self.address, **options)
        self.tier.attach(self.node)

    def close(self) -> None:
        self.tier.close()

    def __enter__(self) -> Lender:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def token_file(folder: Path, token: str = "a token for tests") -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "token"
    file.write_text(token)
    file.chmod(0o600)
    return file


def peers_tier(token: Path, **options: object) -> PeersTier:
    if "lent_bytes" in options:
        options["lent_bytes"] = ByteSize(options["lent_bytes"])  # type: ignore[call-overload]
    return open_tier(PeersOptions(token_file=str(token), **options), where=WHERE)  # type: ignore[arg-type]


class StoredAtPeers(Tier):
    """A tier that can be written, for the conformance kit: reads go to a peers tier, writes into the nodes behind it,
    as if their engines stored them: each value at one of them. Writes ask first, so that they use the wire, too."""

    name = "peers"

    def __init__(self, reader: PeersTier, nodes: Sequence[ValuesNode]) -> None:
        self.reader = reader
        self.nodes = nodes

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        return self.reader.contains(keys, deadline=deadline)

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        if len(self.nodes) > 1:
            self._await_all(deadline)
        return self.reader.get_into(keys, parts, deadline=deadline)

    def _await_all(self, deadline: float) -> None:
        """Wait until every node is connected again: a late call may have cost a connection, and what only that node has
        would be missing as long as a busy machine takes for another."""
        for peer in self.reader._peers:
            while peer.state != "up" and not self.reader._closed and time.monotonic() < deadline:
                peer.start()
                time.sleep(0.01)

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        self.reader.contains(keys, deadline=deadline)
        for key, each in zip(keys, parts, strict=True):
            self.nodes[sum(key) % len(self.nodes)].set(key, b"".join(each))
        return [Outcome.STORED] * len(keys)

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        self.reader.contains(keys, deadline=deadline)
        gone = [[node.values.pop(key, None) is not None for node in self.nodes] for key in keys]
        return [Outcome.DELETED if any(each) else Outcome.MISSING for each in gone]

    def ping(self, *, deadline: float) -> None:
        self.reader.ping(deadline=deadline)

    def close(self) -> None:
        self.reader.close()
