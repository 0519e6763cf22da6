"""A number and what it counts, for sentences that people read. Pure."""

from __future__ import annotations


def counted(amount: int, plural: str) -> str:
    """ "1 lease", "2 leases"; for plurals that end with an s."""
    return f"{amount} {plural if amount != 1 else plural.removesuffix('s')}"
