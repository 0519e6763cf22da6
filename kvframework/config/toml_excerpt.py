"""The line of a TOML text around a place, for a message: short, printable, and without secrets. Pure.

What is secret is guessed from keys: a file with a mistake has no plugins yet that would say it.
"""

from __future__ import annotations

import re

from kvframework.config.toml_places import line_at, open_at

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
