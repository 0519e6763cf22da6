"""What is on offer: tiers with a rate and a size, and the prices of memory and tiers. Parsed from options; pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import msgspec

from kvframework.api.options import ByteSize
from kvframework.errors import PlanError

GIB = 1 << 30
DRAM = "dram"
# Of a GiB, as parts of the price of a GiB of DRAM. Assumed: prices change, and so does their ratio; --price has yours.
ASSUMED_PRICES = {DRAM: 1.0, "disk": 0.05, "redis": 1.0, "s3": 0.01}
_TIER_FORM = "NAME=RATE[,SIZE][,LATENCY], such as disk=3GB/s,4TB or redis=1GB/s,512GiB,1ms"
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)")
_DURATIONS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class _Kind(msgspec.Struct, frozen=True):
    """A tier that a configuration can be written for: its plugin, the options that a file needs, and whether one of
    them is `capacity`."""

    plugin: str
    options: dict[str, str]
    has_capacity: bool


KINDS = {
    "disk": _Kind("filesystem", {"path": "/var/cache/kvframework"}, True),
    "redis": _Kind("redis", {"url": "redis://127.0.0.1:6379/0"}, False),
    "s3": _Kind("s3", {"url": "s3://BUCKET/kvframework"}, True),
}


class TierOffer(msgspec.Struct, frozen=True):
    """A tier that reads and writes `bytes_per_s` together. `capacity` None: as large as it has to be."""

    name: str
    bytes_per_s: float
    capacity: int | None = None
    latency_s: float = 0.0

    @property
    def kind(self) -> _Kind:
        return KINDS[self.name]


def parse_tier(text: str) -> TierOffer:
    """Raises `PlanError` with the form."""
    name, equals, rest = text.partition("=")
    rate, *more = rest.split(",")
    if not equals or len(more) > 2:
        raise PlanError(f"{text!r} is no tier with its rate", where="--tier", available=_TIER_FORM)
    if name not in KINDS:
        raise PlanError(f"no configuration is written for a tier {name!r}", where="--tier", available=", ".join(KINDS))
    capacity, latency = None, 0.0
    for each in more:
        if found := _DURATION.fullmatch(each.strip()):
            latency = float(found[1]) * _DURATIONS[found[2]]
        else:
            capacity = parse_size(each, where=f"--tier {name}")
    return TierOffer(name, parse_rate(rate, where=f"--tier {name}"), capacity, latency)


def parse_rate(text: str, *, where: str) -> float:
    """Return bytes a second, of `3GB/s`. Raises `PlanError`."""
    size, slash, unit = text.strip().partition("/")
    if slash and unit.strip() != "s":
        raise PlanError(f"{text!r} is no rate", where=where, available="such as 3GB/s or 800MiB/s")
    return float(parse_size(size, where=where))


def parse_size(text: str, *, where: str) -> int:
    """Return bytes, at least one. Raises `PlanError`."""
    try:
        size = ByteSize.parse(text.strip())
    except ValueError as error:
        raise PlanError(str(error), where=where) from None
    if size < 1:
        raise PlanError("it is nothing", where=where, available="such as 512MiB or 4TB")
    return size


class Prices(msgspec.Struct, frozen=True):
    """Of a GiB of DRAM and of each tier. `assumed`: nobody gave any, and the unit is a GiB of DRAM."""

    of: Mapping[str, float]
    assumed: bool

    def cost(self, l1_bytes: int, tier: str, l2_bytes: int) -> float:
        """Return the price of so much memory and tier; `tier` "" for none."""
        return (self.of[DRAM] * l1_bytes + (self.of[tier] * l2_bytes if tier else 0.0)) / GIB


def parse_prices(texts: Iterable[str], tiers: Iterable[str]) -> Prices:
    """Return the prices of `NAME=PRICE` texts, one for DRAM and for each of `tiers`; the assumed ones if there are no
    texts. Raises `PlanError` if one is missing: a price in euros cannot be compared with a guess."""
    of: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in ASSUMED_PRICES:
            raise PlanError(f"nothing is called {name!r}", where="--price", available=", ".join(ASSUMED_PRICES))
        try:
            of[name] = float(value)
        except ValueError:
            of[name] = math.nan
        if not 0 <= of[name] < math.inf:
            raise PlanError(f"{text!r} is no price of a GiB", where="--price", available="such as dram=3.5 or disk=0.1")
    if not of:
        return Prices(ASSUMED_PRICES, assumed=True)
    if missing := [name for name in (DRAM, *tiers) if name not in of]:
        raise PlanError(
            f"the price of a GiB is missing: {', '.join(missing)}",
            where="--price",
            hint=" ".join(f"--price {name}=…" for name in missing),
        )
    return Prices(of, assumed=False)


def parse_budget(text: str) -> float:
    """Return a cost, of a number or of a size of DRAM in GiB. Raises `PlanError`."""
    try:
        budget = float(text)
    except ValueError:
        return parse_size(text, where="--budget") / GIB
    if not 0 < budget < math.inf:
        raise PlanError(f"{text} is no budget", where="--budget", available="such as 5000 or 512GiB")
    return budget
