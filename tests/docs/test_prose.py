"""Every page by a few rules: lines, wording, tables, links and length. What a page says is not compared here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs import api_reference
from tests.docs.prose import FENCE, PAGES, ROOT, WIDTH, headings
from tests.docs.prose import anchors as own_anchors
from tests.docs.test_site import pages as site

# Texts that a scaffold fills in have links of their distribution.
CHECKED = [page for page in PAGES if page.suffix == ".md"]
LINK = re.compile(r"!?\[(?:[^\]\\]|\\.)*\]\(\s*<?([^)\s>]+)>?\s*\)")
MADE = "<!-- Made from"
MOST_WORDS = 2500

# What readers stumbled over, and what to write.
BANNED = {
    r"\bof (?:its|their|his|her) own\b": "its own ..., a separate ...",
    r"\b(?:once|twice|times|requests|tokens|bytes|objects|lookups|blocks|[KMG]i?B|\d) a second\b": "per second",
    r"\bBesides,": "start with the fact",
    r"\b[Ww]ho asks\b": "the client, the engine, the caller",
    r"\b[Ww]hat (?:it|they|he) ha(?:s|ve|d)\b": "name the objects",
    r"\bNothing of (?:this|that|it)\b": "name the component and the verb",
    r"\bThose (?:that|of|who)\b": "name the objects",
    r"\b[Ww]hoever\b": "name the component",
    r"\b[Ww]ho has\b": "name the process or the user",
    r"\b(?:newcomers?|(?<!set )aside)\b": "the field's word",
}


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """Return the text of a page without code."""
    return re.sub(r"`[^`\n]+`", "`code`", FENCE.sub("", page.read_text()))


WRITTEN = [page for page in CHECKED if page.name != "CHANGELOG.md" and not page.read_text().startswith(MADE)]


# Every page that is not generated.
each_page = pytest.mark.parametrize("page", WRITTEN, ids=name)


@each_page
def test_its_lines_are_not_overlong(page: Path) -> None:
    """Tables and links cannot be broken."""
    lines = FENCE.sub("", page.read_text()).splitlines()
    assert [line for line in lines if len(line) > WIDTH + 20 and "|" not in line and "](" not in line] == []


@each_page
def test_its_wording(page: Path) -> None:
    found = {hit[0]: advice for pattern, advice in BANNED.items() for hit in re.finditer(pattern, prose(page))}
    assert found == {}, "each with what to write"


@each_page
def test_its_length(page: Path) -> None:
    assert len(page.read_text().split()) <= MOST_WORDS


@pytest.mark.parametrize("source", site.pages())
def test_the_site_renders_its_tables_and_links(source: str) -> None:
    assert site.page_text(source, "https://example.org/x")


def test_every_page_is_in_the_menu_of_the_site() -> None:
    site.check_menu((ROOT / "docs" / "site" / "zensical.toml").read_text())


# messages


# Names with which a message may begin, besides those that have a second capital or a digit.
NAMES = ("Expected", "Linux", "Mooncake", "Mooncake's", "None", "Object", "Python", "Redis", "Zstandard's")
HELP = ("Argument", "Option", "Text", "Typer")


def messages(source: str) -> Iterator[tuple[str, str]]:
    """The texts that a module gives to errors, findings, options and the log, each after the name of what it calls:
    literals in the arguments of a call."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        if name.startswith(("log.", "_log.")) or name.rpartition(".")[2][:1].isupper():
            for argument in (*call.args, *(each.value for each in call.keywords)):
                pieces = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
                literals = (each.value if isinstance(each, ast.Constant) else "{}" for each in pieces)
                if " " in (text := "".join(text for text in literals if isinstance(text, str))).strip("{}"):
                    yield name.rpartition(".")[2], text


each_folder = pytest.mark.parametrize("folder", ["kvframework", "plugins"])


@each_folder
def test_the_wording_of_messages(folder: str) -> None:
    found = []
    for file in (ROOT / folder).rglob("*.py"):
        texts = [text for _, text in messages(file.read_text())]
        found += [f"{name(file)}: {text}" for text in texts for pattern in BANNED if re.search(pattern, text)]
    assert found == []


@each_folder
def test_the_case_of_messages(folder: str) -> None:
    """A message follows the name of a logger, a code or a key, so it begins in lower case or with a name, and has no
    full stop. Help is a sentence. A kit's messages stand alone."""
    found = []
    for file in (each for each in (ROOT / folder).rglob("*.py") if "testing" not in each.parts):
        for call, text in messages(file.read_text()):
            sentence = re.match(r"[A-Z][a-z]+(?:'s)?\b", text) is not None and not text.startswith(NAMES)
            if call not in HELP and (sentence or re.search(r"[a-z]\.$", text)):
                found.append(f"{name(file)}: {text}")
    assert found == []


# links


def links(text: str) -> Iterator[str]:
    """The targets of a text's links."""
    return (link[1] for link in LINK.finditer(text))


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that are the same on GitHub and on the site, which makes one hyphen of several. A second heading of
    one text has another on each. Rows of tables have anchors of their own."""
    if page.parent.name == "reference" and page.stem in api_reference.REFERENCE:
        return api_reference.anchors(page.stem) | headings(page)
    return own_anchors(page)


def dead(page: Path, text: str) -> list[str]:
    """The links of a page's text that lead to nothing. Outside addresses must have their form; none is opened."""
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


@pytest.mark.parametrize("page", CHECKED, ids=name)
def test_its_links_lead_somewhere(page: Path) -> None:
    assert dead(page, prose(page)) == []


# the rules themselves


def test_what_breaks_a_rule_is_found() -> None:
    page = ROOT / "README.md"
    broken = "[a](none.md) [b](docs/faq.md#none) [c](https:/example.com) [d](#none) ![e](none.svg) [f](ftp://x)"
    assert dead(page, broken) == ["none.md", "docs/faq.md#none", "https:/example.com", "#none", "none.svg", "ftp://x"]
    bad = "Besides, a process of its own sends 3 GB a second to who asks. Nothing of this waits for what it has."
    assert sum(bool(re.search(pattern, bad)) for pattern in BANNED) == 6
