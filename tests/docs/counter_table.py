"""Makes the table of counters in docs/reference/status.md out of their declarations."""

from __future__ import annotations

from kvframework.api.counter import Counter
from kvframework.status import COUNTERS


def table() -> str:
    """The counters as they are declared."""
    rows = [f"| `{place}` | {_meaning(each)} | `kvframework_{each.metric}` |" for place, each in COUNTERS.items()]
    rows.append("| `messaging.counters.errors.CODE` | answers with this error | `kvframework_refused_total` |")
    return "\n".join(["| counter | counts | metric |", "|---|---|---|", *rows, ""])


def _meaning(counter: Counter) -> str:
    words = f"{counter.unit} that {counter.meaning}" if counter.meaning else counter.unit
    return f"{words} (trouble)" if counter.trouble else words
