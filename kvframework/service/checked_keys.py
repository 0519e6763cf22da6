"""The objects that a request names, after a check of its key against the instance. Stateless."""

from __future__ import annotations

from kvframework.api.requests import CacheKey, ClientInfo
from kvframework.errors import TransportMismatch
from kvframework.service.contexts import Contexts, RegisteredContext, own_context
from kvframework.service.keys import KeyGrid, KeyResolver, check_key


class InstanceKeys:
    """Resolves the key of a STORE or RETRIEVE, on any path, to the objects of its instance: of one rank, or
    of the shards that it holds."""

    def __init__(self, contexts: Contexts, resolver: KeyResolver, *, chunk_size: int) -> None:
        self._contexts = contexts
        self._resolver = resolver
        self._chunk_size = chunk_size

    def own(self, client: ClientInfo, instance_id: int) -> RegisteredContext:
        """Return the context of an instance that this client registered. Raises `NotRegistered`."""
        return own_context(self._contexts, instance_id, client)

    def grid(self, context: RegisteredContext, key: CacheKey) -> KeyGrid:
        """Return the objects that the key names. Raises `NamespaceMismatch` unless it names what was registered, and
        the errors of `resolve`."""
        check_key(key)
        context.check(key)
        return self._resolver.resolve(key, context.rank_desc(self._chunk_size), context.held)

    def engine_driven(self, client: ClientInfo, instance_id: int, key: CacheKey) -> KeyGrid:
        """Resolve like `grid`, for an instance whose engine moves the bytes. Raises `TransportMismatch` if the server
        does."""
        context = self.own(client, instance_id)
        if context.memory is not None:
            raise TransportMismatch(
                f"instance {context.instance_id} uses {context.transport}, which the server drives",
                available="STORE and RETRIEVE",
            )
        return self.grid(context, key)
