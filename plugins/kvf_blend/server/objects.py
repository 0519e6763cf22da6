"""The objects that hold a chunk of a given digest: one for each rank and layer group. Pure; runs in the server's worker
and storage threads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvframework.api.keys import PackedKey
from kvframework.errors import MessageTooLarge

# The most objects of one request, as in the core.
MAX_OBJECTS = 1 << 15


class Objects:
    """The objects of chunks, given the prefixes of their keys (`CacheServices.key_prefixes`). Keys are digest by
    digest, in each rank by rank."""

    def __init__(self, prefixes: Sequence[bytes]) -> None:
        self._prefixes = prefixes

    @property
    def most_digests(self) -> int:
        """The most chunks that one request may name."""
        return MAX_OBJECTS // len(self._prefixes)

    def check(self, digests: int) -> None:
        """Raises `MessageTooLarge` for more chunks than one request may name."""
        if digests > self.most_digests:
            raise MessageTooLarge(
                f"{digests} chunks of {len(self._prefixes)} ranks and layer groups",
                available=f"at most {MAX_OBJECTS} objects a request",
                hint="give fewer segments at once",
            )

    def keys(self, digests: Iterable[bytes]) -> list[PackedKey]:
        return [prefix + digest for digest in digests for prefix in self._prefixes]

    def whole(self, digests: Sequence[bytes], available: Sequence[bool]) -> set[bytes]:
        """The digests all of whose objects are available, given which of `keys(digests)` are."""
        rows = len(self._prefixes)
        return {digest for index, digest in enumerate(digests) if all(available[index * rows : (index + 1) * rows])}

    def indices(self, positions: Iterable[int]) -> list[int]:
        """The indices in `keys(digests)` of the objects of the digests at `positions`."""
        rows = len(self._prefixes)
        return [position * rows + row for position in positions for row in range(rows)]
