"""What is wrong with a TOML text, and the line around it, for a message: short, printable, and without secrets. Pure.

What is secret is guessed from keys: a file with a mistake has no plugins yet that would say it.
"""

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


MOST_SHOWN = 72
_HIDDEN = "***"
_SECRET = re.compile(
    r"passw|passphrase|(?<![a-z])pass(?![a-z])|pwd|secret|token|salt|credential|private|api.?key", re.IGNORECASE
)
# Behind such a key nothing of a line is shown: where the key ends may be what is wrong in it.
_KEY_END = re.compile(r"[\w-]*[\"']?(?:\s*[=:]\s*|\s+)")


def excerpt(text: str, offset: int, number: int) -> str:
    """Return the line `number` at `offset`, and a line with a caret below the place."""
    line, start = line_at(text, offset)
    before, shown = (_HIDDEN, _HIDDEN) if _hidden(text, start) else (masked(line[: offset - start]), masked(line))
    skipped = max(len(before) - MOST_SHOWN // 2, 0) if len(shown) > MOST_SHOWN else 0
    shown = shown[skipped : skipped + MOST_SHOWN].replace("\t", " ")
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in shown)
    caret = min(len(before) - skipped, len(shown))
    return f"{number} | {shown}\n{' ' * len(str(number))} | {' ' * caret}^"


def masked(text: str) -> str:
    """Return the beginning of a line, without what follows a secret's key, and without the user of a URL."""
    secret = _SECRET.search(text)
    if secret:
        key = _KEY_END.match(text, secret.end())
        return text[: key.end() if key else secret.end()] + _HIDDEN
    begin, end = text.find("://"), text.rfind("@")
    return f"{text[: begin + 3]}{_HIDDEN}{text[end:]}" if 0 <= begin < end else text


def _hidden(text: str, start: int) -> bool:
    """True for a line that begins within a string, or within a value whose key may be a secret's."""
    opened = open_at(text, start)
    return opened.string is not None or _SECRET.search(text, opened.statement, start) is not None


_PLACE = re.compile(r" \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")
_WORDS = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
_NULLS = ("none", "null", "nil")
_TYPOGRAPHIC = "\u201c\u201d\u201e\u2018\u2019\u201a"


class Mistake(NamedTuple):
    """`excerpt` is two lines, with secrets masked; `line` counts from 1. No text has more than a few hundred
    letters."""

    fact: str
    line: int
    excerpt: str
    hint: str


def explain(text: str, message: str) -> Mistake:
    """Explain the message of the parser of a text."""
    text = text.replace("\r\n", "\n")
    place = _PLACE.search(message)
    fact = _PLACE.sub("", message)[:MOST_SHOWN]
    offset = len(text.rstrip())
    if place and place["line"]:
        starts = [0, *(match.end() for match in re.finditer("\n", text))]
        offset = min(starts[int(place["line"]) - 1] + int(place["column"]) - 1, len(text))
    offset, hint = _meant(text, offset, fact)
    line = text.count("\n", 0, offset) + 1
    return Mistake(fact[:1].lower() + fact[1:], line, excerpt(text, offset, line), hint)


def _meant(text: str, offset: int, fact: str) -> tuple[int, str]:
    """Return the place that is wrong, which may be before the place where the parser stopped, and the hint."""
    opened = open_at(text, offset)
    line, start = line_at(text, offset)
    rest = line[offset - start :]
    if rest[:1] in _TYPOGRAPHIC and rest:
        return offset, "write plain quotes, \" or ', instead of typographic ones"
    if text.startswith("\ufeff"):
        return 0, "remove the byte order mark at the beginning of the file"
    if fact.startswith("Found invalid character") or (rest and not rest[0].isprintable() and rest[0] != "\n"):
        return offset, "remove the invisible character"
    if fact.startswith(("Cannot declare", "Cannot redefine", "Cannot mutate", "Cannot overwrite", "Duplicate")):
        line, start = line_at(text, opened.statement)
        return start, (_declared_twice if _name_in(line) else _set_twice)(text, start, line)
    if fact.startswith(("Unterminated", "Illegal character '\\n'", "Illegal character '\\r'", "Expected \"'")):
        return offset if opened.string is None else opened.string, "the string that begins here is not closed"
    if "\\" in fact or "escape" in fact.lower() or "hex value" in fact or "Unicode scalar" in fact:
        return offset, "in \"...\" a backslash begins an escape: write '...', or each backslash twice"
    brackets = opened.brackets
    if brackets and text[brackets[-1]] == "{":
        return _inline_table(text, offset, brackets[-1])
    next_statement = bool(brackets) and brackets[0] < start and re.match(r"\s*(?:[\w.-]+\s*=|\[)", line)
    if brackets and (not rest.strip() or fact.startswith("Unclosed array") or next_statement):
        hint = "the array that begins here is not closed: commas between its values, ] at its end"
        return brackets[0 if next_statement else -1], hint
    if brackets:
        return offset, "strings need quotes in TOML, and commas separate values"
    if opened.statement < start:
        return offset, "nothing but a comment may stand behind the value"
    if fact.startswith("Expected ']") and (name := _name_in(line)):
        return offset, f"close the table's name: {name.opening}{name.name}{name.closing}"
    if fact.startswith("Expected '='"):
        meant = "key = value, with = instead of :" if rest.lstrip().startswith(":") else "key = value: the = is missing"
        return offset, f"write {meant}"
    if fact.startswith(("Invalid value", "Expected newline")):
        return _value(line, start, offset)
    if line.lstrip().startswith("="):
        return offset, "a key is missing in front of ="
    return (
        offset,
        "write key = value, [table] or [[array of tables]]; other keys than of A-Z a-z 0-9 _ - need quotes",
    )


def _value(line: str, start: int, offset: int) -> tuple[int, str]:
    key, equals, behind = line.partition("=")
    value = behind.partition(" #")[0].strip()
    at = start + len(key) + 1 + len(behind) - len(behind.lstrip())
    key = key.strip()[:MOST_SHOWN]
    if not equals:
        return offset, "one statement a line"
    if not value or value.startswith("#"):
        return start + len(line.rstrip()), "the value is missing"
    if value.lower() in _WORDS:
        return at, f"write {key} = {_WORDS[value.lower()]}"
    if value.lower() in _NULLS:
        return at, f"TOML has no {value}: leave the key out"
    if re.fullmatch(r"[+-]?\.\d+|[+-]?\d+\.", value):
        return at, "a number has digits before and behind its point, such as 0.5"
    if re.fullmatch(r"[+-]?0\d[\d_]*(?:\.\d+)?", value):
        return at, "a number has no 0 in front"
    if value[0] in "\"'":
        return offset, "nothing but a comment may stand behind the string; a quote inside it needs a backslash"
    if re.search(r"\s[\w.-]+\s*=", value):
        return offset, "one key a line"
    if value[0] in "[{":
        return offset, "commas separate values"
    quoted = masked(f'{key} = "{value}"') if len(value) < MOST_SHOWN else f'{key} = "..."'
    return at, f"strings need quotes in TOML: {quoted}"


def _inline_table(text: str, offset: int, opened: int) -> tuple[int, str]:
    following = text[offset : offset + 1]
    if following == "}":
        return offset, "no comma behind the last value of {...}"
    if following in ("", "\n") or text.count("\n", opened, offset):
        return opened, "{...} ends with } in the line where it begins; write a [table] for a longer one"
    return offset, "inside {...} write key = value, with commas between"


class _TableName(NamedTuple):
    """The one that stands in a line, closed or not."""

    opening: str
    name: str

    @property
    def closing(self) -> str:
        return self.opening.replace("[", "]")


def _name_in(line: str) -> _TableName | None:
    stripped = line.partition("#")[0].strip()
    bare = stripped.lstrip("[")
    opening = stripped[: min(len(stripped) - len(bare), 2)]
    name = bare.rstrip("]").strip()
    return _TableName(opening, name) if opening and "]" not in name and len(name) < MOST_SHOWN else None


def _declared_twice(text: str, start: int, line: str) -> str:
    here = _name_in(line)
    for number, other in enumerate(text[:start].split("\n") if here else (), 1):
        assert here
        there = _name_in(other)
        if there and there.name == here.name:
            if there.opening != here.opening:
                found = f"{there.opening}{there.name}{there.closing}"
                return f"line {number} has {found}: write every one as [[{here.name}]]"
            return f"[{here.name}] is in line {number} already: write the keys of both there"
        if re.match(rf"\s*{re.escape(here.name)}\s*[.=]", other):
            return f"{here.name} has values in line {number} already: write all of them into one [{here.name}]"
    return "write the keys of both tables into one"


def _set_twice(text: str, start: int, line: str) -> str:
    key = line.partition("=")[0].strip()
    for number, other in reversed([*enumerate(text[:start].split("\n"), 1)]):
        if _name_in(other):
            break
        if other.partition("=")[0].strip() == key:
            return f"{key[:MOST_SHOWN]} has a value in line {number} already: remove one of them"
    return "the key has a value already: remove one of them"
