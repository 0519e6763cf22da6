"""The pages of the site, gathered from the repository: `python docs/site/pages.py FOLDER` writes them and their
configuration, which `zensical build --strict --config-file FOLDER/zensical.toml` builds.

The texts stay in their places, with links that work there. On the site a link whose text is a file's name has the title
of that page, or of the section; a link to a file that is no page leads to the repository. A link to a missing file, a
row outside of a table, a page in no menu and a menu's entry without a page raise `SiteError`. The Markdown that is
written is plain, so that another generator could build it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
LINK = re.compile(r"\[([^\]]+)\]\(((?!\w+:|#)[^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
ROWS = re.compile(r"^(?P<above>(?![ ]*\|).*\n)?(?P<rows>(?:[ ]*\|.*(?:\n|\Z))+)", re.MULTILINE)
DELIMITER = re.compile(r" *\|(?: *:?-+:? *\|)+ *")
CELL = re.compile(r"(?<!\\)\|")
FILES_OF_OTHERS = (".svg", ".png", ".css")


class SiteError(Exception):
    """The pages cannot make a site; the text names file and link."""


def pages() -> dict[str, str]:
    """The place on the site of every file that is a page, by its path in the repository."""
    found = {"README.md": "index.md"}
    found |= {name: name.lower() for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")}
    found["SECURITY.md"] = "reporting.md"
    found |= {f"docs/{each}": each for each in _below("docs", "**/*.md")}
    found |= {f"plugins/{each}": f"with/{Path(each).parent.name}.md" for each in _readmes()}
    found |= {f"examples/{each}": f"examples/{Path(each).parent}.md" for each in _below("examples", "*/README.md")}
    found["benchmarks/README.md"] = "benchmarks_package.md"
    return found


def page_text(source: str, repository: str) -> str:
    """The text of a page with links as the site needs them. Raises `SiteError`."""
    places = pages()
    folder, place = os.path.dirname(source), places[source]
    text = (ROOT / source).read_text()
    _check_tables(source, text)

    def led(link: re.Match[str]) -> str:
        text, path, anchor = link[1], link[2], link[3] or ""
        target = os.path.normpath(os.path.join(folder, path))
        page = target if target in places else f"{target}/README.md"
        if page in places:
            if text.strip("`").removesuffix("/") in (path, os.path.basename(path), page):
                text = title(page, anchor)
            return f"[{text}]({_from(place, places[page])}{anchor})"
        if target.startswith("docs/") and target.endswith(FILES_OF_OTHERS):
            return f"[{text}]({_from(place, target.removeprefix('docs/'))})"
        if (ROOT / target).exists():
            kind = "tree" if (ROOT / target).is_dir() else "blob"
            return f"[{text}]({repository}/{kind}/main/{target})"
        raise SiteError(f"{source}: {link[0]} leads to no file")

    return LINK.sub(led, text)


def title(source: str, anchor: str = "") -> str:
    """The heading of a page, or of one of its sections. Raises `SiteError` if there is none."""
    for heading in re.findall(r"^#+ (.*)$", (ROOT / source).read_text(), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        if not anchor or _slug(plain) == anchor[1:]:
            return plain
    raise SiteError(f"{source} has no section {anchor}")


def write(folder: Path) -> None:
    """Writes pages, pictures and configuration; what was in the folder is deleted. Raises `SiteError`."""
    package = (ROOT / "pyproject.toml").read_text()
    (repository,) = re.findall(r'^Repository = "(.*)"$', package, re.MULTILINE)
    (version,) = re.findall(r'^__version__ = "(.*)"$', (ROOT / "kvframework" / "__init__.py").read_text(), re.MULTILINE)
    configuration = (HERE / "zensical.toml").read_text()
    check_menu(configuration)
    shutil.rmtree(folder, ignore_errors=True)
    for source, place in pages().items():
        file = folder / "pages" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page_text(source, repository))
    (folder / "pages" / "images").mkdir(exist_ok=True)
    for other in [*_below("docs", "*.svg"), *_below("docs", "images/*.png")]:
        shutil.copy(ROOT / "docs" / other, folder / "pages" / other)
    shutil.copy(HERE / "site.css", folder / "pages")
    for word, meant in {"REPOSITORY": repository, "VERSION": version, "CLONE": str(ROOT)}.items():
        configuration = configuration.replace(word, meant)
    (folder / "zensical.toml").write_text(configuration)


def _check_tables(source: str, text: str) -> None:
    """A row that a blank line or a paragraph parts from its table is shown as text with bars."""
    for found in ROWS.finditer(FENCE.sub("", text)):
        first, *others = found["rows"].splitlines()
        if not others or not DELIMITER.fullmatch(others[0]):
            raise SiteError(f"{source}: the row {first} is outside of a table: it has no head above it")
        if (found["above"] or "").strip() and not found["above"].startswith(("#", "<!--")):
            raise SiteError(f"{source}: the table {first} needs a blank line above it")
        for row in others:
            if len(CELL.findall(row)) != len(CELL.findall(first)):
                raise SiteError(f"{source}: the row {row} has another number of cells than its table's head")


def check_menu(configuration: str) -> None:
    named = re.findall(r'"([\w/.-]+\.md)"', configuration)
    there = set(pages().values())
    if lost := sorted(there - set(named)):
        raise SiteError(f"in no menu of docs/site/zensical.toml: {', '.join(lost)}")
    if absent := sorted(set(named) - there):
        raise SiteError(f"in a menu of docs/site/zensical.toml, and no page: {', '.join(absent)}")


def _from(place: str, target: str) -> str:
    return os.path.relpath(target, os.path.dirname(place) or ".")


def _slug(heading: str) -> str:
    """The anchor of a heading, as Python-Markdown makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def _readmes() -> Iterator[str]:
    yield from _below("plugins", "*/README.md")
    yield from _below("plugins", "*/*/README.md")


def _below(folder: str, pattern: str) -> Iterator[str]:
    return iter(sorted(file.relative_to(ROOT / folder).as_posix() for file in (ROOT / folder).glob(pattern)))


if __name__ == "__main__":
    try:
        write(Path(sys.argv[1]))
    except SiteError as error:
        sys.exit(f"error: {error}")
