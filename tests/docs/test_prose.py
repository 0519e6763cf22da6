"""Pages can be read in a terminal and by readers of plain English."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.prose import PAGES, ROOT, UNCLEAR, WIDTH, prose, rewrapped, too_long, wrapped

# The map of the rooms is written by hand, picture and all, and checked by a test of its own.
CHECKED = [page for page in PAGES if page != ROOT / "docs" / "architecture.md"]


@pytest.mark.parametrize("page", CHECKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_end_in_time(page: Path) -> None:
    found = [number for number, line in prose(page.read_text()) if too_long(line)]
    assert found == [], f"lines of more than {WIDTH} columns: python -m tests.docs.prose {page.relative_to(ROOT)}"


@pytest.mark.parametrize("page", CHECKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_plain(page: Path) -> None:
    text = page.read_text()
    tables = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.startswith("|")]
    assert [(number, line) for number, line in (*prose(text), *tables) if UNCLEAR.search(line)] == []


def test_a_long_line_and_an_unclear_one_are_found() -> None:
    page = f"# {'x ' * 60}\n{'word ' * 30}\n```\n{'code ' * 30}\n```\n| {'cell ' * 30} |\nnobody was told\n"
    assert [number for number, line in prose(page) if too_long(line)] == [2]
    assert [number for number, line in prose(page) if UNCLEAR.search(line)] == [7]


def test_a_wrapped_item_hangs_and_keeps_its_code() -> None:
    item = "* " + "word " * 19 + "`code with spaces` and a [link](https://example.com/" + "x" * 120 + ") at its end"
    lines = wrapped(item).splitlines()
    assert lines[0].startswith("* word")
    assert all(line.startswith("  ") for line in lines[1:])
    assert any("`code with spaces`" in line for line in lines)
    assert wrapped("\n".join(lines)) == wrapped(item)
    assert not any(map(too_long, lines))


def test_a_page_is_rewrapped_around_its_code_and_tables() -> None:
    kept = f"# {'x ' * 60}\n\n```\n{'code ' * 30}\n```\n\n| {'cell ' * 30} |\n"
    page = f"{kept}\n{'word ' * 30}\nand more\n\n* {'item ' * 25}\n* another\n"
    new = rewrapped(page)
    assert new.startswith(kept)
    assert not any(too_long(line) for _, line in prose(new))
    assert new.split() == page.split()
    assert "\n* another\n" in new
    assert rewrapped(new) == new
