"""The outcome of a simulation on a terminal. Pure."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvf_plan.simulation.requests import Outcome
from kvframework.api.plugin import ByteSize
from kvframework.text import short_count, short_duration, short_number

_NOT = (
    "not simulated: decoding, batching and chunked prefill (an engine computes one prompt at a time), the copy between "
    "L1 and the engine, the engine's prefix cache, several nodes, tenants, codecs, and evictions by a tier itself"
)


def outcome_view(outcome: Outcome, name: str) -> RenderableType:
    """Return the tables of an outcome of the trace `name`."""
    hit = outcome.l1_tokens + outcome.l2_tokens
    tokens = short_count(outcome.tokens)
    head = f"{name}: {outcome.requests} requests in {short_duration(outcome.seconds)}, {tokens} tokens"
    parts: list[RenderableType] = [Text(head), _hits(outcome, hit)]
    if outcome.ttft_s is not None:
        parts.append(_times(outcome))
    if outcome.tiers:
        parts.append(_tiers(outcome))
    parts.append(
        Text(
            f"L1 {ByteSize(outcome.l1_bytes)} of {ByteSize(outcome.l1_capacity_bytes)}, "
            f"{short_count(outcome.evicted)} evictions"
        )
    )
    if outcome.misses:
        reasons = sorted(outcome.misses.items(), key=lambda each: -each[1])
        parts.append(Text("lookups with missing tokens: " + ", ".join(f"{count} {name}" for name, count in reasons)))
    price = outcome.status.get("price", {})
    if price.get("lookups"):
        parts.append(
            Text(
                f"priced: {price['cut']} of {price['lookups']} lookups with more in L2 were cut, by "
                f"{short_count(price['cut_tokens'])} tokens, which saves {_seconds(price['saved_s'])} as computed"
            )
        )
    return Group(*parts, Text(_NOT, style="dim"))


def _hits(outcome: Outcome, hit: int) -> Table:
    table = table_of("hit", "tokens", "of all", "chunks", "of all")
    for name, tokens, blocks in (
        ("L1", outcome.l1_tokens, outcome.l1_blocks),
        ("L2", outcome.l2_tokens, outcome.l2_blocks),
        ("together", hit, outcome.l1_blocks + outcome.l2_blocks),
    ):
        table.add_row(name, str(tokens), _share(tokens, outcome.tokens), str(blocks), _share(blocks, outcome.blocks))
    return table


def _times(outcome: Outcome) -> Table:
    table = table_of("time to first token", "mean", "p50", "p90", "p99", "engines computed")
    spread = outcome.ttft_s
    assert spread is not None
    times = [_seconds(each) for each in (spread.mean, spread.p50, spread.p90, spread.p99)]
    table.add_row("", *times, _seconds(outcome.engine_s or 0.0))
    return table


def _tiers(outcome: Outcome) -> Table:
    table = table_of("L2", "chunks loaded", "read", "written", "most held", "not written", "evicted", "busy")
    for tier in outcome.tiers:
        table.add_row(
            tier.name,
            str(tier.loaded),
            str(ByteSize(tier.read_bytes)),
            str(ByteSize(tier.written_bytes)),
            str(ByteSize(tier.used_bytes)),
            short_count(tier.dropped),
            short_count(tier.evicted),
            f"{tier.busy:.0%}",
        )
    return table


def table_of(*heads: str, text: tuple[int, ...] = ()) -> Table:
    """Return a table without rows; the columns of `text` and the first one begin at the left."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index in (0, *text) else "right", no_wrap=True)
    return table


def _seconds(seconds: float) -> str:
    return f"{short_number(seconds)} s"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""
