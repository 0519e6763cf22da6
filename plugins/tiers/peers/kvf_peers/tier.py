"""The peers tier: asks other nodes what they have, and loads it from one of them. Runs in the caller's storage
thread."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from kvf_peers import PeersOptions
from kvf_peers.holder import Holder
from kvf_peers.messages import Welcome
from kvf_peers.peer import Peer, Verdict
from kvf_peers.settings import Settings, read_settings
from kvframework.api.process import LogLimit
from kvframework.api.tier import Node, Outcome, PackedKey, Tier
from kvframework.errors import TierError

log = logging.getLogger(__name__)

# Keys whose nodes are remembered from the lookup to the load.
_MOST_REMEMBERED = 1 << 16
# Questions to nodes at once, each of which ends within `ask_s`.
_ASKERS = 32


def open_tier(options: PeersOptions, *, where: str) -> PeersTier:
    """The tier; connects once it is attached, or asked. Raises `ConfigFieldError`."""
    return PeersTier(read_settings(options, where=where))


class PeersTier(Tier):
    """Values of other nodes. Thread-safe; owns its connections and threads until `close`."""

    name = "peers"
    read_only = True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ask_s = settings.options.ask_s
        self._node: Node | None = None
        self._holder: Holder | None = None
        self._peers = tuple(Peer(address, settings, self._judged) for address in settings.peers)
        self._sources: OrderedDict[PackedKey, Peer] = OrderedDict()
        self._lock = threading.Lock()
        self._once = LogLimit.once()
        self._askers = ThreadPoolExecutor(_ASKERS, thread_name_prefix="peers-ask")
        self._used = False
        self._closed = False

    def attach(self, node: Node) -> None:
        """Begin to lend, if `listen` says so, and to connect."""
        self._node = node
        if self._settings.listen is not None:
            self._holder = Holder(self._settings, self._settings.listen, node)
            self._holder.start()
        for peer in self._peers:
            peer.judge_again()
            peer.start()

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        self._check(deadline)
        if not keys:
            return []
        found, unsure = self._find(keys, range(len(keys)), deadline, {})
        self._remember({keys[index]: peer for index, peer in found.items()})
        absent = Outcome.FAILED if unsure else Outcome.MISSING
        return [Outcome.FOUND if index in found else absent for index in range(len(keys))]

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        self._check(deadline)
        with self._lock:
            known = {index: self._sources[key] for index, key in enumerate(keys) if key in self._sources}
        outcomes: list[int | Outcome] = [Outcome.MISSING] * len(keys)
        failures = self._fetch(known, keys, parts, outcomes, deadline)
        # What nobody was asked for, and what one of them has no longer.
        left = [index for index, each in enumerate(outcomes) if each in (Outcome.MISSING, Outcome.FAILED)]
        if left and time.monotonic() < deadline:
            others, unsure = self._find(keys, left, deadline, known)
            for index in left if unsure else ():
                outcomes[index] = Outcome.FAILED
            failures += self._fetch(others, keys, parts, outcomes, deadline)
        if failures and all(each is Outcome.FAILED for each in outcomes):
            raise failures[0]
        return outcomes

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        """FAILED: values come to a node by its engines only."""
        self._check(deadline)
        return [Outcome.FAILED] * len(keys)

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        """MISSING: what other nodes have is theirs."""
        self._check(deadline)
        return [Outcome.MISSING] * len(keys)

    def rejected(self, key: PackedKey) -> None:
        """The node that gave it is passed over for a minute."""
        with self._lock:
            peer = self._sources.pop(key, None)
        if peer is not None:
            peer.distrust()

    def ping(self, *, deadline: float) -> None:
        """Raise `TierError` unless a node answers; a tier without other nodes works."""
        self._check(deadline)
        if self._node is None and not self._used:
            return  # a server pings before it attaches: then this node does not listen yet, and knows no other
        until = min(deadline, time.monotonic() + self._ask_s)
        for peer in self._peers:
            peer.start()
        if self._peers and not any(peer.settle(until) or peer.state == "useless" for peer in self._peers):
            raise self._nobody()

    def problems(self) -> Sequence[str]:
        """Nodes that do not answer or cannot share, and why nothing is lent."""
        found = [f"{peer.address}: {peer.problem}" for peer in self._peers if peer.problem]
        if self._holder is not None and self._holder.problem:
            found.insert(0, self._holder.problem)
        return [*found, *self._other_names()]

    def status(self) -> Mapping[str, object]:
        """`nodes`: what came from each, `lending`: what went to them."""
        return {
            "nodes": [peer.status() for peer in self._peers if not self._is_own(peer)],
            "lending": self._holder.status() if self._holder is not None else {},
        }

    def close(self) -> None:
        self._closed = True
        if self._holder is not None:
            self._holder.close()
        for peer in self._peers:
            peer.close()
        self._askers.shutdown(wait=False, cancel_futures=True)

    def _check(self, deadline: float) -> None:
        if self._closed:
            raise TierError("the tier is closed", where=self._settings.where)
        if time.monotonic() >= deadline:
            raise TierError("the call's deadline has passed", where=self._settings.where)

    def _nobody(self) -> TierError:
        last = next((f"{peer.address}: {peer.problem}" for peer in self._peers if peer.problem), "")
        return TierError("no node in peers answers", where=self._settings.where, available=last)

    # asking

    def _find(
        self, keys: Sequence[PackedKey], indices: Sequence[int], deadline: float, tried: Mapping[int, Peer]
    ) -> tuple[dict[int, Peer], bool]:
        """Who has which of the `indices`, besides the one that was `tried` for each, and whether some node did not say.
        Raises `TierError` if none answers, unless some were tried."""
        self._used = True
        until = min(deadline, time.monotonic() + self._ask_s)
        settled = time.monotonic() + (until - time.monotonic()) / 2
        asked: dict[Peer, tuple[list[int], Future[bytes]]] = {}
        unsure = False
        for peer in self._peers:
            peer.start()
        for peer in self._peers:
            its = [index for index in indices if tried.get(index) is not peer]
            if its and peer.settle(settled):
                try:
                    asked[peer] = its, self._askers.submit(peer.ask, [keys[index] for index in its], until)
                except RuntimeError:  # closed meanwhile, or the machine has no more threads
                    self._check(deadline)
                    unsure = True
        answers: dict[Peer, set[int]] = {}
        for peer, (its, answer) in asked.items():
            try:
                answers[peer] = {index for index, there in zip(its, answer.result(), strict=True) if there}
            except (TierError, CancelledError):
                unsure = True
        none_answers = unsure or (
            bool(self._peers) and all(peer.state in ("down", "connecting") for peer in self._peers)
        )
        if none_answers and not answers and not tried:
            self._check(deadline)
            raise self._nobody()
        return _chosen(indices, answers), unsure

    def _fetch(
        self,
        sources: Mapping[int, Peer],
        keys: Sequence[PackedKey],
        parts: Sequence[Sequence[memoryview]],
        outcomes: list[int | Outcome],
        deadline: float,
    ) -> list[TierError]:
        """Load each value from its source; return what went wrong, after which its outcomes are FAILED."""
        failures = []
        of_peer: dict[Peer, list[int]] = {}
        for index, peer in sources.items():
            of_peer.setdefault(peer, []).append(index)
        for peer, indices in of_peer.items():
            got: list[int | Outcome] = [Outcome.FAILED] * len(indices)
            try:
                peer.fetch([keys[index] for index in indices], [parts[index] for index in indices], got, deadline)
            except TierError as error:
                failures.append(error)
            for index, outcome in zip(indices, got, strict=True):
                outcomes[index] = outcome
            self._remember({keys[index]: peer for index in indices})
        return failures

    def _remember(self, sources: Mapping[PackedKey, Peer]) -> None:
        with self._lock:
            for key, peer in sources.items():
                self._sources[key] = peer
                self._sources.move_to_end(key)
            while len(self._sources) > _MOST_REMEMBERED:
                self._sources.popitem(last=False)

    # who others are

    def _is_own(self, peer: Peer) -> bool:
        return self._node is not None and peer.who is not None and peer.who.boot_id == self._node.identity.boot_id

    def _judged(self, who: Welcome) -> Verdict:
        if self._node is None:
            return Verdict(useless=False)
        own = self._node.identity
        if who.boot_id == own.boot_id:
            return Verdict(useless=True)
        if who.chunk_size != own.chunk_size:
            fact = f"the node has chunk_size {who.chunk_size}, this node {own.chunk_size}, so the nodes share no KV"
            return Verdict(useless=True, problem=fact)
        if who.hasher != own.hasher:
            return Verdict(useless=True, problem="the node has another hasher or hasher seed, so the nodes share no KV")
        return Verdict(useless=False)

    def _other_names(self) -> list[str]:
        """The models of which another node has KV under other names only: engines that differ in what changes it."""
        if self._node is None:
            return []
        own = self._node.models()
        found = []
        for peer in self._peers:
            who = peer.who
            if who is None or peer.state != "up":
                continue
            for model, theirs in who.models.items():
                if model in own and not set(own[model]) & set(theirs):
                    fact = (
                        f"{peer.address}: its engines of {model!r} differ from this node's in dtype, layout, parallel "
                        "sizes, weights or chunk, so the nodes share no KV of the model"
                    )
                    found.append(fact)
                    if self._once.passes((str(peer.address), model)):
                        log.error("node %s", fact)
        return found


def _chosen(indices: Sequence[int], answers: Mapping[Peer, Collection[int]]) -> dict[int, Peer]:
    """One node for each index that one has: runs from one node, and the first of several by chance, so that many
    readers do not come to one holder."""
    peers = list(answers)
    random.shuffle(peers)
    chosen: dict[int, Peer] = {}
    last: Peer | None = None
    for index in indices:
        if last is None or index not in answers[last]:
            last = next((peer for peer in peers if index in answers[peer]), None)
        if last is not None:
            chosen[index] = last
    return chosen
