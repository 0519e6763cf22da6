"""Version negotiation: the offer of a client of this release, and a pure function on HELLO's version range."""

from __future__ import annotations

import kvframework
from kvframework.errors import VersionMismatch
from kvframework.wire.messages import PROTOCOL_VERSION, Hello

MIN_VERSION = 1
# Fields that change what a request does: a client sends one only to a server that says that it reads it.
CLEAR_MODEL = "clear.model"
# `wait_s` of LOOKUP and QUERY_PREFETCH_STATUS: an older server answers at once.
LOOKUP_WAIT = "lookup.wait"
# `speed` of LOOKUP: an older server cuts no hit.
LOOKUP_PRICE = "lookup.price"
# Requests with the id `NO_ANSWER`, and `free` of LOOKUP and PING: an older server answers the ones and passes over the
# others.
ONE_WAY = "one_way"
# `grant` of LOOKUP: an older server grants nothing.
LOOKUP_GRANT = "lookup.grant"
FEATURES = (CLEAR_MODEL, LOOKUP_WAIT, LOOKUP_PRICE, ONE_WAY, LOOKUP_GRANT)
# Named by a server that tells routers: it wants the content of what is stored and loaded, see `ChunkContent`; of
# prompts with a salt only by the second name.
TOKEN_IDS = "token_ids"  # noqa: S105
SALTED_TOKEN_IDS = "token_ids.salted"  # noqa: S105


def offer(client: str, pid: int) -> Hello:
    """HELLO of a client of this release."""
    return Hello(
        client=client,
        pid=pid,
        min_version=MIN_VERSION,
        max_version=PROTOCOL_VERSION,
        client_version=kvframework.__version__,
    )


def negotiate(hello: Hello, hasher_fingerprint: str) -> int:
    """The highest protocol version that both sides speak. Raises `VersionMismatch`, with both ranges, if there is none
    or the hashers differ."""
    version = min(PROTOCOL_VERSION, hello.max_version)
    if version < max(MIN_VERSION, hello.min_version):
        raise VersionMismatch(
            f"the client speaks protocol versions {hello.min_version} to {hello.max_version}",
            available=f"{MIN_VERSION} to {PROTOCOL_VERSION}",
            hint="install the same kvframework release beside the engine and the server",
        )
    if hello.hasher and hello.hasher != hasher_fingerprint:
        raise VersionMismatch(
            f"the client hashes with {hello.hasher}",
            available=hasher_fingerprint,
            hint="configure the same hasher on both sides",
        )
    return version
