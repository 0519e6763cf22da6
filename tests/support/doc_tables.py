"""Tables of Markdown pages, for tests of what pages say."""

from __future__ import annotations

import json
import re

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
