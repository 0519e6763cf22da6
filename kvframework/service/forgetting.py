"""Forgetting on order: which objects an order names, and the receipt of what left where."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress

from kvframework.api.hasher import DIGEST_BYTES, TOKEN_BYTES, KeyHasher
from kvframework.api.keys import NAMESPACE_BYTES, SALT_BYTES, PackedKey, salt_digest
from kvframework.api.requests import ClientInfo, Handler
from kvframework.api.toml import closest
from kvframework.errors import BadRange, MessageTooLarge, NamespaceMismatch, RequestError, TierError
from kvframework.service.keys import MAX_RAW_TOKENS, unpacked
from kvframework.service.records import TenantNames
from kvframework.storage.l1.eviction import SALT
from kvframework.storage.manager import StorageManager
from kvframework.storage.namespaces import is_record_key
from kvframework.text import counted
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS

log = logging.getLogger(__name__)

# Digests of conversations that are remembered, and the runs of chunks of one conversation: of its agents, and of what
# came before its history was rewritten.
MOST_BYTES = 16 << 20
MOST_RUNS = 32
_PLAIN = bytes(SALT_BYTES)

Wanted = Callable[[PackedKey], bool]


class Conversations:
    """The chunks of the conversations that requests have named since the start; beyond `MOST_BYTES` of digests the
    conversation that was named longest ago is dropped. Thread-safe."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, list[bytes]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, conversation: str, digests: bytes) -> None:
        """Add the packed digests of a request's chunks: a turn that continues a run takes its place."""
        with self._lock:
            runs = self._runs.setdefault(conversation, [])
            self._runs.move_to_end(conversation)
            for at, run in enumerate(runs):
                if run.startswith(digests):
                    return
                if digests.startswith(run):
                    self._nbytes += len(digests) - len(run)
                    runs[at] = digests
                    break
            else:
                self._nbytes += len(digests)
                if len(runs) < MOST_RUNS:
                    runs.append(digests)
                else:
                    runs[-1] += digests
            while self._nbytes > MOST_BYTES:
                self._nbytes -= sum(map(len, self._runs.popitem(last=False)[1]))

    def digests(self, conversation: str) -> set[bytes]:
        """Return the digests of a conversation. Raises `RequestError` for one that is not remembered."""
        with self._lock:
            runs = list(self._runs.get(conversation, ()))
        if not runs:
            hint = "name its tokens, salt or tenant instead"
            raise RequestError("no request since the server's start has named this conversation", hint=hint)
        return {digest for run in runs for digest in unpacked(run)}

    def forget(self, conversation: str) -> None:
        with self._lock:
            self._nbytes -= sum(map(len, self._runs.pop(conversation, ())))


class Forgetting:
    """The handler of FORGET. `settle` ends uses that are over but still count."""

    def __init__(
        self, storage: StorageManager, tenants: TenantNames, hasher: KeyHasher, settle: Callable[[], object]
    ) -> None:
        self.conversations = Conversations()
        self._storage, self._tenants, self._hasher = storage, tenants, hasher
        self._settle = settle

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [Handler(REQUESTS["FORGET"], self._forget, pooled=True, ordered=True)]

    def _forget(self, client: ClientInfo, order: m.Forget, _buffers: object) -> m.Forgotten:
        if not client.local:
            raise RequestError(
                "only a client on this node may delete KV", available="a client on this node, over ipc://"
            )
        with suppress(TierError):  # the receipt names a tier that fails
            self._storage.tiers.learn(self._storage.records)
        unknown: set[bytes] = set()
        conditions = list(self._conditions(order, unknown))
        if not conditions:
            raise RequestError(
                "the request names no KV to delete",
                available="a tenant, salts, a model, a namespace, a conversation, or a prompt",
            )

        def wanted(key: PackedKey) -> bool:
            return not is_record_key(key) and all(each(key) for each in conditions)

        self._settle()
        places, erased, reserved = self._storage.forget(wanted, order.wait_s)
        self._storage.table.count(forgotten=sum(place.objects for place in places))
        if order.conversation:
            self.conversations.forget(order.conversation)
        log.info(
            "deleted the KV of %s for client %s (process %d): %s",
            _shown(order),
            client.name,
            client.pid,
            "; ".join(
                f"{place.place} {counted(place.objects, 'objects')}, {place.why or 'none left'}" for place in places
            ),
        )
        return m.Forgotten(tuple(places), erased, reserved, len(unknown))

    def _conditions(self, order: m.Forget, unknown: set[bytes]) -> Iterator[Wanted]:
        """Yield what an object must fulfil, all of it. `unknown` receives salts whose tenant is not known."""
        records, table = self._storage.records, self._storage.table
        if order.model:
            of_model = records.of_model(order.model)
            yield lambda key: key[:NAMESPACE_BYTES] in of_model
        if order.namespace:
            if len(order.namespace) != NAMESPACE_BYTES:
                fact = f"the namespace has {len(order.namespace)} bytes"
                raise NamespaceMismatch(fact, available=f"{NAMESPACE_BYTES} bytes")
            yield lambda key: key[:NAMESPACE_BYTES] == order.namespace
        if order.tenant or order.salts:
            salts = self._salts(order)
            if order.tenant:
                known = {_PLAIN}.union(*(table.salts_of(number) for number in range(1, len(self._tenants.names))))

                def of_tenant(key: PackedKey) -> bool:
                    salt = key[SALT]
                    if salt not in known:
                        unknown.add(salt)
                    return salt in salts

                known |= salts
                yield of_tenant
            else:
                yield lambda key: key[SALT] in salts
        if order.conversation:
            of_conversation = self.conversations.digests(order.conversation)
            yield lambda key: key[-DIGEST_BYTES:] in of_conversation
        if order.tokens or order.digests:
            of_prompt = set(self._digests(order))
            yield lambda key: key[-DIGEST_BYTES:] in of_prompt

    def _salts(self, order: m.Forget) -> set[bytes]:
        """Return the salts in keys that are the tenant's, or those of the order alone."""
        records, names = self._storage.records, self._tenants.names
        if order.tenant and order.tenant not in names:
            hint = closest(order.tenant, names[1:]) or "the server's [tenants] has the names"
            raise RequestError(
                f"the tenant {order.tenant[:64]!r} is unknown to this server",
                available=", ".join(names[1:]) or "no tenant",
                hint=hint,
            )
        number = names.index(order.tenant) if order.tenant else 0
        for salt in order.salts:
            if not salt or (number and self._tenants.number(salt) != number):
                raise RequestError("a salt is empty, or does not belong to the tenant")
        namespaces = [each for of_model in records.models().values() for each in of_model]
        orders = {b""}.union(*(records.orders(namespace).values() for namespace in namespaces))
        given = {salt_digest(salt, layers) for salt in order.salts for layers in orders}
        return given | self._storage.table.salts_of(number) if number else given

    def _digests(self, order: m.Forget) -> Iterator[bytes]:
        """Yield the digests of the prompt's whole chunks, in each size that a known namespace has."""
        if len(order.tokens) > MAX_RAW_TOKENS * TOKEN_BYTES:
            fact = f"the request has {len(order.tokens) // TOKEN_BYTES} token ids"
            raise MessageTooLarge(fact, available=f"at most {MAX_RAW_TOKENS}", hint="send digests")
        if len(order.tokens) % TOKEN_BYTES or len(order.digests) % DIGEST_BYTES:
            raise BadRange("the prompt has incomplete token ids or digests", where="tokens")
        yield from unpacked(order.digests)
        records = self._storage.records
        found = [records.get(each) for of_model in records.models().values() for each in of_model]
        for tokens in {record.desc.chunk_tokens for record in found if record is not None}:
            whole = len(order.tokens) // TOKEN_BYTES // tokens * tokens * TOKEN_BYTES
            if whole:
                yield from unpacked(self._hasher.chunk_digests(order.tokens[:whole], tokens))


def _shown(order: m.Forget) -> str:
    """Return what an order names, without what is a secret or a user's."""
    named = [
        f"the tenant {order.tenant}" if order.tenant else "",
        counted(len(order.salts), "salts") if order.salts else "",
        f"the model {order.model!r}" if order.model else "",
        f"the namespace {order.namespace.hex()}" if order.namespace else "",
        "a conversation" if order.conversation else "",
        "a prompt" if order.tokens or order.digests else "",
    ]
    return " and ".join(filter(None, named))
