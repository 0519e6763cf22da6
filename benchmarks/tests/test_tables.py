"""What a bench prints is whole."""

from __future__ import annotations

from rich.console import Console, RenderableType

from kvframework_bench.command import _WIDTH
from kvframework_bench.console import skipped_table
from kvframework_bench.errors import Skipped


def lines(renderable: RenderableType, width: int) -> list[str]:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_what_was_skipped_is_told_whole() -> None:
    told = Skipped("mooncake", "a reason " * 40, 'pip install "DIR-OF-CLONE[mooncake]"')
    shown = "\n".join(lines(skipped_table([told]), _WIDTH))
    assert all(part.strip() in shown for part in (told.what, told.reason, told.hint))
