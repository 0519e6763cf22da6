"""The page at `/`: static files of this folder, which draw what `/history.json` and `/status` say. No build step, and
nothing from elsewhere."""

from __future__ import annotations

from importlib import resources
from typing import NamedTuple

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
        if type_ is not None:
            found["/" if entry.name == INDEX else f"/{entry.name}"] = File(type_, entry.read_bytes())
    return found
