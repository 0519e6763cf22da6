"""Makes the table of counters in docs/status.md out of their declarations."""

from __future__ import annotations

from kvframework.api.counter import Counter
from kvframework.status import COUNTERS

START, END = "<!-- counters -->\n", "<!-- end of counters -->"


def renewed(page: str) -> str:
    """The page with the table between its comments as the counters are declared."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    rows = [f"| `{place}` | {_meaning(counter)} | {_metric(counter)} |" for place, counter in COUNTERS.items()]
    rows.append("| `messaging.counters.errors.CODE` | answers with this error | `kvframework_refused_total` |")
    head = ["| counter | counts | metric |", "|---|---|---|"]
    return before + START + "\n".join([*head, *rows, ""]) + END + after


def _meaning(counter: Counter) -> str:
    words = f"{counter.unit} that {counter.meaning}" if counter.meaning else counter.unit
    return f"{words} (trouble)" if counter.trouble else words


def _metric(counter: Counter) -> str:
    return f"`kvframework_{counter.metric}`"
