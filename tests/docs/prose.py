"""The pages of the project, their anchors, and the wrapping of generated prose at `WIDTH` columns."""

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
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
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


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    return set(map(slug, re.findall(r"^#{1,6} (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)))


def anchors(page: Path) -> set[str]:
    """Those of headings that are the same on GitHub and on the site, and those of rows of tables."""
    rows = re.findall(r'<a id="([\w.-]+)"></a>', FENCE.sub("", page.read_text()))
    return {name for name in headings(page) if "--" not in name} | set(rows)
