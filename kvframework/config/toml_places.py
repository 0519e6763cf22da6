"""Places in a TOML text: the line there, and what is open. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

# The group of a string is there if the text, or the line of a string of one line, ends within it.
_TOKEN = re.compile(
    r"""\#[^\n]*
    | "{3} (?:\\.|[^\\])*? (?:"{3,5}|(\\?\Z))
    | '{3} .*? (?:'{3,5}|(\Z))
    | " (?:\\[^\n]|[^"\\\n])* (?:"|(\\?(?=\n|\Z)))
    | '[^'\n]* (?:'|((?=\n|\Z)))
    | [][{}=.,\n]""",
    re.DOTALL | re.VERBOSE,
)


class Open(NamedTuple):
    """The statement or table's name that begins at `statement`, the brackets of its value that are open, and where the
    open string begins, None: none is open."""

    statement: int
    brackets: list[int]
    string: int | None


def open_at(text: str, offset: int) -> Open:
    """Return what is open at `offset` of a text that is valid TOML before it."""
    statement, behind_equals = 0, False
    brackets: list[int] = []
    string: int | None = None
    for token in _TOKEN.finditer(text, 0, offset):
        sign = token[0]
        if sign == "\n":
            if not brackets:
                statement, behind_equals = token.end(), False
        elif sign == "=":
            behind_equals = True
        elif sign in "[{":
            if behind_equals:  # others are of a table's name
                brackets.append(token.start())
        elif sign in "]}":
            if brackets:
                brackets.pop()
        elif token.lastindex:
            string = token.start()
            break  # the parser may stop behind it, at the next quote or the end
    return Open(statement, brackets, string)


def deep_at(text: str, most: int) -> int | None:
    """Return where the part of a text that is valid TOML is first nested more than `most` tables and arrays deep."""
    level, in_key = 1, True
    name: int | None = None  # the level of the table's name in this line
    below = 0  # that of the last one
    opened: list[tuple[str, int]] = []  # the brackets of a value, and the level outside each
    for token in _TOKEN.finditer(text):
        sign = token[0]
        if sign == "\n" and not opened:
            below, name = below if name is None else level, None
            level, in_key = below + 1, True
        elif sign == "=":
            in_key = False
        elif sign == "." and in_key:
            level += 1
        elif sign == "[" and in_key and not opened:
            name = level = 1 if name is None else 2
        elif sign in ("[", "{"):
            opened.append((sign, level))
            level, in_key = level + 1, sign == "{"
        elif sign in ("]", "}") and opened:
            level, in_key = opened.pop()[1], False
        elif sign == "," and opened and opened[-1][0] == "{":
            level, in_key = opened[-1][1] + 1, True
        elif token.lastindex:
            break  # a string without an end
        if level > most:
            return token.start()
    return None


def line_at(text: str, offset: int) -> tuple[str, int]:
    """Return the line, and where it begins."""
    start = text.rfind("\n", 0, offset) + 1
    end = text.find("\n", start)
    return text[start : len(text) if end < 0 else end], start
