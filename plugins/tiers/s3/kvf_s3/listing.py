"""The listing of a bucket: the values below the prefix, a page at a time. Runs in the event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import obstore

from kvf_s3.addresses import Address
from kvframework.api.tier import TierEntry

PAGE = 1000


async def first_page(store: Any, address: Address, most: int) -> list[str]:
    """Names below the prefix, so many at most, this tier's or not."""
    async for page in obstore.list(store, prefix=address.prefix or None, chunk_size=most):
        return [each["path"] for each in page]
    return []


async def pages(store: Any, address: Address) -> AsyncIterator[list[TierEntry]]:
    """All values below the prefix; names that are not this tier's are passed over."""
    async for page in obstore.list(store, prefix=address.prefix or None, chunk_size=PAGE):
        keys = [(address.key_of(each["path"]), each) for each in page]
        yield [TierEntry(key, each["size"], each["last_modified"].timestamp()) for key, each in keys if key is not None]
