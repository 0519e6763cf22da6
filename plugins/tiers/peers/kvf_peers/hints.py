"""Hints: a directory in Redis of which node has what, for fleets that are too large to ask all.

A hint leads from the digest of an object's key to the node that had it last: its boot id and its address. It may be
stale or forged: a hint of an earlier start of a node is passed over, and the node itself is asked before anything is
loaded. Each node tells what comes into its L1, says it again before it expires, and takes nothing back.

Redis is asked in threads of their own, so that one that hangs costs a load no more than it waits for its answer.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from typing import TypeVar

from redis.exceptions import RedisError

from kvf_peers.messages import BOOT_BYTES
from kvf_peers.peer import Directory, Peer
from kvf_peers.settings import Address, Settings, parse_address
from kvframework.api.keys import PackedKey
from kvframework.api.tier import Node
from kvframework.errors import TierError
from redis import Redis

log = logging.getLogger(__name__)

R = TypeVar("R")
PREFIX = b"kvfp:"
_DIGEST_BYTES = 16
_MOST_HINT_BYTES = 300
# Nodes that this one is connected to at once, and asks about one prompt.
MOST_PEERS = 256
MOST_ASKED = 8
# A node that does not answer is forgotten once no hint has named it for so long.
_FORGET_S = 60.0
# Objects that wait to be told, and that are told at once.
_MOST_WAITING = 1 << 20
_AT_ONCE = 1024
_READERS = 4
_REDIS_S = 2.0
_PAUSE_S = 1.0


class Hints(Directory):
    """The directory in the Redis of `settings`. Owns its threads, its connections and its nodes."""

    def __init__(self, settings: Settings, make_peer: Callable[[Address], Peer]) -> None:
        self._settings = settings
        self._make_peer = make_peer
        # With the time at which a hint named each last, in that order.
        self._peers: OrderedDict[Address, tuple[Peer, float]] = OrderedDict()
        self._lock = threading.Lock()
        self._redis: Redis = Redis.from_url(
            settings.options.hints, socket_timeout=_REDIS_S, socket_connect_timeout=_REDIS_S
        )
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="peers-hints")
        self._asked = threading.Semaphore(_READERS)
        self._teller: Teller | None = None
        self._problem = ""

    def attach(self, node: Node) -> None:
        if self._settings.advertise is not None:
            self._teller = Teller(self._redis, node, self._settings.advertise, self._settings.options.hint_ttl_s)

    def peers(self) -> Sequence[Peer]:
        with self._lock:
            return tuple(peer for peer, _ in self._peers.values())

    def candidates(self, keys: Sequence[PackedKey], until: float) -> Mapping[Peer, Sequence[int]]:
        of_node: dict[tuple[bytes, Address], list[int]] = {}
        for index, hint in enumerate(self._hints(keys, until)):
            told = parse_hint(hint) if hint else None
            if told is not None and told[1] != self._settings.advertise:
                of_node.setdefault(told, []).append(index)
        # Nodes that are known as what the hint says come first: forged hints do not keep them from being asked.
        alive = {(peer.who.boot_id, peer.address) for peer in self.peers() if peer.who is not None}
        most = sorted(of_node, key=lambda each: (each in alive, len(of_node[each])), reverse=True)[:MOST_ASKED]
        peers = {told: self._peer(told[1]) for told in most}
        for peer in peers.values():
            peer.start()
        return {
            peer: of_node[told]
            for told, peer in peers.items()
            if peer.settle(until) and peer.who is not None and peer.who.boot_id == told[0]
        }

    def ping(self, until: float) -> None:
        self._result(self._redis.ping, until)

    def problems(self) -> Sequence[str]:
        self._forget()
        told = self._teller.problem if self._teller is not None else ""
        return [each for each in dict.fromkeys((self._problem, told)) if each]

    def status(self) -> Mapping[str, object]:
        return self._teller.status() if self._teller is not None else {}

    def close(self) -> None:
        if self._teller is not None:
            self._teller.close()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._redis.connection_pool.disconnect()
        for peer in self.peers():
            peer.close()

    def _hints(self, keys: Sequence[PackedKey], until: float) -> Sequence[bytes | None]:
        return self._result(lambda: self._looked_up([hint_name(key) for key in keys]), until)

    def _looked_up(self, names: Sequence[bytes]) -> Sequence[bytes | None]:
        """Cut off by Redis, so that a value that is no hint is never received whole."""
        with self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.getrange(name, 0, _MOST_HINT_BYTES)
            found = pipeline.execute(raise_on_error=False)
        return [each if isinstance(each, bytes) and each else None for each in found]

    def _result(self, ask: Callable[[], R], until: float) -> R:
        """What Redis answers, asked in another thread. Raises `TierError`."""
        # More than there are threads would wait for each other, behind a Redis that hangs.
        if not self._asked.acquire(blocking=False):
            raise TierError("the hints are asked too often at once", where=self._settings.where)
        try:
            asked = self._readers.submit(ask)
        except RuntimeError:
            self._asked.release()
            raise TierError("the tier is closed", where=self._settings.where) from None
        asked.add_done_callback(lambda _asked: self._asked.release())
        try:
            result = asked.result(max(until - time.monotonic(), 0.0))
        except TooLate:
            self._problem = "the Redis with the hints does not answer in time"
        except (RedisError, OSError, ValueError) as error:  # the last from one that does not speak Redis's protocol
            self._problem = f"the Redis with the hints cannot be asked: {type(error).__name__}"
        else:
            self._problem = ""
            return result
        raise TierError(self._problem, where=self._settings.where)

    def _peer(self, address: Address) -> Peer:
        self._forget()
        with self._lock:
            peer = self._peers[address][0] if address in self._peers else self._make_peer(address)
            self._peers[address] = peer, time.monotonic()
            self._peers.move_to_end(address)
        return peer

    def _forget(self) -> None:
        """Leave nodes that do not answer and that no hint names, and those beyond `MOST_PEERS`. Never blocks."""
        left = []
        with self._lock:
            old = time.monotonic() - _FORGET_S
            for address, (peer, named_at) in list(self._peers.items()):
                if (named_at < old and peer.state != "up") or len(self._peers) >= MOST_PEERS:
                    del self._peers[address]
                    left.append(peer)
        for peer in left:
            peer.leave()


class Teller:
    """The thread that tells what a node has, until `close`."""

    def __init__(self, redis: Redis, node: Node, address: Address, ttl_s: int) -> None:
        self.problem = ""
        self._told = self._dropped = 0
        self._redis = redis
        self._node = node
        self._hint = make_hint(node.identity.boot_id, address)
        self._ttl_s = ttl_s
        self._waiting: deque[PackedKey] = deque()
        # When each key that was told is told again, in that order.
        self._again: OrderedDict[PackedKey, float] = OrderedDict()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peers-teller", daemon=True)
        node.watch(self._came)
        self._thread.start()

    def status(self) -> Mapping[str, object]:
        return {"written": self._told, "waiting": len(self._waiting), "dropped": self._dropped}

    def close(self) -> None:
        """Blocks for half a second at most."""
        self._closing.set()
        self._thread.join(0.5)

    def _came(self, keys: Sequence[PackedKey]) -> None:
        if len(self._waiting) + len(keys) <= _MOST_WAITING:
            self._waiting.extend(keys)
        else:
            self._dropped += len(keys)

    def _run(self) -> None:
        while not self._closing.is_set():
            keys = self._next()
            if not keys:
                self._closing.wait(min(_PAUSE_S / 4, self._ttl_s / 8))
                continue
            try:
                with self._redis.pipeline(transaction=False) as pipeline:
                    for key in keys:
                        pipeline.set(hint_name(key), self._hint, ex=self._ttl_s)
                    pipeline.execute()
            except (RedisError, OSError, ValueError) as error:
                if not self.problem and not self._closing.is_set():
                    log.warning("hints for other nodes cannot be told: %s", type(error).__name__)
                self.problem = f"hints cannot be told: {type(error).__name__}"
                self._waiting.extendleft(reversed(keys))
                self._closing.wait(_PAUSE_S)
                continue
            self.problem = ""
            self._told += len(keys)
            at = time.monotonic() + self._ttl_s / 2
            for key in keys:
                self._again[key] = at
                self._again.move_to_end(key)

    def _next(self) -> list[PackedKey]:
        """What came, and what must be said again and is still here."""
        keys: list[PackedKey] = []
        while self._waiting and len(keys) < _AT_ONCE:
            keys.append(self._waiting.popleft())
        now = time.monotonic()
        due: list[PackedKey] = []
        while self._again and len(keys) + len(due) < _AT_ONCE and next(iter(self._again.values())) <= now:
            due.append(self._again.popitem(last=False)[0])
        return keys + [key for key, here in zip(due, self._node.holds(due), strict=True) if here]


def hint_name(key: PackedKey) -> bytes:
    """The name of an object's hint in Redis."""
    return PREFIX + hashlib.blake2b(key, digest_size=_DIGEST_BYTES, person=b"kvf-peers").digest()


def make_hint(boot_id: bytes, address: Address) -> bytes:
    return boot_id + str(address).encode()


def parse_hint(hint: bytes) -> tuple[bytes, Address] | None:
    """The boot id and the address; None for what is no hint."""
    if len(hint) > _MOST_HINT_BYTES:
        return None
    try:
        return hint[:BOOT_BYTES], parse_address(hint[BOOT_BYTES:].decode("ascii"))
    except ValueError:
        return None
