"""Brings the install commands of pages and templates into step with `kvframework.api.installing`."""

from __future__ import annotations

import re

from kvframework.api.installing import requirement

_COMMAND = re.compile(r"pip install [^`\n]*")
# What a page may have: the names on an index, and folders of a clone. No path ends in one of these.
_WRITTEN = re.compile(
    r'(?<![\w./-])"?(?P<source>DIR-OF-CLONE(?P<folder>/benchmarks)?|kvframework(?P<name>-bench)?)'
    r'(?:\[(?P<extras>[\w,-]+)\])?"?(?![\w/.-])'
)


def in_step(text: str) -> str:
    """The text with each requirement of a distribution of this project in a `pip install` as it is today."""
    return _COMMAND.sub(lambda command: _WRITTEN.sub(_today, command[0]), text)


def _today(found: re.Match[str]) -> str:
    distribution = "kvframework-bench" if found["folder"] or found["name"] else "kvframework"
    extras = found["extras"].split(",") if found["extras"] else ()
    return requirement(*extras, distribution=distribution)
