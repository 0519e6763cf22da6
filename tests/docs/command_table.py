"""Makes the table of commands in docs/commands.md out of the command line itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.support.whole_cli import whole_cli

START, END = "<!-- commands -->\n", "<!-- end of commands -->"


def renewed(page: str) -> str:
    """The page with the table between its comments as the commands are."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    rows = [f"| `{name}` | {text} |" for name, text in _commands(whole_cli(without=("bench",)), "kvframework")]
    return before + START + "\n".join(["| command | what it does |", "|---|---|", *rows, ""]) + END + after


def _commands(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """Every command that does something, and the first paragraph of its help. Of other distributions
    only this repository's own are there: what is installed must not change the page."""
    inner = getattr(command, "commands", {})
    if not inner or command.invoke_without_command:
        yield name, " ".join((command.help or "").split("\n\n")[0].split()).replace("|", "\\|")
    for each, inside in inner.items():
        yield from _commands(inside, f"{name} {each}")
