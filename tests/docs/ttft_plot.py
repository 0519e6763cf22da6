"""Makes docs/ttft.svg out of the table of vLLM's times in docs/benchmarks.md; legible in light and dark."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.support.doc_tables import rows

TABLE = "`python -m kvframework_bench.vllm.side_by_side`: vLLM alone, kvframework 0.1.0, LMCache 0.5.6"
COLUMNS = {"cold": 1, "hit, same engine": 2, "hit, new engine": 3}
WIDTH, LEFT, BAR, GAP = 860, 250, 18, 14
FULL = WIDTH - LEFT - 90
STYLE = """\
    text { font: 14px system-ui, "Segoe UI", "Liberation Sans", sans-serif; fill: #1f2328; }
    .head { font-weight: 600; }
    .bar { fill: #8c959f; }
    .ours { fill: #0969da; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .bar { fill: #656c76; }
      .ours { fill: #4493f8; }
    }
"""


class Bar(NamedTuple):
    """One bar: whose, and how many seconds."""

    name: str
    seconds: float


def groups(page: str) -> dict[str, list[Bar]]:
    """The bars of each column; a cell without a number has none."""
    cells = rows(page, TABLE)
    found: dict[str, list[Bar]] = {}
    for title, column in COLUMNS.items():
        numbers = [(row[0], re.match(r"[\d.]+", row[column])) for row in cells]
        found[title] = [Bar(name, float(number[0])) for name, number in numbers if number]
    return found


def drawn(page: str) -> str:
    """The picture, from the text of docs/benchmarks.md."""
    bars = groups(page)
    longest = max(bar.seconds for group in bars.values() for bar in group)
    lines, y = [], 34
    for title, group in bars.items():
        lines.append(f'  <text class="head" x="0" y="{y}">{title}</text>')
        y += GAP
        for bar in group:
            width = max(round(FULL * bar.seconds / longest), 2)
            kind = "bar ours" if bar.name == "kvframework" else "bar"
            lines += [
                f'  <text x="{LEFT - 10}" y="{y + BAR - 4}" text-anchor="end">{bar.name}</text>',
                f'  <rect class="{kind}" x="{LEFT}" y="{y}" width="{width}" height="{BAR}"/>',
                f'  <text x="{LEFT + width + 8}" y="{y + BAR - 4}">{bar.seconds:.3f} s</text>',
            ]
            y += BAR + 6
        y += GAP + 8
    title = "Median time to first token in vLLM, 4096 tokens"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y - GAP}" role="img" aria-labelledby="title">'
    )
    return "\n".join(
        [head, f'  <title id="title">{title}</title>', "  <style>", STYLE.rstrip(), "  </style>", *lines, "</svg>", ""]
    )
