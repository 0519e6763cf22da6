"""Counts the size of the project, and prints each count beside its budget: `python tests/size.py`.

Lines are those of `.py` files, templates of the scaffold aside. The files of a trip are those that docs/architecture.md
lists for it, with those of any request; `tests/docs/test_architecture.py` holds that page against a real run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
SHORT, LONG = 60, 800
GENERATED = "<!-- Made from the sources"  # the first line of a page that `tests.docs.generate` writes
TRIPS = {"STORE": 45, "LOOKUP": 45, "RETRIEVE": 38, "registration": 42}
_FILE = re.compile(r"`([a-z_0-9]+(?:/[a-z_0-9]+)*\.py)`")


class Count(NamedTuple):
    name: str
    counted: int
    budget: int

    def __str__(self) -> str:
        over = "" if self.counted <= self.budget else f", {self.counted - self.budget} over"
        return f"{self.name}: {self.counted} of {self.budget}{over}"


def counts() -> list[Count]:
    core, plugins, tests = (dict(_lines(folder)) for folder in ("kvframework", "plugins", "tests"))
    product = core | plugins
    short = [path for path, lines in product.items() if lines < SHORT and path.name != "__init__.py"]
    return [
        Count("lines of kvframework/", sum(core.values()), 31_000),
        Count("files of kvframework/", len(core), 160),
        Count("lines of kvframework/ and plugins/", sum(product.values()), 86_233),
        Count("lines of tests/", sum(tests.values()), sum(product.values()) * 5 // 4),
        Count(f"files below {SHORT} lines", len(short), 40),
        Count(f"files above {LONG} lines", sum(lines > LONG for lines in product.values()), 0),
        *(Count(f"files that a {trip} enters", files, TRIPS[trip]) for trip, files in _trips()),
        Count("words of docs/ and of READMEs", sum(_words()), 55_000),
    ]


def _lines(folder: str) -> Iterable[tuple[Path, int]]:
    for path in (ROOT / folder).rglob("*.py"):
        if "templates" not in path.parts:
            yield path, path.read_bytes().count(b"\n")


def _words() -> Iterable[int]:
    """Yield the words of each page of docs/ and each README of a plugin or example, without generated pages."""
    for pattern in ("docs/**/*.md", "plugins/**/README.md", "examples/**/README.md"):
        for text in (page.read_text() for page in ROOT.glob(pattern)):
            if not text.startswith(GENERATED):
                yield len(text.split())


def _trips() -> Iterable[tuple[str, int]]:
    parts = re.split(r"^### (.+)$", ARCHITECTURE.read_text(), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    always = _listed(sections["Any request"])
    for trip in TRIPS:
        yield trip, len(always | _listed(sections[trip]))


def _listed(section: str) -> set[str]:
    """Return the files at the head of each numbered line."""
    items = re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]
    return {file for item in items for file in _FILE.findall(re.split(r":\s", item)[0])}


if __name__ == "__main__":
    print(*counts(), sep="\n")
