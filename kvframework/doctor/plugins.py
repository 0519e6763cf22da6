"""The checks of the plugins in the configuration: each table in a process of its own, so that no plugin can block or
end the checks of others."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvframework.api.findings import Finding
from kvframework.config import Config, PluginTable
from kvframework.errors import ConfigError
from kvframework.inspection.isolated import run_isolated
from kvframework.registry import codec_tables

# The part of a check's time that is kept for the end of the process, after a plugin's own diagnosis.
_TO_END_S = 1.0


class Subject(msgspec.Struct, frozen=True):
    """A table, the kind of plugin that it names, and the time for the plugin's own diagnosis in seconds; 0: none."""

    kind: str
    table: PluginTable
    diagnose_s: float = 0.0


def configured(config: Config) -> tuple[list[Subject], list[Finding]]:
    """Every table that names a plugin, and the findings that need no plugin."""
    subjects = [Subject("memory", config.l1.memory), Subject("eviction", config.l1.eviction)]
    subjects += [Subject("tier", each.tier) for each in config.l2]
    found: list[Finding] = []
    try:
        subjects += [Subject("codec", table) for table in codec_tables(config)]
    except ConfigError as error:
        found.append(Finding("config.codecs", "fail", error.fact, error.hint, error.where))
    subjects.append(Subject("hasher", config.hasher))
    for kind, tables in (
        ("transport", config.transport),
        ("layout", config.layout),
        ("requests", config.requests),
    ):
        subjects += [Subject(kind, table) for table in tables]
    return subjects, found


def table_findings(subject: Subject, *, serving: bool, deadline_s: float) -> Iterator[Finding]:
    """The findings for one table. `serving`: a server runs with this configuration and has its memory, so the memory
    plugin is not asked for more."""
    where = subject.table.where
    diagnose_s = 0.0 if subject.kind == "memory" and serving else deadline_s - _TO_END_S
    request = msgspec.msgpack.encode(msgspec.structs.replace(subject, diagnose_s=diagnose_s))
    ran = run_isolated("kvframework.doctor.plugin_process", request, deadline_s=deadline_s)
    for line in ran.lines:
        try:
            yield msgspec.json.decode(line, type=Finding)
        except msgspec.ValidationError as error:
            yield Finding(
                "plugin.diagnose",
                "fail",
                f"{subject.table.use}: its diagnosis is no finding: {error}",
                "ask the plugin's author",
                where,
            )
    if ran.ended:
        said = ran.printed.strip().splitlines()
        fact = f"{subject.table.use}: the process that runs its diagnosis {ran.ended}{f': {said[-1]}' if said else ''}"
        name = "plugin.diagnose" if ran.lines else "plugin.usable"
        yield Finding(name, "fail", fact, "run kvframework plugins check, or ask the plugin's author", where)
