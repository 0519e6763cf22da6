"""Where in its prompt a request's objects are, for the eviction policy. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvframework.api.keys import CacheKey
from kvframework.service.keys import KeyGrid
from kvframework.storage.l1.leases import NO_PROMPT, PromptPart


def prompt_part(key: CacheKey, grid: KeyGrid, wanted: Sequence[int]) -> PromptPart:
    """Return where in the prompt the objects with these indices are."""
    rows, tokens = len(grid.prefixes), grid.desc.chunk_tokens
    first = key.start // tokens
    return PromptPart([first + index // rows for index in wanted], tokens, key.retain)


def found_part(key: CacheKey, grid: KeyGrid, hit: int) -> PromptPart:
    """Return it for the objects that a hit of so many chunks uses, if the request says anything of their future."""
    return prompt_part(key, grid, grid.needed(hit)) if key.retain else NO_PROMPT
