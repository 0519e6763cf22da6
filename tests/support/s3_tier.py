"""The S3 tier as tests use it: made from options, with the credentials of the servers of `tests.support.s3_server`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvframework.api.plugin import ByteSize
from kvframework.api.tier import TableContext, Tier
from tests.support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY

WHERE = "[[l2]] #1"


def open_s3_tier(endpoint: str, url: str = f"s3://{BUCKET}/tier", **options: object) -> Tier:
    """Make the tier as a server does; it connects on first use."""
    from kvf_s3 import S3Options, kvf_tiers

    (provider,) = kvf_tiers()
    assert provider.probe() is None
    made = msgspec.convert(
        {"url": url, "endpoint": endpoint, **options}, S3Options, dec_hook=lambda _, value: ByteSize.parse(value)
    )
    return provider.create(made, TableContext(where=WHERE))


def write_credentials(path: Path, key: str = ACCESS_KEY, secret: str = SECRET_KEY, section: str = "default") -> Path:
    """A credentials file as the AWS tools have it."""
    path.write_text(f"[{section}]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    return path
