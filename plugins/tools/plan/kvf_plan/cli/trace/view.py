"""What `kvframework trace info` prints."""

from __future__ import annotations

from rich.table import Table

from kvf_plan.trace.form import UNKNOWN, Header
from kvf_plan.trace.summary import Summary
from kvframework.text import short_count, short_duration


def table_of(header: Header, summary: Summary) -> Table:
    """Return the numbers of a trace, one a line, with what they mean."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column()
    again = summary.chunks - summary.unique_chunks
    rate = f", {summary.requests / summary.span_s:.2f} a second" if summary.span_s else ""
    for name, value, meaning in (
        ("form", header.form, f"{header.chunk_tokens} tokens a chunk"),
        ("requests", short_count(summary.requests), f"in {short_duration(summary.span_s)}{rate}"),
        ("tokens", short_count(summary.tokens), f"of prompts, and {short_count(summary.output_tokens)} of answers"),
        ("chunks", short_count(summary.chunks), f"{short_count(summary.unique_chunks)} different ones"),
        ("again", _share(again, summary.chunks), "of the chunks had been there: the most that any cache can have"),
        ("live set", short_count(summary.live_chunks), f"chunks, {_live(header, summary)}: the least that has it all"),
    ):
        table.add_row(name, value, meaning)
    if summary.hit_tokens != UNKNOWN:
        table.add_row(
            "hit", _share(summary.hit_tokens, summary.asked_tokens), "of what was asked of the recorded server"
        )
    if summary.tenants > 1 or summary.models > 1:
        table.add_row("tenants", short_count(summary.tenants), f"with {short_count(summary.models)} models")
    if summary.lost:
        table.add_row("missing", short_count(summary.lost), "requests that the recorder could not keep")
    return table


def _live(header: Header, summary: Summary) -> str:
    return f"{short_count(summary.live_chunks * header.chunk_tokens)} tokens"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"
