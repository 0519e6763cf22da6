"""Mistakes in a TOML text: the line and a caret below the place, and the one thing to do about it. Pure.

The parser's message says what it expected; the text at the place says what the author meant.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_PLACE = re.compile(r" \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")
_TOKEN = re.compile(
    r'#[^\n]*|"""(?:\\.|.)*?"""|\'\'\'.*?\'\'\'|(?<!")"(?:\\.|[^"\\\n])*"(?!")|\'[^\'\n]*\'|[][{}]', re.DOTALL
)
_HEADER = re.compile(r"\s*(\[\[?)\s*([^]#]*?)\s*(\]?\]?)\s*(?:#.*)?$")
_CREDENTIALS = re.compile(r"(?<=://).*@")
# The rest of such a line is not shown: where the key ends may be what is wrong in it.
_SECRET_KEY = re.compile(
    r"^.*?(?:passw|secret|token|salt|credential|api.?key)[\w-]*[\"']?(?:\s*[=:]\s*|\s+)", re.IGNORECASE
)
_WORDS = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
_NULLS = ("none", "null", "nil")
_TYPOGRAPHIC = "\u201c\u201d\u201e\u2018\u2019\u201a"
_MOST_SHOWN = 72


class Mistake(NamedTuple):
    """`excerpt` is two lines, with secrets masked; `line` counts from 1."""

    fact: str
    line: int
    excerpt: str
    hint: str


def explain(text: str, message: str) -> Mistake:
    """Explain the message of the parser of a text."""
    text = text.replace("\r\n", "\n")
    place = _PLACE.search(message)
    fact = _PLACE.sub("", message)
    offset = len(text.rstrip())
    if place and place["line"]:
        starts = [0, *(match.end() for match in re.finditer("\n", text))]
        offset = min(starts[int(place["line"]) - 1] + int(place["column"]) - 1, len(text))
    offset, hint = _meant(text, offset, fact)
    line = text.count("\n", 0, offset) + 1
    return Mistake(fact[:1].lower() + fact[1:], line, _excerpt(text, offset, line), hint)


def _meant(text: str, offset: int, fact: str) -> tuple[int, str]:
    """Return the place that is wrong, which may be before the place where the parser stopped, and the hint."""
    line, start = _line_at(text, offset)
    rest = text[offset : start + len(line)]
    if rest[:1] in _TYPOGRAPHIC and rest:
        return offset, "write plain quotes, \" or ', instead of typographic ones"
    if text.startswith("\ufeff"):
        return 0, "remove the byte order mark at the beginning of the file"
    if fact.startswith("Found invalid character") or (rest and not rest[0].isprintable() and rest[0] != "\n"):
        return offset, "remove the invisible character"
    if fact.startswith(("Cannot declare", "Cannot redefine", "Cannot mutate")):
        return start, _declared_twice(text, start, line)
    if fact.startswith(("Cannot overwrite", "Duplicate")):
        if _HEADER.match(line[:_MOST_SHOWN]):
            return start, _declared_twice(text, start, line)
        return start, _set_twice(text, start, line)
    if fact.startswith(("Unterminated", "Illegal character '\\n'", "Illegal character '\\r'", "Expected \"'")):
        return _string_start(text, offset), "the string that begins here is not closed"
    if "\\" in fact or "escape" in fact.lower() or "hex value" in fact or "Unicode scalar" in fact:
        return offset, "in \"...\" a backslash begins an escape: write '...', or each backslash twice"
    opened = _open_at(text, offset)
    if opened and text[opened[-1]] == "{":
        return _inline_table(text, offset, opened[-1])
    next_statement = bool(opened) and opened[0] < start and re.match(r"\s*(?:[\w.-]+\s*=|\[)", line)
    if opened and (not rest.strip() or fact.startswith("Unclosed array") or next_statement):
        hint = "the array that begins here is not closed: commas between its values, ] at its end"
        return opened[0 if next_statement else -1], hint
    header = _HEADER.match(line[:_MOST_SHOWN])
    if fact.startswith("Expected ']") and header:
        closing = header[1].replace("[", "]")
        return offset, f"close the table's name: {header[1]}{header[2]}{closing}"
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
    if not equals:
        return offset, "one statement a line"
    if not value or value.startswith("#"):
        return start + len(line.rstrip()), "the value is missing"
    if value.lower() in _WORDS:
        return at, f"write {key.strip()} = {_WORDS[value.lower()]}"
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
    quoted = _masked(f'{key.strip()} = "{value}"') if len(value) < _MOST_SHOWN else f'{key.strip()} = "..."'
    return at, f"strings need quotes in TOML: {quoted}"


def _inline_table(text: str, offset: int, opened: int) -> tuple[int, str]:
    following = text[offset : offset + 1]
    if following == "}":
        return offset, "no comma behind the last value of {...}"
    if following in ("", "\n") or text.count("\n", opened, offset):
        return opened, "{...} ends with } in the line where it begins; write a [table] for a longer one"
    return offset, "inside {...} write key = value, with commas between"


def _declared_twice(text: str, start: int, line: str) -> str:
    header = _HEADER.match(line)
    name = header[2] if header else ""
    for number, other in enumerate(text[:start].split("\n"), 1):
        found = _HEADER.match(other)
        if header and found and found[2] == name:
            if found[1] != header[1]:
                return f"line {number} has {found[1]}{name}{found[3]}: write every one as [[{name}]]"
            return f"[{name}] is in line {number} already: write the keys of both there"
        if re.match(rf"\s*{re.escape(name)}\s*[.=]", other):
            return f"{name} has values in line {number} already: write all of them into one [{name}]"
    return "write the keys of both tables into one"


def _set_twice(text: str, start: int, line: str) -> str:
    key = line.partition("=")[0].strip()
    for number, other in reversed([*enumerate(text[:start].split("\n"), 1)]):
        if _HEADER.match(other):
            break
        if other.partition("=")[0].strip() == key:
            return f"{key} has a value in line {number} already: remove one of them"
    return "the key has a value already: remove one of them"


def _open_at(text: str, offset: int) -> list[int]:
    """Return the places of the brackets that are open at `offset`, without those of tables' names."""
    opened: list[int] = []
    for token in _TOKEN.finditer(text, 0, offset):
        sign = token[0]
        if sign in "[{" and (opened or "=" in _line_at(text, token.start())[0].partition(sign)[0]):
            opened.append(token.start())
        elif sign in "]}" and opened:
            opened.pop()
    return opened


def _string_start(text: str, offset: int) -> int:
    """Return where the string begins that is open at `offset`."""
    at = 0
    for token in _TOKEN.finditer(text, 0, offset):
        at = token.end()
    found = re.search(r"\"\"\"|'''|[\"']", text[at:offset])
    return at + found.start() if found else offset


def _line_at(text: str, offset: int) -> tuple[str, int]:
    start = text.rfind("\n", 0, offset) + 1
    return text[start:].partition("\n")[0], start


def _excerpt(text: str, offset: int, number: int) -> str:
    line, start = _line_at(text, offset)
    before = _masked(line[: offset - start])
    shown = _masked(line)
    skipped = max(len(before) - _MOST_SHOWN // 2, 0) if len(shown) > _MOST_SHOWN else 0
    shown = shown[skipped : skipped + _MOST_SHOWN].replace("\t", " ")
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in shown)
    caret = min(len(before) - skipped, len(shown))
    return f"{number} | {shown}\n{' ' * len(str(number))} | {' ' * caret}^"


def _masked(text: str) -> str:
    secret = _SECRET_KEY.match(text)
    return f"{secret[0]}***" if secret else _CREDENTIALS.sub("***@", text)
