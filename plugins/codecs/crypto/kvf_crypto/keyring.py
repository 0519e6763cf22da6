"""The keyring: one JSON file with every key, wrapped by the root key. Copies of it on all nodes are equal.

A secret belongs to a tenant, or to the deployment (""): 32 random bytes with a generation. The highest generation of a
tenant seals, all that the file has open. A tenant without a secret uses one derived from the deployment's. One that was
destroyed has none, and gets none from the deployment: only `rotate` gives it another, of a higher generation.

A change replaces the whole file by a rename, so that a command that is killed leaves the old or the new one. A lock
beside it lets one command at a time change it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec import Meta
from msgspec.structs import replace

from kvf_crypto.roots import KeyUnavailable
from kvf_crypto.sealing import SECRET_BYTES, DataKey

DEPLOYMENT = ""
FORMAT = 1
MAX_BYTES = 4 << 20
_NONCE_BYTES = 12
_Generation = Annotated[int, Meta(ge=1, lt=1 << 32)]


class WrappedSecret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A secret under the root key; `made_at` in Unix seconds is for people only."""

    tenant: str
    generation: _Generation
    wrapped: bytes
    made_at: int = 0


class Keyring(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`root` is the root key as a KMS wrapped it, empty for other sources. `destroyed` has the last generation of each
    tenant whose secrets were destroyed."""

    format: int = FORMAT
    root: bytes = b""
    secrets: tuple[WrappedSecret, ...] = ()
    destroyed: dict[str, _Generation] = {}

    def of(self, tenant: str) -> list[WrappedSecret]:
        """The tenant's secrets, the highest generation first."""
        found = [each for each in self.secrets if each.tenant == tenant]
        return sorted(found, key=lambda each: each.generation, reverse=True)

    def with_next(self, root: bytes, tenant: str) -> Keyring:
        """With one more generation of the tenant's secret; the earlier ones stay readable."""
        last = max([each.generation for each in self.of(tenant)], default=self.destroyed.get(tenant, 0))
        nonce, secret = os.urandom(_NONCE_BYTES), os.urandom(SECRET_BYTES)
        wrapped = nonce + AESGCM(root).encrypt(nonce, secret, _about(tenant, last + 1))
        made = WrappedSecret(tenant, last + 1, wrapped, int(time.time()))
        left = {name: number for name, number in self.destroyed.items() if name != tenant}
        return replace(self, secrets=(*self.secrets, made), destroyed=left)

    def without_old(self, tenant: str) -> Keyring:
        """With the tenant's highest generation alone."""
        newest = self.of(tenant)[:1]
        return replace(self, secrets=(*(each for each in self.secrets if each.tenant != tenant), *newest))

    def without(self, tenant: str) -> Keyring:
        """Without the tenant's secrets, and with a mark that it had some."""
        last = max((each.generation for each in self.of(tenant)), default=self.destroyed.get(tenant, 0) or 1)
        kept = tuple(each for each in self.secrets if each.tenant != tenant)
        return replace(self, secrets=kept, destroyed={**self.destroyed, tenant: last})

    def unlocked(self, root: bytes) -> UnlockedKeys:
        """Raises `KeyUnavailable` if the root key is another one."""
        secrets: dict[str, dict[int, bytes]] = {}
        cipher = AESGCM(root)
        for each in self.secrets:
            nonce, wrapped = each.wrapped[:_NONCE_BYTES], each.wrapped[_NONCE_BYTES:]
            try:
                secret = cipher.decrypt(nonce, wrapped, _about(each.tenant, each.generation))
            except (InvalidTag, ValueError):
                fact = f"the root key does not open generation {each.generation} of {shown(each.tenant)}"
                raise KeyUnavailable(fact, hint="give the root key with which the keyring was made") from None
            secrets.setdefault(each.tenant, {})[each.generation] = secret
        if DEPLOYMENT not in secrets:
            raise KeyUnavailable("the keyring has no key of the deployment", hint="kvframework crypto rotate")
        return UnlockedKeys(secrets, self.destroyed)


class UnlockedKeys:
    """The data keys of a keyring. Immutable but for its memory of derived ones; for several threads."""

    def __init__(self, secrets: Mapping[str, Mapping[int, bytes]], destroyed: Mapping[str, int]) -> None:
        self._secrets, self._destroyed = secrets, frozenset(destroyed)
        self._derived: dict[str, tuple[DataKey, ...]] = {}

    def of(self, tenant: str) -> tuple[DataKey, ...]:
        """The keys that open the tenant's values, the first one seals them; none for a destroyed tenant."""
        found = self._derived.get(tenant)
        if found is None:
            # A tenant's own, and what was sealed for it before it had one.
            owners = [] if tenant in self._destroyed else dict.fromkeys((tenant, DEPLOYMENT))
            found = tuple(
                DataKey.derive(secret, tenant, generation)
                for owner in owners
                for generation, secret in sorted(self._secrets.get(owner, {}).items(), reverse=True)
            )
            self._derived[tenant] = found
        return found

    def destroyed(self, tenant: str) -> bool:
        return tenant in self._destroyed


def shown(tenant: str) -> str:
    return f"the tenant {tenant}" if tenant else "the deployment"


def read_keyring(path: Path) -> Keyring:
    """Raises `KeyUnavailable` for a file that others may change, or that is no keyring."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        fact = f"the keyring cannot be read: {error.strerror}"
        raise KeyUnavailable(fact, where=str(path), hint="kvframework crypto rotate") from None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
            raise KeyUnavailable("others may change the keyring", where=str(path), hint=f"chmod 600 {path}")
        content = file.read(MAX_BYTES + 1)
    try:
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        keyring = msgspec.json.decode(content, type=Keyring)
        if keyring.format != FORMAT:
            raise ValueError(f"it has format {keyring.format}, expected {FORMAT}")
    except (msgspec.DecodeError, ValueError) as error:
        raise KeyUnavailable(f"the keyring is damaged: {error}", where=str(path)) from None
    return keyring


def write_keyring(path: Path, keyring: Keyring) -> None:
    """Replace the file in one step; it is on the disk when this returns. Raises `KeyUnavailable`."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(keyring)))
            file.flush()
            os.fsync(descriptor)
        os.replace(fresh, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise KeyUnavailable(f"the keyring cannot be written: {error.strerror}", where=str(path)) from None


@contextlib.contextmanager
def changing(path: Path) -> Iterator[None]:
    """Hold the lock of a keyring's changes. Blocks while another command holds it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _about(tenant: str, generation: int) -> bytes:
    return b"kvf keyring 1\0" + generation.to_bytes(4, "little") + tenant.encode()
