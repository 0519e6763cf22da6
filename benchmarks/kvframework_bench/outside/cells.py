"""Finished cells: a folder of them, by round, contender, tool and workload, so that a run goes on where it ended."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvframework_bench.errors import BenchUnavailable
from kvframework_bench.outside.load import OutsideSizes
from kvframework_bench.outside.tools import Result

_CELL, _RUN = "cell.json", "run.json"


class Cell(msgspec.Struct, frozen=True):
    """One run of one workload against one contender. `result` is the tool's; `prompt_tokens` of all its prompts and
    `computed_tokens` of these are the engine's. `others` are the cores that other processes kept busy meanwhile."""

    tool: str
    version: str
    workload: str
    contender: str
    round: int
    command: list[str]
    result: Result
    prompt_tokens: int
    computed_tokens: int
    others: float


class Run(msgspec.Struct, frozen=True):
    """What all cells of a folder have in common."""

    sizes: OutsideSizes
    trace: str
    model: str


class Cells:
    """The cells of one folder, which is made if it is not there. One process at a time."""

    def __init__(self, folder: Path, run: Run) -> None:
        """Raises `BenchUnavailable` for a folder with cells of another run, or one that cannot be used."""
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (file := folder / _RUN).exists():
                if msgspec.json.decode(file.read_bytes(), type=Run) != run:
                    raise BenchUnavailable(
                        "the cells there are of other sizes, another trace or another model",
                        where=f"--folder {folder}",
                        available="a new folder, or the options of the first run",
                    )
            else:
                file.write_bytes(msgspec.json.format(msgspec.json.encode(run)))
        except (OSError, msgspec.MsgspecError) as error:
            raise BenchUnavailable(
                f"the folder of cells cannot be used: {error}", where=f"--folder {folder}"
            ) from error

    def finished(self, number: int, contender: str, tool: str, workload: str) -> Cell | None:
        """Return a cell that is there. One that cannot be read is measured again."""
        try:
            file = self._place(number, contender, tool, workload) / _CELL
            return msgspec.json.decode(file.read_bytes(), type=Cell)
        except (OSError, msgspec.MsgspecError):
            return None

    def begin(self, number: int, contender: str, tool: str, workload: str) -> Path:
        """Return the new folder of a cell, without what an earlier try has left."""
        place = self._place(number, contender, tool, workload)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        return place

    def finish(self, cell: Cell) -> None:
        """Keep the cell: written whole, or not there."""
        place = self._place(cell.round, cell.contender, cell.tool, cell.workload)
        new = place / f"{_CELL}.new"
        new.write_bytes(msgspec.json.format(msgspec.json.encode(cell)))
        new.rename(place / _CELL)

    def _place(self, number: int, *names: str) -> Path:
        return self._folder.joinpath(f"round-{number}", *(re.sub(r"[^a-z0-9]+", "-", name.lower()) for name in names))


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Return the names in the order of a round: each is first in turn."""
    at = number % max(len(names), 1)
    return [*names[at:], *names[:at]]
