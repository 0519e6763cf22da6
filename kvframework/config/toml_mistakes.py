"""Mistakes in a TOML text: the line and a caret below the place, and the one thing to do about it. Pure.

The parser's message says what it expected; the text at the place says what the author meant.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kvframework.config.toml_excerpt import MOST_SHOWN, excerpt, masked
from kvframework.config.toml_places import line_at, open_at

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
