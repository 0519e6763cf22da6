"""The tier's half in the server: a helper tier whose values have room for their seal."""

from __future__ import annotations

from collections.abc import Sequence

from kvf_mooncake.client import make_tier
from kvf_mooncake.options import MooncakeOptions
from kvf_mooncake.sealed_values import SEAL_BYTES
from kvframework.api.helper_tier import HelperTier
from kvframework.api.tier import Outcome, PackedKey

# Seconds for imports, and for a setup that gets an answer; without one it would take a minute and a half.
_START_S = 10.0


class MooncakeHelperTier(HelperTier):
    """Mooncake's client in a helper process. The client and what it imports are in that process alone."""

    def __init__(self, options: MooncakeOptions, *, where: str) -> None:
        super().__init__(make_tier, options, name="mooncake", where=where, start_s=_START_S)

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        return super().get_into(keys, [[*each, _room()] for each in parts], deadline=deadline)

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        return super().put(keys, [[*each, _room()] for each in parts], deadline=deadline)


def _room() -> memoryview:
    return memoryview(bytearray(SEAL_BYTES))
