"""The page at `/`: static files of this folder, which draw what `/history.json` and `/status` say. No build step, and
nothing from elsewhere."""

from __future__ import annotations

import html
import json
from importlib import metadata, resources
from typing import NamedTuple

from kvf_observe.health import CHECKS

TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"


class File(NamedTuple):
    """A file's content type and content."""

    type: str
    content: bytes


def files() -> dict[str, File]:
    """Every file of the page by its path in a URL. Blocking."""
    found = {}
    for entry in resources.files(__name__).iterdir():
        type_ = TYPES.get(entry.name[entry.name.rfind(".") :])
        if type_ is None:
            continue
        content = entry.read_bytes()
        if entry.name == INDEX:
            found["/"] = File(type_, _filled(content.decode()).encode())
        else:
            found[f"/{entry.name}"] = File(type_, content)
    return found


def documentation() -> str:
    """The URL of the folder of the docs, by the package's metadata; "" if these have none."""
    for url in metadata.metadata("kvframework").get_all("Project-URL") or ():
        name, _, address = str(url).partition(", ")
        if name == "Documentation":
            return address
    return ""


def _filled(index: str) -> str:
    """The first file, with what the script cannot know: where the docs are, and the row of each problem's place."""
    rows = json.dumps({check.name: check.row for check in CHECKS})
    return index.replace("@DOCUMENTATION@", html.escape(documentation())).replace("@ROWS@", html.escape(rows))
