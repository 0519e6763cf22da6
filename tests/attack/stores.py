"""Real stores that belong to the attacker, and a server's sealed view of them.

The attacker reads and writes the store as its owner: files of a folder, keys of Redis, objects of S3. It knows the form
of everything, repairs checksums, and has no key but those that a test hands over."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvf_crypto.codec import AeadCodec
from kvf_filesystem.tier import FilesystemTier
from kvframework.api.keys import ObjectKey, PackedKey
from kvframework.api.tier import Outcome, Tier
from kvframework.storage import namespaces
from kvframework.storage.l2.sealed_tier import CodecTable, L2Store, Shares
from tests.crypto.keyrings import Keyrings
from tests.filesystem.folder import open_tier
from tests.support.redis_server import RedisServer
from tests.support.redis_tier import open_redis_tier, soon
from tests.support.s3_server import SeaweedServer, s3_store
from tests.support.s3_tier import open_s3_tier, write_credentials

NBYTES = 20_000
LAYOUT = bytes(range(16))
HEADER = namespaces.HEADER_BYTES
TENANTS = ("", "acme", "bolt")


def key_of(number: int, tenant: str = "") -> PackedKey:
    """The name of a chunk. Its salt is the tenant's, as digests make it."""
    salt = bytes(16) if not tenant else tenant.encode().ljust(16, b"-")
    return ObjectKey(bytes(16), salt, 0, 0, number.to_bytes(32, "big")).pack()


def content(key: PackedKey) -> bytes:
    """KV of a name: no two share a window, and it is easy to find in any store."""
    return (b"secret" + key[-8:] + key[16:24]) * (NBYTES // 22) + bytes(NBYTES % 22)


def tenant_of(key: PackedKey) -> int:
    name = key[16:32].rstrip(b"-\0").decode()
    return TENANTS.index(name)


class Attacked:
    """One store. `tier` is the attacker's own view; `all_bytes` is what the medium holds."""

    def __init__(self, tier: Tier, raw: Path | RedisServer | SeaweedServer) -> None:
        self.tier, self._raw = tier, raw

    def read(self, key: PackedKey) -> bytes:
        place = bytearray(HEADER + NBYTES + 256)
        (received,) = self.tier.get_into([key], [[memoryview(place)]], deadline=soon())
        assert isinstance(received, int), received
        return bytes(place[:received])

    def write(self, key: PackedKey, value: bytes) -> None:
        assert self.tier.put([key], [[memoryview(value)]], deadline=soon()) == [Outcome.STORED]

    def has(self, key: PackedKey) -> bool:
        return self.tier.contains([key], deadline=soon()) == [Outcome.FOUND]

    def all_bytes(self) -> bytes:
        if isinstance(self._raw, Path):
            return b"".join(file.read_bytes() for file in self._raw.rglob("*") if file.is_file())
        if isinstance(self._raw, RedisServer):
            with self._raw.client() as client:
                return b"".join(client.get(name) or b"" for name in client.scan_iter())  # type: ignore[misc, union-attr]
        import obstore

        store = s3_store(self._raw)
        return b"".join(
            bytes(obstore.get(store, found["path"]).bytes()) for page in obstore.list(store) for found in page
        )


def enveloped(key: PackedKey, payload: bytes, codec: str = "aead", layout: bytes = LAYOUT) -> bytes:
    """A payload under a right header and checksum of this name."""
    header = namespaces.seal(key, [payload], object_bytes=NBYTES, codec=codec, layout=layout)
    return header + payload


@contextmanager
def attacked(kind: str, folder: Path) -> Iterator[Attacked]:
    with ExitStack() as stack:
        raw: Path | RedisServer | SeaweedServer
        if kind == "disk":
            raw = folder / "l2"
            tier: Tier = open_tier(raw)
            assert isinstance(tier, FilesystemTier)
        elif kind == "redis":
            raw = stack.enter_context(RedisServer(folder))
            tier = open_redis_tier(raw.url)
        else:
            raw = stack.enter_context(SeaweedServer(folder))
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(write_credentials(folder / "credentials")))
            tier = open_s3_tier(raw.endpoint)
        stack.callback(tier.close)
        yield Attacked(tier, raw)


class Victim:
    """A server's store on the attacked tier, with its own keyring. Several may share one keyring, as nodes do."""

    def __init__(self, where: Attacked, keyrings: Keyrings, codecs: Sequence[str] = ()) -> None:
        self.codec: AeadCodec = keyrings.codec()
        table = CodecTable({"aead": lambda: self.codec}, ["aead"])
        self.store = L2Store(
            where.tier, timeout_s=20.0, codec="aead", codecs=table, layout_of=lambda _namespace: LAYOUT
        )
        self.store.shares = Shares(tenant_of, [0.0] * 3, [1.0] * 3, TENANTS, [0] * 3)

    def put(self, *keys: PackedKey) -> None:
        assert self.store.put(keys, [memoryview(content(key)) for key in keys]) == [True] * len(keys)

    def get(self, key: PackedKey) -> bool:
        """Whether the value is loaded; asserts that what is loaded is right."""
        place = bytearray(os.urandom(NBYTES))
        (good,) = self.store.get([key], [memoryview(place)])
        assert not good or bytes(place) == content(key), "wrong bytes were loaded"
        return good

    def refusal(self, key: PackedKey) -> str:
        """The counter by which a value is refused that must not be loaded."""
        names = ("forged", "no_key", "unsealed", "corrupt")
        before = {name: self.store.counters[name] for name in names}
        assert not self.get(key), "a value was loaded that was not the sealed one"
        (counted,) = [name for name in names if self.store.counters[name] > before[name]]
        return counted
