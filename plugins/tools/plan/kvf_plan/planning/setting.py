"""A setting of a server, and its configuration as TOML. Pure.

What is simulated is the very file that is written: both come from the same text.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvf_plan.planning.offers import TierOffer
from kvframework.api.options import ByteSize
from kvframework.config import Config, assemble, toml_value
from kvframework.config.layers import layers_of
from kvframework.config.schema import WritePolicyName
from kvframework.config.toml import parse_toml

# The watermarks that write_back needs: L1 evicts before it is full.
_HIGH, _LOW = 0.95, 0.9
_PRICED = "# What an engine computes sooner than the tier loads it is computed: no tier makes anything slower."
_WHY = {
    "write_through": "All that is computed goes to the tier: most is found again, and most is written",
    "write_through_selective": "Only what is used a second time: the tier wears least, and the first repeat is lost",
    "write_back": "Only what L1 evicts: L1 and the tier hold different things",
}


class Setting(msgspec.Struct, frozen=True):
    """`tier` None: no L2, and then `l2_bytes` is 0 and `write_policy` None."""

    chunk_tokens: int
    l1_bytes: int
    eviction: str
    tier: TierOffer | None = None
    l2_bytes: int = 0
    write_policy: WritePolicyName | None = None


def toml_of(setting: Setting, about: Sequence[str] = ()) -> str:
    """Return the configuration, with `about` as comments at its head."""
    lines = [f"# {line}".rstrip() for line in about]
    lines += [
        "",
        "[server]",
        "# Tokens of an object, as in the plan: a larger chunk finds less, a smaller one costs more calls.",
        f"chunk_size = {setting.chunk_tokens}",
        *([] if setting.tier is None else [_PRICED, "price = true"]),
        "",
        "[l1]",
        'use = "pinned"',
        "# Resident from the start, beside 80 MB for the server.",
        f"capacity = {toml_value(ByteSize(setting.l1_bytes))}",
    ]
    if setting.write_policy == "write_back":
        lines += ["# Room is made ahead, so that what leaves can be written.", f"high_watermark = {_HIGH}"]
        lines += [f"low_watermark = {_LOW}"]
    lines += ["", "[l1.eviction]", f"use = {toml_value(setting.eviction)}"]
    if setting.tier is not None and setting.write_policy is not None:
        lines += ["", "[[l2]]", *_tier(setting.tier, setting.l2_bytes, setting.write_policy)]
    return "\n".join(lines).lstrip("\n") + "\n"


def _tier(tier: TierOffer, nbytes: int, write_policy: WritePolicyName) -> list[str]:
    kind = tier.kind
    lines = [f"use = {toml_value(kind.plugin)}", "# Yours goes here."]
    lines += [f"{key} = {toml_value(value)}" for key, value in kind.options.items()]
    if kind.has_capacity:
        lines += [f"capacity = {toml_value(ByteSize(nbytes))}"]
    else:
        lines += [f"# It has no capacity of its own: give the store at least {ByteSize(nbytes)}."]
    return [*lines, f"# {_WHY[write_policy]}.", f"write_policy = {toml_value(write_policy)}"]


def config_of(setting: Setting) -> Config:
    """Return the configuration as a server reads it."""
    return assemble(layers_of(parse_toml(toml_of(setting), where="the plan")))
