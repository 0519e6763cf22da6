"""The namespaces in a tier, when each was used last, and the deletion of those that no engine uses any more.

It works on the store, beside the servers that use it. A namespace's record says when a server with an engine of it
wrote it last. The record is read again before each batch of deletions and is deleted last, so a namespace that comes
into use keeps what is left of it. A value that is deleted while a server counts on it is a miss there.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from kvframework.api.codec import Codec, CodecProvider
from kvframework.api.plugin import Provider
from kvframework.api.tier import TableContext, Tier, TierProvider
from kvframework.config.schema import Config, L2Config, PluginTable
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import Creator, codec_tables, resolve_table
from kvframework.storage.l2.sealed_tier import DELETE_AT_ONCE, CodecTable, L2Store
from kvframework.storage.namespaces import is_record_key, record_key

# A shorter beginning of a namespace does not name it.
LEAST_DIGITS = 8


class Contents(msgspec.Struct):
    """What a tier has of one namespace. `model` is "" without a record; `used_at`, the time of the last use in Unix
    seconds, is 0 where neither the record nor the store says it. `in_use`: a server wrote the record meanwhile, so the
    rest was kept."""

    tier: str
    namespace: str
    model: str = ""
    values: int = 0
    nbytes: int = 0
    used_at: float = 0.0
    retired: bool = False
    in_use: bool = False
    deleted: int = 0
    deleted_bytes: int = 0

    def named(self, names: Collection[str]) -> bool:
        return any(
            name == self.model or (len(name) >= LEAST_DIGITS and self.namespace.startswith(name)) for name in names
        )


class OpenTier:
    """One tier of a configuration; the namespaces in it, as `read` has found them."""

    def __init__(self, tier: Tier, store: L2Store, where: str) -> None:
        self.lists = store.lists
        self.title = f"{where.rpartition(': ')[2]} {store.name}"
        self.found: dict[bytes, Contents] = {}
        self._tier, self._store = tier, store
        self._recorded: dict[bytes, int] = {}

    def read(self, deadline: float) -> None:
        """List the tier. Raises `TierError`."""
        for entry in self._tier.scan(deadline=deadline):
            contents = self.found.setdefault(entry.key[:16], Contents(self.title, entry.key[:16].hex()))
            contents.used_at = max(contents.used_at, entry.used_at or 0.0)
            if not is_record_key(entry.key):
                contents.values += 1
                contents.nbytes += entry.nbytes
        for namespace, contents in self.found.items():
            record = self._store.record(namespace)
            if record is not None:
                contents.model, contents.used_at = record.model_name, max(contents.used_at, record.used_at)
            self._recorded[namespace] = record.used_at if record else 0

    def delete(self, deadline: float) -> None:
        """Delete what is `retired`, in batches. Raises `TierError`; what was deleted until then is counted."""
        self._store.read_only = False
        chosen = {namespace: contents for namespace, contents in self.found.items() if contents.retired}
        listed = self._tier.scan(deadline=deadline) if chosen else iter(())
        values = (entry for entry in listed if entry.key[:16] in chosen and not is_record_key(entry.key))
        while batch := list(islice(values, DELETE_AT_ONCE)):
            self._keep_used(chosen, {entry.key[:16] for entry in batch})
            sizes = {entry.key: entry.nbytes for entry in batch if entry.key[:16] in chosen}
            for key in self._store.delete(list(sizes)):
                chosen[key[:16]].deleted += 1
                chosen[key[:16]].deleted_bytes += sizes[key]
        self._keep_used(chosen, list(chosen))
        self._store.delete([record_key(namespace) for namespace in chosen])

    def _keep_used(self, chosen: dict[bytes, Contents], namespaces: Collection[bytes]) -> None:
        for namespace in namespaces:
            record = self._store.record(namespace)
            if record is not None and record.used_at > self._recorded[namespace]:
                chosen.pop(namespace).in_use = True


@contextmanager
def open_tier(config: Config, table: L2Config) -> Iterator[OpenTier]:
    """The tier of one `[[l2]]`, which only reads until `delete`. Raises `PluginError`, and what the plugin raises."""
    registry = PluginRegistry()
    creator = Creator(registry)

    def make(of: PluginTable, descriptor: type[Provider[Any]], contract: type[Any], *args: object) -> Any:
        provider: Any
        provider, options = resolve_table(registry, of, descriptor)
        return creator.one(descriptor.kind, of, contract, provider.create, options, *args)

    tables = codec_tables(config)
    required = [each.use for each in tables if resolve_table(registry, each, CodecProvider)[0].required]
    codecs = CodecTable({each.use: partial(make, each, CodecProvider, Codec) for each in tables}, required)
    tier = make(table.tier, TierProvider, Tier, TableContext(table.tier.where))
    store = L2Store(tier, timeout_s=table.keys.timeout_s, codecs=codecs)
    # A record that is damaged stays while nothing is to be deleted.
    store.read_only = True
    try:
        yield OpenTier(tier, store, table.tier.where)
    finally:
        store.close()


def choose(found: Collection[Contents], names: Collection[str], older_than_s: float | None) -> None:
    """Set which are `retired`: of these models or namespaces (none named: of all), and not used for so long, if a time
    is given. What says of no use is only retired by its name."""
    before = None if older_than_s is None else time.time() - older_than_s
    for contents in found:
        old = before is None or 0.0 < contents.used_at < before
        contents.retired = (contents.named(names) if names else before is not None) and old
