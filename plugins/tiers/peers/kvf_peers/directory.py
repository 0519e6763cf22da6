"""The directory: which nodes to ask for which objects. Here that of a few nodes, all of which are asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from kvf_peers.peer import Peer
from kvframework.api.keys import PackedKey
from kvframework.api.tier import Node


class Directory(ABC):
    """Thread-safe. What it says is a hint: the nodes are asked before anything is loaded."""

    @abstractmethod
    def peers(self) -> Sequence[Peer]:
        """Returns the nodes that are known now."""

    @abstractmethod
    def candidates(self, keys: Sequence[PackedKey], until: float) -> Mapping[Peer, Sequence[int]]:
        """Returns the nodes to ask, each with the indices of the keys to ask it for. Blocks until `until` at most.
        Raises `TierError` if it cannot say."""

    def attach(self, node: Node) -> None:
        """Tells others from now on what this node has, where that is the directory's work."""
        return

    def ping(self, until: float) -> None:
        """Raises `TierError` if what it asks besides the nodes does not answer."""
        return

    def problems(self) -> Sequence[str]:
        """Returns what keeps it from working, see `Tier.problems`."""
        return ()

    def status(self) -> Mapping[str, object]:
        """What other nodes learned of this one since `attach`, for the server's status."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Closes the nodes, too."""


class AskAll(Directory):
    """A fixed list of nodes, all of which are asked."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = tuple(peers)

    def peers(self) -> Sequence[Peer]:
        return self._peers

    def candidates(self, keys: Sequence[PackedKey], until: float) -> Mapping[Peer, Sequence[int]]:
        everything = range(len(keys))
        for peer in self._peers:
            peer.start()
        return {peer: everything for peer in self._peers if peer.settle(until)}

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
