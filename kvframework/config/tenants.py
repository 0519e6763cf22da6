"""Tenants by name: the digests of their salts, their shares of L1, and what they may load. Pure.

A salt is a secret, so the file has digests only, and no error shows what stands in their place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from kvframework.api.plugin import ByteSize
from kvframework.config.schema import TenantConfig
from kvframework.errors import ConfigFieldError

MAX_TENANTS = 64
OTHER = "other"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
_DIGEST = re.compile(r"[0-9a-f]{32}")  # of `tenant_digest`
_PERCENT = re.compile(r"\s*(\d{1,3}(?:\.\d{1,6})?)\s*%\s*")


def check_tenants(tenants: Sequence[TenantConfig]) -> None:
    """Check tenants as far as possible without the capacity of L1. Raises `ConfigFieldError`."""
    if len(tenants) > MAX_TENANTS:
        raise ConfigFieldError(
            f"found {len(tenants)} tenants", where=tenants[MAX_TENANTS].where, available=f"at most {MAX_TENANTS}"
        )
    owners: dict[str, str] = {}
    for tenant in tenants:
        if not _NAME.fullmatch(tenant.name) or tenant.name == OTHER:
            fact = f"{tenant.name[:64]!r} is not a tenant name"
            available = f"1 to 32 letters, digits, '-' and '_', except {OTHER!r}, the requests without a tenant"
            raise ConfigFieldError(fact, where=tenant.where, available=available)
        for number, digest in enumerate(tenant.keys.salts, 1):
            place = f"{tenant.where} salts #{number}"
            if not _DIGEST.fullmatch(digest):
                raise ConfigFieldError(
                    "the value is not the digest of a salt",
                    where=place,
                    available="32 hexadecimal digits, in lower case",
                    hint="make the digest with: kvframework tenants digest",
                )
            if digest in owners:
                raise ConfigFieldError(
                    f"the digest is in {owners[digest]} already", where=place, hint="give each salt to one tenant only"
                )
            owners[digest] = f"[tenants.{tenant.name}]"
    # Checks that hold for every capacity: shares compared with shares, sizes with sizes.
    guaranteed = Fraction(0)
    shares_of_tenants(tenants)
    for tenant in tenants:
        bandwidth_of(tenant)
        least, most = _share(tenant, "min", None), _share(tenant, "max", None)
        in_percent = bool(_PERCENT.fullmatch(tenant.keys.min))
        guaranteed += least if in_percent else 0
        if in_percent == bool(_PERCENT.fullmatch(tenant.keys.max)):
            _check_order(tenant, least, most)
    if guaranteed > 1:
        raise _too_much(tenants, f"{float(guaranteed * 100):g} %", "100 %")


def bytes_of_tenants(tenants: Sequence[TenantConfig], capacity: int) -> list[tuple[int, int]]:
    """Return the (least, most) bytes of each tenant in an L1 of `capacity` bytes. Raises `ConfigFieldError` for a least
    above the most, and if all leasts together are more than the capacity."""
    found = []
    for tenant in tenants:
        least, most = int(_share(tenant, "min", capacity)), int(_share(tenant, "max", capacity))
        _check_order(tenant, least, most)
        found.append((least, most))
    guaranteed = sum(least for least, _ in found)
    if guaranteed > capacity:
        raise _too_much(tenants, str(ByteSize(guaranteed)), str(ByteSize(capacity)))
    return found


def bandwidth_of(tenant: TenantConfig) -> int:
    """Return the bytes per second that a tenant may load, 0 without a limit. Raises `ConfigFieldError`."""
    text = tenant.keys.load_bandwidth
    try:
        rate = ByteSize.parse(text.removesuffix("/s")) if text.endswith("/s") else 0
    except ValueError:
        rate = 0
    if text and not rate:
        fact, available = f"{text[:64]!r} is not a rate", 'bytes per second, such as "2GB/s" or "500MiB/s"'
        raise ConfigFieldError(fact, where=f"{tenant.where} load_bandwidth", available=available)
    return rate


def shares_of_tenants(tenants: Sequence[TenantConfig]) -> tuple[list[float], list[float], list[str], list[int]]:
    """Return the least and most share of any capacity by a tenant's number, 0: no name; names; and the most bytes in a
    tier, 0 without a limit. Sizes, of L1, are no shares. Raises `ConfigFieldError`."""
    least, most = [0.0], [1.0]
    for tenant in tenants:
        for name, shares, without in (("min", least, 0.0), ("max", most, 1.0)):
            percent = _PERCENT.fullmatch(getattr(tenant.keys, name))
            shares.append(float(_share(tenant, name, None)) if percent else without)
    names = ["", *(tenant.name for tenant in tenants)]
    return least, most, names, [0, *(int(_share(tenant, "l2_max", 0)) for tenant in tenants)]


def _share(tenant: TenantConfig, name: str, capacity: int | None) -> Fraction:
    """Return a limit by its name in bytes; without a capacity, a share of L1 as a fraction."""
    text: str = getattr(tenant.keys, name)
    percent = _PERCENT.fullmatch(text)
    if percent:
        share = Fraction(percent[1]) / 100
        if share <= 1:
            return share if capacity is None else share * capacity
    else:
        try:
            return Fraction(ByteSize.parse(text))
        except ValueError:
            pass
    fact = f"{text[:64]!r} is not a share of L1"
    raise ConfigFieldError(fact, where=f"{tenant.where} {name}", available='"0%" to "100%", or a size such as "4GiB"')


def _check_order(tenant: TenantConfig, least: Fraction | int, most: Fraction | int) -> None:
    if least > most:
        raise ConfigFieldError(
            f"min {tenant.keys.min} is more than max {tenant.keys.max}", where=tenant.where, available="min <= max"
        )


def _too_much(tenants: Sequence[TenantConfig], found: str, most: str) -> ConfigFieldError:
    where = next(tenant.where for tenant in reversed(tenants) if tenant.keys.min)
    return ConfigFieldError(f"the min of all tenants add up to {found} of L1", where=where, available=f"at most {most}")
