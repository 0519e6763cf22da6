"""The consoles of commands, one for results and one for errors, and numbers, times and amounts as people read them."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from kvframework.text import counted, short_count, short_duration, short_number

__all__ = [
    "PlainConsole",
    "counted",
    "print_view",
    "short_count",
    "short_duration",
    "short_number",
    "stderr",
    "stdout",
]

PIPE_WIDTH = 1000


class PlainConsole(Console):
    """A console that writes letters which cannot be shown as in JSON: a name or a peer's text commands no terminal, and
    no name of a file lacks an encoding."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text.isprintable() else Segment(_printable(text), style)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() or letter == "\n" else _escape(letter) for letter in text)


def _escape(letter: str) -> str:
    code = letter.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{code[at : at + 4]}" for at in range(0, len(code), 4))


# Results may be piped; wrapping at a guessed width would break lines that other programs read.
stdout = PlainConsole(soft_wrap=True, highlight=False)
stderr = PlainConsole(stderr=True, soft_wrap=True, highlight=False)


def print_view(view: RenderableType) -> None:
    """Print a view that may contain tables. Into a pipe it is not wrapped, whatever COLUMNS says."""
    console = stdout if stdout.is_terminal else PlainConsole(width=PIPE_WIDTH, highlight=False)
    console.print(view, soft_wrap=not stdout.is_terminal)
