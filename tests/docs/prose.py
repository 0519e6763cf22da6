"""Prose of Markdown pages: wrapping at `WIDTH` columns, the lines that are too long, and the phrases to avoid.

`python -m tests.docs.prose PAGE...` rewraps pages."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
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
# A reader has to decode them, and a plain word says the same.
UNCLEAR = re.compile(
    r"\b(told|what is to be|whoever|lets? go|(?:is|are) gone|anew|nobody|everybody|somebody|anybody)\b",
    re.IGNORECASE,
)
_ITEM = re.compile(r"( *)((?:[*+-]|\d+\.)\s+)?")


def prose(page: str) -> Iterator[tuple[int, str]]:
    """The numbered lines of a page that are neither code nor a table nor a heading."""
    fenced = False
    for number, line in enumerate(page.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("|", "#", "<!--", "    ")):
            yield number, line


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


def too_long(line: str) -> bool:
    """A single word, such as a link, may be longer."""
    return len(line) > WIDTH and wrapped(line) != line


def rewrapped(page: str) -> str:
    """The page with its paragraphs and items wrapped; code, tables, headings and comments stay as they are."""
    plain = {number for number, line in prose(page) if line.strip()}
    done: list[str] = []
    paragraph: list[str] = []

    def end_paragraph() -> None:
        if paragraph:
            done.append(wrapped("\n".join(paragraph)))
            paragraph.clear()

    for number, line in enumerate(page.splitlines(), 1):
        item = _ITEM.match(line)
        if number not in plain or (item is not None and item[2]):
            end_paragraph()
        if number in plain:
            paragraph.append(line)
        else:
            done.append(line)
    end_paragraph()
    return "\n".join(done) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(rewrapped(Path(name).read_text()))
