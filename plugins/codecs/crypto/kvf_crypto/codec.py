"""The codec `aead`, and the keys that a server holds for it.

The keyring's file is looked at before each value, which takes some microseconds: a key that was rotated or destroyed is
so from the next value on. A keyring or a root key that is missing or wrong when a server starts ends the start. Later
the server keeps the keys that it has, and says so in the status. A command or a KMS is asked in a thread, which tries
again; until it answers, every value of the tier is a miss, and none is written."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from kvf_crypto import AeadOptions
from kvf_crypto.keyring import Keyring, UnlockedKeys, read_keyring, shown
from kvf_crypto.roots import KeyUnavailable, is_local, read_root, source_of
from kvf_crypto.sealing import (
    CIPHERS,
    HEAD_BYTES,
    MOST_VALUES,
    TAG_BYTES,
    DataKey,
    Head,
    best_cipher,
    seal,
    unseal,
)
from kvframework.api.codec import Codec, ValueName, ValueRefused
from kvframework.api.copying import fresh_memory
from kvframework.api.installing import install_command
from kvframework.api.process import Backoff
from kvframework.errors import PluginUnavailable

_NO_NAME = ValueName(bytes(72), bytes(16), "")
# What tells one content of the keyring's file from another.
_State: TypeAlias = tuple[int, int, int]


class HeldKeys:
    """The keys of a keyring's file as it is now. Thread-safe. To create it raises `KeyUnavailable` for a mistake on
    this machine; the trouble of a command or a KMS is a problem that may pass."""

    def __init__(self, options: AeadOptions) -> None:
        self._options = options
        self._path = Path(options.keyring).expanduser()
        self._lock = threading.Lock()
        self._seen: _State | None = None
        self._root: bytes | None = None
        self._keys: UnlockedKeys | None = None
        self._asking = False
        self._backoff = Backoff(0.2, 10.0)
        self.problem = ""
        self._take(self._state(), strict=True)

    def now(self) -> UnlockedKeys:
        """Return the keys. Raises `ValueRefused` while there are none. Blocks for the reading of one small file."""
        with self._lock:
            state = self._state()
            if (state is not None and state != self._seen) or (self._keys is None and not self._asking):
                self._take(state)
            if self._keys is None:
                raise ValueRefused("no_key", self.problem)
            return self._keys

    def _state(self) -> _State | None:
        try:
            found = self._path.stat()
        except OSError:
            self.problem = f"the keyring {self._path} is gone; the keys in memory are used" if self._seen else ""
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _take(self, state: _State | None, *, strict: bool = False) -> None:
        """Take over the file's content. `strict`: raise `KeyUnavailable` in place of a problem."""
        try:
            keyring = read_keyring(self._path)
            if self._root is None and not is_local(self._options):
                self._seen = state
                self._ask(keyring.root)
                return
            self._unlock(keyring, self._root or read_root(self._options, keyring.root))
            self._seen, self.problem = state, ""
        except KeyUnavailable as error:
            if strict:
                raise
            self._seen, self.problem = state, f"the keyring is not used as it is now: {error.where} {error.fact}"

    def _unlock(self, keyring: Keyring, root: bytes) -> None:
        try:
            self._keys = keyring.unlocked(root)
        except KeyUnavailable:
            # Another root key, perhaps: its source may have changed with the file.
            if self._root is None or not is_local(self._options):
                raise
            root = read_root(self._options, keyring.root)
            self._keys = keyring.unlocked(root)
        self._root = root

    def _ask(self, wrapped: bytes) -> None:
        """Ask a command or a KMS for the root key, in a thread, which ends with the answer."""
        self.problem = self.problem or f"waiting for the root key from {source_of(self._options)}"
        if self._asking or self._backoff.left(time.monotonic()):
            return
        self._asking = True
        threading.Thread(target=self._asked, args=(wrapped,), name="kvf-crypto-root", daemon=True).start()

    def _asked(self, wrapped: bytes) -> None:
        try:
            root, problem = read_root(self._options, wrapped), ""
        except KeyUnavailable as error:
            root, problem = None, f"{error.where}: {error.fact}"
        with self._lock:
            self._root, self.problem, self._asking = root, problem, False
            if root is None:
                self._backoff.delay(time.monotonic())
            else:
                self._take(self._state())


class AeadCodec(Codec):
    """See the module. The data key and its tenant come from the value's name."""

    name = "aead"

    def __init__(self, options: AeadOptions) -> None:
        """Raises `KeyUnavailable`, and `PluginUnavailable` for `compress` without its package."""
        self._cipher = CIPHERS[best_cipher() if options.cipher == "auto" else options.cipher]
        self._zstd = options.compress == "zstd"
        if self._zstd:
            _zstandard()
        self._keys = HeldKeys(options)
        self._sealed: Counter[bytes] = Counter()

    def encode(self, data: memoryview) -> Sequence[memoryview]:
        return self.encode_named(data, "", _NO_NAME)

    def decode_into(self, packed: memoryview, out: memoryview) -> None:
        self.decode_named(packed, out, _NO_NAME)

    def encode_named(self, data: memoryview, dtype: str, name: ValueName) -> Sequence[memoryview]:
        """Raises `ValueRefused` where there is no key to seal with: nothing plain is returned in any case."""
        key = self._usable(name.tenant)[0]
        self._sealed[key.key_id] += 1
        if self._sealed[key.key_id] > MOST_VALUES:
            raise ValueRefused(
                "no_key", f"the key of {shown(name.tenant)} has sealed enough: kvframework crypto rotate"
            )
        packing = 0
        content = data
        if self._zstd and data.nbytes:
            packed = memoryview(_zstandard().ZstdCompressor(level=1).compress(data))
            if packed.nbytes < data.nbytes:
                packing, content = 1, packed
        return [seal(key, name, content, cipher=self._cipher, packing=packing, object_bytes=data.nbytes)]

    def decode_named(self, packed: memoryview, out: memoryview, name: ValueName) -> bool:
        head = Head.of(packed)
        keys = self._usable(name.tenant)
        key = next((each for each in keys if each[:2] == (head.generation, head.key_id)), None)
        if key is None:
            newest = max(each.generation for each in keys)
            old = head.generation < newest and all(each.generation != head.generation for each in keys)
            why = "its generation is retired" if old else "it is another tenant's, or another keyring's"
            raise ValueRefused("no_key", f"no key of {shown(name.tenant)} opens generation {head.generation}: {why}")
        content_bytes = packed.nbytes - HEAD_BYTES - TAG_BYTES
        if not head.packing:
            if content_bytes != out.nbytes:
                raise ValueRefused("forged", f"it holds {content_bytes} bytes, expected {out.nbytes}")
            unseal(key, name, packed, out, object_bytes=out.nbytes)
        else:
            if content_bytes >= out.nbytes:
                raise ValueRefused("forged", f"it holds {content_bytes} packed bytes of {out.nbytes}")
            content = fresh_memory(content_bytes)
            unseal(key, name, packed, content, object_bytes=out.nbytes)
            _unpack(content, out)
        return key is not keys[0]

    def problems(self) -> Sequence[str]:
        try:
            self._keys.now()
        except ValueRefused as error:
            return [str(error)]
        return [self._keys.problem] if self._keys.problem else []

    def _usable(self, tenant: str) -> tuple[DataKey, ...]:
        keys = self._keys.now()
        found = keys.of(tenant)
        if not found:
            raise ValueRefused("no_key", f"the key of {shown(tenant)} was destroyed")
        return found


def _unpack(content: memoryview, out: memoryview) -> None:
    zstandard = _zstandard()
    try:
        if zstandard.frame_content_size(content) != out.nbytes:
            raise ValueRefused("forged", f"its packed form is of another length than {out.nbytes} bytes")
        out[:] = zstandard.ZstdDecompressor().decompress(content, max_output_size=out.nbytes)
    except zstandard.ZstdError as error:
        raise ValueRefused("forged", f"its packed form is damaged: {error}") from None


def _zstandard() -> Any:
    """The package, which only `compress` needs."""
    try:
        return import_module("zstandard")
    except ImportError:
        fact = "compress needs zstandard, which is not installed"
        raise PluginUnavailable(fact, hint=install_command("zstd", distribution="kvframework-crypto")) from None
