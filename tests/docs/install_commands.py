"""Brings the install commands of pages and templates into step with `kvframework.api.installing`."""

from __future__ import annotations

import re

from kvframework.api.installing import SOURCES, requirement

_COMMAND = re.compile(r"pip install [^`\n]*")
# As the sources were written, whatever they become.
_FOLDERS = {source.removeprefix("DIR-OF-CLONE"): distribution for distribution, source in SOURCES.items()}
# What a page may have: the names on an index, and folders of a clone. No path ends in one of these.
_WRITTEN = re.compile(
    rf'(?<![\w./-])"?(?:DIR-OF-CLONE(?P<folder>{"|".join(_FOLDERS)})|(?P<name>{"|".join(SOURCES)}))'
    r'(?:\[(?P<extras>[\w,-]+)\])?"?(?![\w/.-])'
)


def in_step(text: str) -> str:
    """The text with each requirement of a distribution of this project in a `pip install` as it is today."""
    return _COMMAND.sub(lambda command: _WRITTEN.sub(_today, command[0]), text)


def _today(found: re.Match[str]) -> str:
    distribution = found["name"] or _FOLDERS[found["folder"] or ""]
    extras = found["extras"].split(",") if found["extras"] else ()
    return requirement(*extras, distribution=distribution)
