"""The pages of the project, and the wrapping of generated prose at `WIDTH` columns."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 100
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*/README.md"),
        *(ROOT / "plugins").glob("*/*/README.md"),
        *(ROOT / "plugins" / "tools" / "dev" / "kvf_dev" / "scaffold" / "templates").glob("*/README.md-tpl"),
    ]
)
_ITEM = re.compile(r"( *)((?:[*+-]|\d+\.)\s+)?")


def wrapped(text: str) -> str:
    """One paragraph, or one item of a list, in lines of at most `WIDTH` columns. Code spans are not broken."""
    item = _ITEM.match(text)
    assert item is not None
    body = re.sub(r"`[^`]+`", lambda span: span[0].replace(" ", "\0"), " ".join(text[item.end() :].split()))
    first = item[1] + (item[2] or "")
    lines = textwrap.wrap(
        body,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\0", " ")
