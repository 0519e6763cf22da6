"""Tables of Markdown pages, for tests of what pages say."""

from __future__ import annotations

import re


def section(page: str, title: str) -> str:
    """Return the text below a heading, up to the next one of any level."""
    return re.split(r"^##+ ", page.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(page: str, title: str) -> list[list[str]]:
    """Return the cells of the tables in a section, without their headers."""
    found = []
    lines = section(page, title).splitlines()
    for number, line in enumerate(lines):
        heads = number + 1 < len(lines) and lines[number + 1].startswith("|--")
        if line.startswith("|") and not line.startswith("|--") and not heads:
            found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found
