"""What is refused, or warned of, at the engine's start, each with the setting to change."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvframework.api.plugin import ByteSize
from kvframework.errors import BadLayout, ConfigFieldError

if TYPE_CHECKING:
    from kvframework.client import KVClient

log = logging.getLogger(__name__)

WHERE = "kv_connector_extra_config"


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Make typed errors of those by which vLLM's offloading refuses an engine, which are of any kind."""
    try:
        yield
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigFieldError(
            str(error) or "vLLM's offloading does not support this engine",
            where=WHERE,
            hint="leave out block_size and blocks_per_chunk; hybrid models need --enable-prefix-caching",
        ) from None


def check_hashes(cache_config: Any) -> None:
    """Raise `ConfigFieldError` where the same blocks have other hashes in each process: nothing would ever be found."""
    algorithm = str(cache_config.prefix_caching_hash_algo)
    if algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        raise ConfigFieldError(
            f"{algorithm!r} hashes blocks with a random seed in each process",
            where="prefix_caching_hash_algo",
            available="sha256, sha256_cbor",
            hint="leave --prefix-caching-hash-algo out, or set PYTHONHASHSEED to one number for all engines",
        )


def check_room(client: KVClient, object_bytes: int, groups: Sequence[tuple[int, int]], longest: int) -> None:
    """Raise `BadLayout` where the server's arena, if there is one, cannot hold an object of each group; only warn where
    a request of `longest` tokens has no room: others may. `groups` have the tokens of a chunk, and of a window or 0."""
    arena = client.arena
    if arena is None:
        return
    capacity, least = arena.view.nbytes, len(groups) * object_bytes
    if least > capacity:
        raise BadLayout(
            f"L1 has {ByteSize(capacity)}, but one chunk of this model has {ByteSize(least)}",
            where="l1.capacity",
            available=f"an L1 of at least {ByteSize(least)}",
            hint="raise l1.capacity in the server's TOML, or lower blocks_per_chunk",
        )
    objects = sum(-(-min(window or longest, longest) // tokens) + bool(window) for tokens, window in groups)
    if objects * object_bytes > capacity:
        log.warning(
            "one request of %d tokens (max_model_len) needs %s, but L1 has %s, so L1 evicts the request's first "
            "part; raise l1.capacity in the server's TOML",
            longest,
            ByteSize(objects * object_bytes),
            ByteSize(capacity),
        )
