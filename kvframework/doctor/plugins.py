"""The checks of the plugins in the configuration: each table in a process of its own, so that no plugin can block or
end the checks of others."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvframework.api.plugin import Finding, ServerTerms
from kvframework.config import Config, PluginTable
from kvframework.errors import KVFrameworkError
from kvframework.registry import named_tables, server_terms
from kvframework.supervise.child import run_isolated

# The part of a check's time that is kept for the end of the process, after a plugin's own diagnosis.
_TO_END_S = 1.0


class Subject(msgspec.Struct, frozen=True):
    """A table, the kind of plugin that it names, and the time for the plugin's own diagnosis in seconds; 0: none.
    `replaces` is the process of this user's server that runs at the endpoint; `kept`: a keeper has L1 for
    the next one."""

    kind: str
    table: PluginTable
    diagnose_s: float = 0.0
    replaces: int | None = None
    kept: bool = False
    server: ServerTerms = ServerTerms()


def refusal(error: KVFrameworkError) -> Finding:
    """The finding for an error with which a server would refuse to start; its name is the error's code."""
    advice = error.hint or (f"available: {error.available}" if error.available else "")
    return Finding(error.code, "fail", error.fact, advice, error.where)


def configured(config: Config) -> list[Subject]:
    """Every table that names a plugin."""
    terms = server_terms(config)
    return [Subject(descriptor.kind, table, server=terms) for table, descriptor in named_tables(config)]


def common_findings(config: Config, *, serving: bool, deadline_s: float) -> list[Finding]:
    """The refusals that are not of one table. `serving`: a server of this user runs at the endpoint."""
    request = msgspec.msgpack.encode((config, serving), enc_hook=int)  # a size
    ran = run_isolated("kvframework.doctor.process", request, function="check_configuration", deadline_s=deadline_s)
    found = [msgspec.json.decode(line, type=Finding) for line in ran.lines]
    if ran.ended:
        found.append(Finding("config.check", "fail", f"the process that checks it {ran.ended}", "report it"))
    return found or [Finding("config.start", "ok", "keys, stores, socket and ports let a server start")]


def table_findings(
    subject: Subject, *, replaces: int | None, deadline_s: float, kept: bool = False
) -> Iterator[Finding]:
    """The findings for one table. `replaces`: the process of this user's server that runs at the endpoint and holds
    memory, as a keeper does if `kept`, so the memory plugin is not asked for more."""
    where = subject.table.where
    held = subject.kind == "memory" and (kept or replaces is not None)
    diagnose_s = 0.0 if held else deadline_s - _TO_END_S
    timed = msgspec.structs.replace(subject, replaces=replaces, kept=kept, diagnose_s=diagnose_s)
    request = msgspec.msgpack.encode(timed)
    ran = run_isolated("kvframework.doctor.process", request, function="check_plugin", deadline_s=deadline_s)
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
