"""The root key, which wraps every key of a keyring: from a file, an environment variable, a command, or a KMS.

A KMS keeps the root key itself nowhere: it wraps 32 random bytes, and the keyring holds the wrapped form (an envelope).
Every source is asked with a deadline; a refusal is a `KeyUnavailable`, which never shows a key."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from base64 import b64decode, b64encode
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvf_crypto import AeadOptions
from kvf_crypto.sealing import SECRET_BYTES
from kvframework.api.installing import install_command
from kvframework.errors import KVFrameworkError

_HEX = 2 * SECRET_BYTES
_MAX_PRINTED = 4096


class KeyUnavailable(KVFrameworkError, code="crypto.key"):
    """A key, or the keyring, cannot be used.

    What to do: repair the source of the root key that the error names; `kvframework crypto status` shows the keys."""


def is_local(options: AeadOptions) -> bool:
    """Whether the root key comes from this machine without a wait: its trouble is a mistake that ends a start."""
    return not (options.key_command or options.aws_key or options.vault_key)


def source_of(options: AeadOptions) -> str:
    """Where the root key comes from, in words."""
    if options.aws_key or options.vault_key:
        return f"AWS KMS, {options.aws_key}" if options.aws_key else f"Vault, {options.vault_mount}/{options.vault_key}"
    if options.key_command:
        return f"the command {options.key_command[0]}"
    return f"the variable {options.key_env}" if options.key_env else str(_file(options))


def read_root(options: AeadOptions, wrapped: bytes) -> bytes:
    """Return the root key, 32 bytes; `wrapped` is what the keyring holds of it for a KMS. Blocks for `root_timeout_s`
    at most, some attempts of a client aside. Raises `KeyUnavailable`."""
    if options.aws_key or options.vault_key:
        if not wrapped:
            raise KeyUnavailable("the keyring was made without a KMS", where=options.keyring)
        found = _kms(options, lambda kms: kms.unwrap(wrapped))
        return _of_length(found, source_of(options))
    if options.key_env:
        return _from_hex(os.environ.get(options.key_env, ""), source_of(options))
    if options.key_command:
        return _from_hex(_printed(options), source_of(options))
    return _from_file(_file(options))


def new_root(options: AeadOptions) -> tuple[bytes, bytes]:
    """Return the root key of a new keyring, and its wrapped form for a KMS. A root key's file that is missing is made,
    if it is the one beside the keyring."""
    if options.aws_key or options.vault_key:
        root = os.urandom(SECRET_BYTES)
        return root, _kms(options, lambda kms: kms.wrap(root))
    path = _file(options)
    if is_local(options) and not (options.key_env or options.key_file) and not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(os.urandom(SECRET_BYTES).hex() + "\n")
    return read_root(options, b""), b""


def _file(options: AeadOptions) -> Path:
    return Path(options.key_file or Path(options.keyring).with_suffix(".key")).expanduser()


def _from_file(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        hint = "kvframework crypto rotate makes a keyring" if isinstance(error, FileNotFoundError) else ""
        raise KeyUnavailable(f"the key file cannot be read: {error.strerror}", where=str(path), hint=hint) from None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise KeyUnavailable("the key file is not a regular file", where=str(path))
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o077:
            fact = f"others may use the key file (owner {found.st_uid}, mode {found.st_mode & 0o7777:04o})"
            raise KeyUnavailable(fact, where=str(path), available="mode 0600 or 0400", hint=f"chmod 600 {path}")
        content = file.read(_MAX_PRINTED)
    if len(content) == SECRET_BYTES:
        return content
    return _from_hex(content.decode("ascii", "replace"), str(path))


def _from_hex(text: str, where: str) -> bytes:
    try:
        return _of_length(bytes.fromhex(text.strip()), where)
    except ValueError:
        fact = f"the root key is not hexadecimal ({len(text.strip())} characters)" if text else "there is no root key"
        raise KeyUnavailable(fact, where=where, available=f"{_HEX} hexadecimal digits") from None


def _of_length(root: bytes, where: str) -> bytes:
    if len(root) != SECRET_BYTES:
        raise KeyUnavailable(f"the root key has {len(root)} bytes", where=where, available=f"{SECRET_BYTES} bytes")
    return root


def _printed(options: AeadOptions) -> str:
    where = source_of(options)
    with contextlib.suppress(subprocess.TimeoutExpired):
        try:
            ran = subprocess.run(
                options.key_command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=options.root_timeout_s,
                check=False,
            )
        except OSError as error:
            raise KeyUnavailable(f"the command cannot run: {error.strerror}", where=where) from None
        if ran.returncode:
            raise KeyUnavailable(f"the command ended with status {ran.returncode}", where=where)
        return ran.stdout[:_MAX_PRINTED].decode("ascii", "replace")
    raise KeyUnavailable(f"the command took more than {options.root_timeout_s:g} s", where=where)


class _Aws:
    def __init__(self, options: AeadOptions) -> None:
        import boto3
        from botocore.config import Config

        wait = options.root_timeout_s / 2
        settings = Config(connect_timeout=wait, read_timeout=wait, retries={"total_max_attempts": 1})
        region, endpoint = options.aws_region or None, options.aws_endpoint or None
        self._client: Any = boto3.client("kms", region_name=region, endpoint_url=endpoint, config=settings)
        self._key = options.aws_key
        self._context = {"purpose": "kvframework keyring"}

    def wrap(self, root: bytes) -> bytes:
        asked = self._client.encrypt(KeyId=self._key, Plaintext=root, EncryptionContext=self._context)
        return bytes(asked["CiphertextBlob"])

    def unwrap(self, wrapped: bytes) -> bytes:
        asked = self._client.decrypt(KeyId=self._key, CiphertextBlob=wrapped, EncryptionContext=self._context)
        return bytes(asked["Plaintext"])


class _Vault:
    def __init__(self, options: AeadOptions) -> None:
        import hvac

        token = Path(options.vault_token_file).read_text().strip() if options.vault_token_file else None
        client: Any = hvac.Client(url=options.vault_url or None, token=token, timeout=options.root_timeout_s)
        self._transit = client.secrets.transit
        self._of = {"name": options.vault_key, "mount_point": options.vault_mount}

    def wrap(self, root: bytes) -> bytes:
        asked = self._transit.encrypt_data(plaintext=b64encode(root).decode(), **self._of)
        return str(asked["data"]["ciphertext"]).encode()

    def unwrap(self, wrapped: bytes) -> bytes:
        asked = self._transit.decrypt_data(ciphertext=wrapped.decode(), **self._of)
        return b64decode(asked["data"]["plaintext"], validate=True)


def _kms(options: AeadOptions, ask: Any) -> bytes:
    kind, module, extra = (_Aws, "boto3", "aws") if options.aws_key else (_Vault, "hvac", "vault")
    if find_spec(module) is None:
        hint = install_command(extra, distribution="kvframework-crypto")
        raise KeyUnavailable(f"{module} is not installed", where=source_of(options), hint=hint)
    try:
        return bytes(ask(kind(options)))
    except Exception as error:  # noqa: BLE001  their clients raise what their libraries raise, and quote requests
        fact = f"the KMS gave no root key: {type(error).__name__}"
        raise KeyUnavailable(fact, where=source_of(options)) from None
