"""The slot map of a cluster: which master serves each hash slot. Pure."""

from __future__ import annotations

from typing import Any

from redis.cluster import parse_cluster_slots
from redis.crc import key_slot

from kvf_redis.addresses import Place

SLOTS = 1 << 14


class SlotMap:
    """One member's view of the cluster, updated by redirections since. Safe to read while `move` changes it.

    `members` are all nodes that were named, masters first.
    """

    def __init__(self, reply: Any, asked: Place) -> None:
        """`reply` is the answer of the member `asked` to CLUSTER SLOTS, as redis-py reads it. Raises `ValueError` and
        `TypeError` for anything else."""
        self._masters: list[Place | None] = [None] * SLOTS
        members: dict[Place, None] = {}
        replicas: dict[Place, None] = {}
        for (first, last), nodes in parse_cluster_slots(reply, current_host=asked.host).items():
            if not 0 <= first <= last < SLOTS:
                raise ValueError(f"no range of slots: {first} to {last}")
            master = _place(nodes["primary"], asked)
            members[master] = None
            self._masters[first : last + 1] = [master] * (last + 1 - first)
            replicas.update((_place(each, asked), None) for each in nodes["replicas"])
        self.members = tuple(members | replicas)
        self.covered = sum(master is not None for master in self._masters)

    def master_of(self, key: bytes) -> Place | None:
        """The master that serves the key; None if its slot has none."""
        return self._masters[slot_of(key)]

    def masters(self) -> list[Place]:
        return list(dict.fromkeys(master for master in self._masters if master is not None))

    def move(self, slot: int, master: Place) -> None:
        self._masters[slot] = master


def slot_of(key: bytes) -> int:
    return key_slot(key)


def _place(node: tuple[str, int], asked: Place) -> Place:
    host, port = node
    return Place(asked.host if host in ("", "?", None) else host, int(port))
