"""Makes the table of docs/engines/README.md: what tests have proven of each engine, see
`tests.support.engine_results`."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.engine_results import ENGINES, FEATURES, FOLDER, recorded

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "engines"
BLOCK = re.compile(r"(<!-- engines -->\n).*?(<!-- end of engines -->)", re.DOTALL)
NOTHING = "-"


def renewed(page: str) -> str:
    """The page with its table as the results are."""
    return BLOCK.sub(lambda block: block[1] + table() + block[2], page)


def table(folder: Path = FOLDER) -> str:
    """A row for each feature of which something is known, a column for each engine."""
    results = {engine: recorded(engine, folder) for engine in ENGINES}
    lines = [
        "| | " + " | ".join(map(_head, ENGINES)) + " |",
        "|---" * (len(ENGINES) + 1) + "|",
        "| release | " + " | ".join(each["release"] or NOTHING for each in results.values()) + " |",
    ]
    for feature, meaning in FEATURES.items():
        cells = [_cell(each["features"].get(feature)) for each in results.values()]
        if any(cell != NOTHING for cell in cells):
            lines.append(f"| **{feature}**: {meaning} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _head(engine: str) -> str:
    page = ENGINES[engine].page
    return f"[{engine}]({page})" if (PAGES / page).exists() else engine


def _cell(found: dict[str, object] | None) -> str:
    if not found:
        return NOTHING
    tests = found["tests"]
    assert isinstance(tests, list)
    files = dict.fromkeys(str(test).partition("::")[0] for test in tests)
    return f"[{found['how']}](../../{next(iter(files))})"
