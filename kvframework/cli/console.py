"""The consoles of the CLI, one for results and one for errors, and the form of errors, documents and tables."""

from __future__ import annotations

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from kvframework.errors import KVFrameworkError

_PIPE_WIDTH = 1000

# Results may be piped; wrapping at a guessed width would break lines that other programs read.
stdout = Console(soft_wrap=True, highlight=False)
stderr = Console(stderr=True, soft_wrap=True, highlight=False)


def print_error(error: KVFrameworkError) -> None:
    """Print an error's text in full and never as markup."""
    stderr.print(Text.assemble(("error: ", "bold red"), str(error)))


def print_unforeseen(error: Exception) -> None:
    """Prints one line for an unexpected error, and how to see more."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    hint = "\n  hint: run it again as `kvframework --debug ...` for the traceback, and report it"
    stderr.print(Text.assemble(("error: ", "bold red"), "unforeseen ", text, hint))


def print_document(document: object) -> None:
    """Print a document as indented JSON; a size is its number of bytes."""
    encoded = msgspec.json.encode(document, enc_hook=_plain)
    stdout.print(msgspec.json.format(encoded).decode(), markup=False)


def print_view(view: RenderableType) -> None:
    """Print a view that may contain tables. Into a pipe it is not wrapped, whatever COLUMNS says."""
    console = stdout if stdout.is_terminal else Console(width=_PIPE_WIDTH, soft_wrap=True, highlight=False)
    console.print(view)


def print_text(text: Text | str) -> None:
    """Print a sentence. A terminal's lines end between words; in a pipe it is one line."""
    stdout.print(Text(text) if isinstance(text, str) else text, soft_wrap=not stdout.is_terminal)


def print_table(table: Table) -> None:
    """Prints a table as wide as the terminal. In a pipe each row is one line."""
    console = stdout if stdout.is_terminal else Console(width=_PIPE_WIDTH)
    console.print(table, soft_wrap=False)


def _plain(value: object) -> object:
    return int(value) if isinstance(value, int) else str(value)
