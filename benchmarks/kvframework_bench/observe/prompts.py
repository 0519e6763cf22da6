"""A server full of prompts, and the LOOKUPs of it: of one that it has, one that it evicted, one that it never had."""

from __future__ import annotations

import random

from kvframework.client import KVClient
from kvframework_bench.errors import BenchFailed
from kvframework_bench.prefix import Prefixes, lookup_case
from kvframework_bench.rounds import Case
from kvframework_bench.server import status

LENGTHS = (1024, 8192)
_VOCABULARY = 128_000


def lookup_cases(client: KVClient, capacity: int, seed: int, prefixes: Prefixes | None = None) -> dict[str, Case]:
    """Fill L1 of `capacity` bytes with prompts, until it has evicted the first, and return a LOOKUP of each length and
    kind. `seed` makes the tokens. Raises `BenchFailed` if nothing was evicted."""
    prefixes = prefixes or Prefixes(client)
    scheduler = prefixes.scheduler()
    tokens_of, longest = random.Random(seed), max(LENGTHS)

    def prompt() -> list[int]:
        return [tokens_of.randrange(_VOCABULARY) for _ in range(longest)]

    known, evicted, new = prompt(), prompt(), prompt()
    prefixes.store(prefixes.request(evicted))
    for _ in range(capacity // (prefixes.object_bytes * (longest // prefixes.chunk_tokens))):
        prefixes.store(prefixes.request(prompt()))
    prefixes.store(prefixes.request(known))
    if not status(client)["l1"]["evictions"]:
        raise BenchFailed("the bench's stores evicted no object from L1")
    return {
        f"{tokens // 1024}k tokens, {kind}": lookup_case(
            scheduler, prefixes.request(prompt[:tokens]), tokens if prompt is known else 0
        )
        for tokens in LENGTHS
        for kind, prompt in (("hit", known), ("miss, never stored", new), ("miss, evicted", evicted))
    }
