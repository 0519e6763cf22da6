"""Owns the figures of the two servers side by side."""

from __future__ import annotations

import msgspec

from kvframework.bench.load import Load
from kvframework.bench.machine import Machine
from kvframework.bench.statistics import Latency, Spread

OURS, PEER, ECHO = "kvframework", "LMCache", "bare echo"


class TransferRow(msgspec.Struct, frozen=True):
    """`store` and `retrieve` of one contender are shares of the speed of `copy`; rates are GB (10^9 bytes) a second.
    `verified`: every byte was compared after the first and after the last retrieve."""

    shape: str
    nbytes: int
    path: str
    contender: str
    way: str
    rounds: int
    copy_gb_s: Spread
    store_gb_s: Spread
    retrieve_gb_s: Spread
    store: Spread
    retrieve: Spread
    verified: bool


class LookupRow(msgspec.Struct, frozen=True):
    """LOOKUP of a prompt that is all in L1. `to_echo`: p50 in units of that of the bare echo, round by round."""

    tokens: int
    what: str
    latency: Latency
    to_echo: Spread


class SideBySide(msgspec.Struct, frozen=True):
    """One run. `versions` are LMCache's and the command's; everything else stands in `machine`."""

    command: str
    versions: dict[str, str]
    quick: bool
    machine: Machine
    load: Load
    transfers: list[TransferRow]
    lookups: list[LookupRow]

    def as_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self)).decode()
