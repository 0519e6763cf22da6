"""The `s3` L2 tier: an object of a bucket per value, in any S3-compatible store, Google's or Azure's. Runs in the
server process, in its storage threads and one thread of its own.

Importing this module does not import obstore, so that a list of plugins stays cheap.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Literal

from msgspec import Meta

from kvframework.api.installing import install_command
from kvframework.api.keys import PACKED_KEY_BYTES, PackedKey
from kvframework.api.plugin import ByteSize, Finding, Options, SecretUrl
from kvframework.api.tier import TableContext, Tier, TierProvider, hookimpl

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
        """Raise `ValueError`, whose text does not show `url`: it may hold a password."""
        match = _URL.fullmatch(url)
        if match is None:
            raise ValueError(f"url must be {_EXPECTED}, without a user, a password or a query")
        scheme, bucket, account, container, path = match.groups()
        segments = [each for each in path.split("/") if each]
        if not all(_SEGMENT.fullmatch(each) and each.strip(".") for each in segments) or len(path) > 512:
            raise ValueError("the prefix in url may have only letters, digits and ._=-/, and must be short")
        return cls(scheme or "az", account or "", bucket or container, "".join(f"{each}/" for each in segments))

    def shown(self, endpoint: str = "") -> str:
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


class S3Options(Options, frozen=True):
    """Options of the `s3` tier. None of them is a secret: credentials come from the environment, files and roles."""

    url: Annotated[
        SecretUrl,
        Meta(
            min_length=1,
            description="s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://ACCOUNT/CONTAINER/PREFIX; the prefix, which "
            "comes before every name, may be left out",
        ),
    ]
    endpoint: Annotated[
        SecretUrl,
        Meta(
            description="address of a store of another provider than Amazon, Google or Azure: https://HOST:PORT, or "
            "http://HOST:PORT in a network that you trust"
        ),
    ] = ""
    region: Annotated[
        str, Meta(description="region of the bucket; empty: that of AWS_REGION or AWS_DEFAULT_REGION, else us-east-1")
    ] = ""
    credentials_file: Annotated[
        str,
        Meta(
            description="file with the credentials, read again every few minutes: for s3 in AWS format, for gs "
            "the JSON of a service account; empty: the usual places of each cloud"
        ),
    ] = ""
    profile: Annotated[
        str, Meta(description="section of the AWS credentials file; empty: that of AWS_PROFILE, else default")
    ] = ""
    anonymous: Annotated[bool, Meta(description="send requests without credentials, for a public store")] = False
    tls_ca: Annotated[
        str, Meta(description="PEM file of further trusted certificates, in addition to the system's")
    ] = ""
    sign_payload: Annotated[
        bool,
        Meta(
            description="the signature also covers the bytes of a value. This costs three to four times the processor "
            "time of a put, and kvframework has its own checksum"
        ),
    ] = False
    concurrency: Annotated[int, Meta(ge=1, le=256, description="most parallel requests of one call")] = 16
    ask: Annotated[
        Literal["every", "until_missing"],
        Meta(
            description="which keys of a prompt a lookup asks for: every, all keys; until_missing, in batches of "
            "`concurrency` keys until a whole batch is missing, which sends fewer requests but "
            "misses objects after such a gap"
        ),
    ] = "every"
    remember_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="seconds for which a key that this server stored or found counts as present without a request; "
            "a key deleted in that time is a miss at its load",
        ),
    ] = 0.0
    capacity: Annotated[
        ByteSize,
        Meta(
            description="most bytes of values under the prefix; one of the servers with the same prefix deletes the "
            "oldest values above it. 0: the bucket's lifecycle rules delete values"
        ),
    ] = ByteSize(0)
    keeps: Annotated[
        bool,
        Meta(
            description="no lifecycle rule of the bucket deletes values under the prefix: the tier keeps those that "
            "requests of tenants pay for"
        ),
    ] = False
    sweep_s: Annotated[
        float, Meta(ge=1, le=86400, description="with capacity: seconds between two counts of the bytes")
    ] = 300.0

    def __post_init__(self) -> None:
        address = Address.parse(self.url)
        if self.credentials_file and address.scheme == "az":
            raise ValueError(
                "credentials_file is for s3 and gs; set Azure's credentials in AZURE_STORAGE_... variables"
            )
        for name in ("profile", "region"):
            if getattr(self, name) and address.scheme != "s3":
                raise ValueError(f"{name} is for s3://, and url begins with {address.scheme}://")
        if self.anonymous and address.scheme == "gs":
            raise ValueError(
                'anonymous is for s3 and az; for an emulator of gs write {"disable_oauth": true} into credentials_file'
            )
        if self.anonymous and (self.credentials_file or self.profile):
            raise ValueError("anonymous excludes credentials_file and profile")
        check_endpoint(self.endpoint)


def check_endpoint(endpoint: str) -> None:
    """Raise `ValueError` unless `endpoint` is empty or the address of an HTTP server, and nothing more. Does not show
    it, since it may hold a password."""
    from urllib.parse import urlsplit

    if not endpoint:
        return
    try:
        parts = urlsplit(endpoint)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        right = False
    else:
        right = right and not (parts.username or parts.password or parts.query or parts.fragment)
    if not right:
        raise ValueError(
            "endpoint must be https://HOST:PORT or http://HOST:PORT, without a user, a password or a query"
        )


def _probe() -> str | None:
    if find_spec("obstore") is None:
        return f"obstore is not installed: {install_command(distribution='kvframework-s3')}"
    return None


def _create(options: S3Options, context: TableContext) -> Tier:
    from kvf_s3.tier import open_tier

    return open_tier(options, where=context.where)


def _check(options: S3Options, context: TableContext) -> None:
    from kvf_s3.settings import read_settings

    read_settings(options, where=context.where)


def _store(options: S3Options) -> str:
    return Address.parse(options.url).shown(options.endpoint)


def _diagnose(options: S3Options, context: TableContext, deadline: float) -> list[Finding]:
    from kvf_s3.sweep import diagnose

    return diagnose(options, context, deadline)


@hookimpl
def kvf_tiers() -> list[TierProvider[S3Options]]:
    """The provider of the S3 tier."""
    return [
        TierProvider(
            name="s3",
            summary="stores values in an object store: S3 and compatible stores, Google Cloud Storage, Azure Blobs",
            options=S3Options,
            shared=True,
            probe=_probe,
            create=_create,
            check=_check,
            store=_store,
            diagnose=_diagnose,
            loads=4,
            writes=2,
        )
    ]
