"""The pages of the `mkdocs` site: files beside docs/ that are pages, and the targets of links between files. The texts
stay in their places in the repository, with links that work there.

A link to a file that is no page becomes its name. A link to a missing file stays, and ends the build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]+)\]\(((?!\w+:|#)[^)#\s]+)(#[^)\s]*)?\)")


def pages() -> dict[str, str]:
    """The place on the site of every file that is a page, by its path in the repository."""
    found = {"README.md": "index.md"}
    found |= {f"docs/{each}": each for each in _below("docs", "**/*.md")}
    found |= {f"plugins/{each}": f"with/{Path(each).parent}.md" for each in _below("plugins", "*/README.md")}
    found |= {f"examples/{each}": f"examples/{Path(each).parent}.md" for each in _below("examples", "*/README.md")}
    return found


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages outside docs/."""
    for source, place in pages().items():
        if not source.startswith("docs/"):
            files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Points every link between files to its target on the site."""
    places = pages()
    here = {place: source for source, place in places.items()}[page.file.src_uri]

    def led(link: re.Match[str]) -> str:
        text, path, anchor = link[1], link[2], link[3] or ""
        target = os.path.normpath(os.path.join(os.path.dirname(here), path))
        place = places.get(target) or places.get(f"{target}/README.md")
        if place:
            return f"[{text}]({os.path.relpath(place, os.path.dirname(page.file.src_uri) or '.')}{anchor})"
        if (ROOT / target).exists():
            return text if "`" in text else f"`{text}`"
        return link[0]

    return LINK.sub(led, markdown)


def _below(folder: str, pattern: str) -> list[str]:
    return sorted(file.relative_to(ROOT / folder).as_posix() for file in (ROOT / folder).glob(pattern))
