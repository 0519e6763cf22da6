"""The options of the `s3` tier, as they stand in its `[[l2]]` table."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvf_s3.addresses import Address
from kvframework.api.plugin import ByteSize, Options, SecretUrl


class S3Options(Options, frozen=True):
    """Options of the `s3` tier. None of them is a secret: credentials come from the environment, files and roles."""

    url: Annotated[
        SecretUrl,
        Meta(
            min_length=1,
            description="s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://ACCOUNT/CONTAINER/PREFIX; the prefix comes "
            "before every name and may be left out",
        ),
    ]
    endpoint: Annotated[
        SecretUrl,
        Meta(
            description="where a store that is not Amazon's, Google's or Azure's own listens: https://HOST:PORT, or "
            "http://HOST:PORT in a network that you trust"
        ),
    ] = ""
    region: Annotated[
        str, Meta(description="region of the bucket; empty: that of AWS_REGION or AWS_DEFAULT_REGION, else us-east-1")
    ] = ""
    credentials_file: Annotated[
        str,
        Meta(
            description="file with the credentials, read again every few minutes: for s3 as of the AWS tools, for gs "
            "the JSON of a service account; empty: the usual places, see the tier's README"
        ),
    ] = ""
    profile: Annotated[
        str, Meta(description="section of the AWS credentials file; empty: that of AWS_PROFILE, else default")
    ] = ""
    anonymous: Annotated[bool, Meta(description="requests without credentials, for a store that wants none")] = False
    tls_ca: Annotated[str, Meta(description="certificates to trust besides those of the system, a PEM file")] = ""
    sign_payload: Annotated[
        bool,
        Meta(
            description="the signature covers the bytes of a value as well: costs three to four times the processor "
            "time of a put, and the framework has a checksum of its own"
        ),
    ] = False
    concurrency: Annotated[int, Meta(ge=1, le=256, description="requests of one call that are under way at once")] = 16
    ask: Annotated[
        Literal["every", "until_missing"],
        Meta(
            description="which keys of a prompt a lookup asks for: every, all of them; until_missing, as many at once "
            "as concurrency says and no more after so many in a row are missing, which costs fewer requests and "
            "passes over what lies behind a gap"
        ),
    ] = "every"
    remember_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="seconds for which a key that this server has stored or found counts as there without asking; "
            "one that was deleted meanwhile is a miss when it is loaded",
        ),
    ] = 0.0
    capacity: Annotated[
        ByteSize,
        Meta(
            description="bytes of values under the prefix; one server of all that name the same prefix deletes the "
            "oldest ones beyond it. 0: leave that to the bucket's lifecycle rules"
        ),
    ] = ByteSize(0)
    sweep_s: Annotated[
        float, Meta(ge=1, le=86400, description="with capacity: seconds between two counts of the bytes")
    ] = 300.0

    def __post_init__(self) -> None:
        address = Address.parse(self.url)
        if self.credentials_file and address.scheme == "az":
            raise ValueError(
                "credentials_file is for s3 and gs; Azure's credentials are in AZURE_STORAGE_... variables"
            )
        for name in ("profile", "region"):
            if getattr(self, name) and address.scheme != "s3":
                raise ValueError(f"{name} is for s3://, and url begins with {address.scheme}://")
        if self.anonymous and address.scheme == "gs":
            raise ValueError('anonymous is for s3 and az; an emulator of gs wants {"disable_oauth": true} in its file')
        if self.anonymous and (self.credentials_file or self.profile):
            raise ValueError("anonymous excludes credentials_file and profile")
        check_endpoint(self.endpoint)


def check_endpoint(endpoint: str) -> None:
    """Raises `ValueError` unless `endpoint` is empty or the address of an HTTP server, and nothing more. Does not show
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
        raise ValueError("endpoint is https://HOST:PORT or http://HOST:PORT, without a user, a password or a query")
