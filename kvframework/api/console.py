"""The output of commands: errors, documents, sentences, tables, and numbers, times and amounts as people read them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from kvframework.errors import KVFrameworkError
from kvframework.logs.process_log import chosen_log, end_logging
from kvframework.text import counted, described, plain, short_count, short_duration, short_number

__all__ = [
    "PlainConsole",
    "counted",
    "print_document",
    "print_text",
    "print_view",
    "short_count",
    "short_duration",
    "short_number",
    "stderr",
    "stdout",
]

log = logging.getLogger(__name__)

PIPE_WIDTH = 1000


class PlainConsole(Console):
    """A console that escapes what cannot be shown as JSON does, so that no foreign text commands a terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments with every control character of their text escaped."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            if not control and not text.isprintable():
                shown = (letter if letter.isprintable() or letter == "\n" else _escape(letter) for letter in text)
                segment = Segment("".join(shown), style)
            yield segment


def _escape(letter: str) -> str:
    code = letter.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{code[at : at + 4]}" for at in range(0, len(code), 4))


# Results may be piped; wrapping at a guessed width would break lines that other programs read.
stdout = PlainConsole(soft_wrap=True, highlight=False)
stderr = PlainConsole(stderr=True, soft_wrap=True, highlight=False)


def print_view(view: RenderableType) -> None:
    """Print a view that may contain tables, as wide as the terminal. Into a pipe each row is one line."""
    console = stdout if stdout.is_terminal else PlainConsole(width=PIPE_WIDTH, highlight=False)
    console.print(view, soft_wrap=not stdout.is_terminal)


def print_error(error: Exception) -> None:
    """Print an error in full, an unforeseen one on one line, or as a line of the log if that is JSON."""
    foreseen = isinstance(error, KVFrameworkError)
    form = chosen_log()
    if form is not None and form.form == "json":
        log.critical("%s", error if foreseen else "unforeseen error", exc_info=None if foreseen else error)
        end_logging()
        return
    text = str(error)
    if not foreseen:
        hint = "run the command again as `kvframework --debug ...`, and report the traceback"
        text = f"unforeseen {described(error)}\n  hint: {hint}"
    stderr.print(Text.assemble(("error: ", "bold red"), text))


def print_document(document: object) -> None:
    """Print a document as indented JSON; a size is its number of bytes."""
    encoded = msgspec.json.encode(document, enc_hook=plain)
    stdout.print(msgspec.json.format(encoded).decode(), markup=False)


def print_text(text: Text | str) -> None:
    """Print a sentence. A terminal's lines end between words; in a pipe it is one line."""
    stdout.print(Text(text) if isinstance(text, str) else text, soft_wrap=not stdout.is_terminal)


def print_rows(heads: Sequence[str], rows: Iterable[Sequence[str | Text]], *, whole: Collection[str] = ()) -> None:
    """Print a table. Cells are folded, but for those below the heads in `whole`."""
    table = Table(*(Column(head, overflow="fold", no_wrap=head in whole) for head in heads), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    print_view(table)
