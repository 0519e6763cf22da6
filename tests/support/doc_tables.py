"""Tables of Markdown pages, for tests of what pages say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

import msgspec


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


def tables(text: str) -> list[list[list[str]]]:
    """Return the tables of a text as lists of rows of cells, without their headers. Code blocks have none."""
    found: list[list[list[str]]] = []
    for lines in re.findall(r"(?:^ *\|.*\n)+", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in lines.splitlines()[2:]]
        found.append([[cell.strip() for cell in row] for row in rows])
    return found


def rows_of(known: Iterable[str], *texts: str) -> dict[str, list[str]]:
    """Return the rows of every table that is about these names, by each name of their first cell (in code, if any is).

    A table is about them if three of four of its names are among them. So a page may give such a table any heading, or
    split it, and a name too many is still found.
    """
    names, found = set(known), dict[str, list[str]]()
    for table in (table for text in texts for table in tables(text)):
        rows = {name: row for row in table for name in re.findall(r"`([^`]+)`", row[0]) or row[:1]}
        if rows and 4 * len(names & rows.keys()) >= 3 * len(rows):
            found |= rows
    return found


def engine_options(page: str) -> dict[str, tuple[str, str]]:
    """Default and meaning of each row of a page's table of options."""
    return {
        name.strip("`"): (cells[1].strip("`"), cells[2].replace("`", ""))
        for name, *cells in rows(page, "Options")
        if name.startswith("`kvframework.")
    }


def declared_options(struct: type[msgspec.Struct]) -> dict[str, tuple[str, str]]:
    """The same of the fields of an engine's options."""
    found = {}
    for field in msgspec.structs.fields(struct):
        described = getattr(msgspec.inspect.type_info(field.type), "extra_json_schema", None) or {}
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()  # type: ignore[misc]
        found[f"kvframework.{field.name}"] = (json.dumps(default), described.get("description", ""))
    return found
