"""No link of a page is dead: files and anchors exist, and outside URLs have their form. None of them is opened."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs.prose import PAGES, ROOT

# Texts that a scaffold fills in have links of their own distribution.
CHECKED = [page for page in PAGES if page.suffix == ".md"]
LINK = re.compile(r"!?\[(?:[^\]\\]|\\.)*\]\(\s*<?([^)\s>]+)>?\s*\)")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def links(text: str) -> Iterator[str]:
    """The targets of a page's links; code is none."""
    return (link[1] for link in LINK.finditer(re.sub(r"`[^`\n]+`", "`code`", FENCE.sub("", text))))


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that are the same on GitHub and on the site, which makes one hyphen of several. A second heading of
    one text has another on each. Rows of tables have anchors of their own."""
    text = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)
    return {name for name in map(slug, headings) if "--" not in name} | set(re.findall(r'<a id="([\w-]+)"></a>', text))


def dead(page: Path, text: str) -> list[str]:
    """The links of a page's text that lead to nothing."""
    found = []
    for target in links(text):
        url = urlsplit(target)
        if url.scheme:
            if url.scheme not in ("http", "https", "mailto") or not (url.netloc or url.scheme == "mailto"):
                found.append(target)
            continue
        file = (page.parent / url.path).resolve() if url.path else page
        there = file.exists() and file.is_relative_to(ROOT)
        if not there or (url.fragment and (file.suffix != ".md" or url.fragment not in anchors(file))):
            found.append(target)
    return found


@pytest.mark.parametrize("page", CHECKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_links_lead_somewhere(page: Path) -> None:
    assert dead(page, page.read_text()) == []


def test_every_page_is_in_the_menu_of_the_site() -> None:
    """The build of the site says so too, where its generator is installed."""
    menu = (ROOT / "docs" / "site" / "zensical.toml").read_text()
    below = sorted((ROOT / "docs").rglob("*.md"))
    assert [str(page) for page in below if page.relative_to(ROOT / "docs").as_posix() not in menu] == []


def test_dead_links_are_found() -> None:
    page = ROOT / "docs" / "faq.md"
    alive = "[a](sizing.md) [b](sizing.md#bytes-of-a-token) [c](../examples) [d](https://example.com/x) `[e](none)`"
    assert dead(page, alive) == []
    broken = "[a](none.md) [b](sizing.md#none) [c](https:/example.com) [d](#none) ![e](none.svg) [f](ftp://x)"
    assert dead(page, broken) == ["none.md", "sizing.md#none", "https:/example.com", "#none", "none.svg", "ftp://x"]
