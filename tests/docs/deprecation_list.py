"""Makes the list of what is announced to go, in docs/plugins/compatibility.md."""

from __future__ import annotations

import re
from pathlib import Path

from tests.api.deprecations import announced

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plugins" / "compatibility.md"
BLOCK = re.compile(r"(<!-- deprecations -->\n).*?(<!-- end of deprecations -->)", re.DOTALL)


def renewed() -> str:
    """The page with its list as it is to be."""
    rows = [f"| {each.what} | {each.since} | {each.gone} | {each.instead} |" for each in announced()]
    table = "\n".join(["| what | since | gone in | instead |", "|---|---|---|---|", *rows]) if rows else "Nothing."
    return BLOCK.sub(lambda block: f"{block[1]}{table}\n{block[2]}", PAGE.read_text())
