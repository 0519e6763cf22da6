"""The address of a bucket and a prefix in it, and the names of values below that. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvframework.api.keys import PACKED_KEY_BYTES, PackedKey

_URL = re.compile(
    r"(?:(s3|gs)://([a-zA-Z0-9][a-zA-Z0-9._-]{1,221})|az://([a-z0-9-]{1,64})/([a-z0-9$][a-z0-9-]{1,62}))((?:/[^/]*)*)"
)
_SEGMENT = re.compile(r"[A-Za-z0-9._=-]{1,128}")
_EXPECTED = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://ACCOUNT/CONTAINER/PREFIX"


@dataclass(frozen=True)
class Address:
    """Where values lie. `bucket` is Azure's container, `account` is Azure's only; `prefix` is "" or ends with "/"."""

    scheme: str
    account: str
    bucket: str
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises `ValueError`, whose text does not show `url`: it may hold a password."""
        match = _URL.fullmatch(url)
        if match is None:
            raise ValueError(f"url is {_EXPECTED}, without a user, a password or a query")
        scheme, bucket, account, container, path = match.groups()
        segments = [each for each in path.split("/") if each]
        if not all(_SEGMENT.fullmatch(each) and each.strip(".") for each in segments) or len(path) > 512:
            raise ValueError("the prefix in url has other characters than letters, digits and ._=-/, or is too long")
        return cls(scheme or "az", account or "", bucket or container, "".join(f"{each}/" for each in segments))

    def shown(self, endpoint: str = "") -> str:
        """The address for people."""
        account = f"{self.account}/" if self.account else ""
        behind = f" at {endpoint}" if endpoint else ""
        return f"{self.scheme}://{account}{self.bucket}/{self.prefix}{behind}"

    def name_of(self, key: PackedKey) -> str:
        """The name of a value: below two digits of the key's end, which is a digest's, so that names are spread over
        the store's partitions; the first bytes are the same for all values of a model. Raises `ValueError` for bytes
        that are no packed key."""
        if len(key) != PACKED_KEY_BYTES:
            raise ValueError(f"an object key has {PACKED_KEY_BYTES} bytes, found {len(key)}")
        return f"{self.prefix}{key[-1]:02x}/{key.hex()}"

    def key_of(self, name: str) -> PackedKey | None:
        """The key whose value has this name; None for a name that is not this tier's."""
        folder, slash, digits = name.removeprefix(self.prefix).partition("/")
        if not slash or not name.startswith(self.prefix) or not _HEX_KEY.fullmatch(digits) or digits[-2:] != folder:
            return None
        return bytes.fromhex(digits)


_HEX_KEY = re.compile(rf"[0-9a-f]{{{2 * PACKED_KEY_BYTES}}}")
