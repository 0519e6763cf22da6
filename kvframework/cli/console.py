"""Owns what the CLI prints on: one rich console for results, one for errors."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from kvframework.errors import KVFrameworkError

# Results may be piped; wrapping them at a guessed width would break lines that other programs read.
stdout = Console(soft_wrap=True, highlight=False)
stderr = Console(stderr=True, soft_wrap=True, highlight=False)


def print_error(error: KVFrameworkError) -> None:
    """Prints an error's text, all of it and never as markup."""
    stderr.print(Text.assemble(("error: ", "bold red"), str(error)))
