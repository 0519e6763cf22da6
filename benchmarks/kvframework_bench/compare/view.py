"""A comparison for a terminal or as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from kvframework.text import short_number
from kvframework_bench.compare.run import Compared, Comparison
from kvframework_bench.console import new_table


def sentences(found: Comparison) -> Iterator[str]:
    """Yield what is said before the table."""
    where = "apparently the same machine" if found.same_machine else "different machines"
    yield f"bench {found.bench}, {where}{'; ' if found.differs else ''}{', '.join(found.differs)}"
    if found.doubts:
        yield f"limits of this comparison: {'; '.join(found.doubts)}"
    counts = {verdict: len(found.of(verdict)) for verdict in ("worse", "better", "same")}
    unjudged = sum(not row.judged for row in found.rows)
    yield (
        f"figures: {counts['worse']} worse, {counts['better']} better, {counts['same']} equal within the noise; "
        f"{unjudged} not judged"
    )
    for title, places in (
        ("only in the first document", found.only_before),
        ("only in the second document", found.only_after),
    ):
        if places:
            yield f"{title}, not compared: {len(places)} figures, such as {places[0]}"


def table_of(found: Comparison, *, everything: bool, markdown: bool) -> Table | None:
    """Return a row for each figure that changed, the worst first, or for each figure; None without rows."""
    rows: Sequence[Compared] = found.rows if everything else [*found.of("worse"), *found.of("better")]
    if not rows:
        return None
    table = new_table("figure", "first file", "second file", "gain", "verdict")
    table.box = box.MARKDOWN if markdown else box.SIMPLE_HEAD
    for row in rows:
        verdict = row.verdict if row.judged else "not judged"
        table.add_row(row.place, short_number(row.before), short_number(row.after), f"{row.gain:.2f} x", verdict)
    return table
