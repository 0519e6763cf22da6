"""What the doctor finds of one table of a configuration, asked in a process of its own as the command does."""

from __future__ import annotations

from kvframework.api.plugin import Finding
from kvframework.config.schema import PluginTable
from kvframework.doctor.plugins import Subject, table_findings

WHERE = "kvf.toml: [[l2]] #1"


def ask(
    use: str, *, kind: str = "tier", replaces: int | None = None, deadline_s: float = 60.0, **options: object
) -> dict[str, Finding]:
    """Findings by id; each is there once."""
    subject = Subject(kind, PluginTable(use, options, WHERE), replaces=replaces)
    found = list(table_findings(subject, deadline_s=deadline_s))
    assert len({each.id for each in found}) == len(found)
    assert all(each.where.startswith(WHERE) for each in found)
    return {each.id: each for each in found}


def ask_a_silent_one(use: str, wanted: str, **options: object) -> dict[str, Finding]:
    """Findings of what answers nothing, with the first deadline by which this machine comes to the `wanted` one."""
    found: dict[str, Finding] = {}
    for deadline_s in (2.0, 8.0, 32.0):
        found = ask(use, deadline_s=deadline_s, **options)
        if found["plugin.usable"].level == "ok" and wanted in found:
            break
    return found


def levels(found: dict[str, Finding]) -> dict[str, str]:
    return {each.id: each.level for each in found.values()}
