"""What is on offer: tiers with a rate and a size, and the prices of memory and tiers. Parsed from options; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from kvf_plan.errors import PlanError
from kvf_plan.simulation import TierSpeed
from kvframework.api.plugin import ByteSize

GIB = 1 << 30
DRAM = "dram"
# Of a GiB, as parts of the price of a GiB of DRAM. Assumed: prices change, and so does their ratio; --price has yours.
ASSUMED_PRICES = {DRAM: 1.0, "disk": 0.05, "redis": 1.0, "s3": 0.01}


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
    """A tier and its speed, in bytes a second; `write_bytes_per_s` None: writes share the time of reads. `capacity`
    None: as large as it has to be."""

    name: str
    read_bytes_per_s: float
    write_bytes_per_s: float | None = None
    latency_s: float = 0.0
    capacity: int | None = None

    @property
    def kind(self) -> _Kind:
        return KINDS[self.name]


def tier_offers(speeds: Iterable[TierSpeed]) -> tuple[TierOffer, ...]:
    """Return the offers of tiers that are named by a word of `KINDS` or its plugin. Raises `PlanError` for others, and
    for one that is there twice; of one name there may be several speeds to compare."""
    offers: list[TierOffer] = []
    for speed in speeds:
        offer = _tier_offer(speed)
        if offer in offers:
            raise PlanError(
                f"the same tier is given twice: {offer.name}",
                where=f"--tier {speed.name}",
                hint="leave out one of the two, or give another speed or capacity",
            )
        offers.append(offer)
    return tuple(offers)


def _tier_offer(speed: TierSpeed) -> TierOffer:
    names = {kind.plugin: name for name, kind in KINDS.items()} | {name: name for name in KINDS}
    if speed.name not in names:
        raise PlanError(
            f"no configuration is written for a tier {speed.name!r}", where="--tier", available=", ".join(KINDS)
        )
    if speed.read_bytes_per_s <= 0 or speed.write_bytes_per_s == 0:
        raise PlanError("the rate is 0", where=f"--tier {speed.name}", available="such as 3GB/s")
    if speed.slow:
        raise PlanError(
            "a plan assumes a constant speed of the tier", where=f"--tier {speed.name}", hint="leave out slow="
        )
    return TierOffer(
        names[speed.name],
        speed.read_bytes_per_s,
        speed.write_bytes_per_s,
        speed.latency_s,
        speed.capacity_bytes,
    )


class Prices(msgspec.Struct, frozen=True):
    """Of a GiB of DRAM and of each tier. `assumed`: none were given, and the unit is a GiB of DRAM."""

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
            raise PlanError(f"unknown resource {name!r}", where="--price", available=", ".join(ASSUMED_PRICES))
        try:
            of[name] = float(value)
        except ValueError:
            of[name] = math.nan
        if not 0 <= of[name] < math.inf:
            raise PlanError(
                f"{text!r} is not a price of a GiB", where="--price", available="such as dram=3.5 or disk=0.1"
            )
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
        try:
            budget = ByteSize.parse(text) / GIB
        except ValueError as error:
            raise PlanError(str(error), where="--budget") from None
    if not 0 < budget < math.inf:
        raise PlanError(f"{text} is not a budget", where="--budget", available="such as 5000 or 512GiB")
    return budget
