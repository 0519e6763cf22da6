"""The checks of the plugins in the configuration: each table in its own process, so that no plugin can block or end the
checks of others. It reads its request from standard input, and writes a `Finding` a line to descriptor `argv[1]`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import msgspec

from kvframework.api.memory import MemoryProvider
from kvframework.api.plugin import ByteSize, Finding, Options, ServerTerms, TableContext
from kvframework.api.tier import TierProvider
from kvframework.api.transport import TransportProvider
from kvframework.bounded_calls import bounded
from kvframework.config.schema import Config, PluginTable
from kvframework.doctor.machine import memlock
from kvframework.errors import KVFrameworkError
from kvframework.masking import HIDDEN, hiding, secrets_of
from kvframework.registry.discovery import KINDS
from kvframework.registry.plugin_check import AnyProvider
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import check_table, named_tables, resolve_table, server_terms
from kvframework.supervise.child import run_isolated
from kvframework.text import described

# The part of a check's time that is kept for the end of the process, after a plugin's own diagnosis.
_TO_END_S = 1.0


class Subject(msgspec.Struct, frozen=True):
    """A table, the kind of plugin that it names, and the time for the plugin's own diagnosis in seconds; 0: none.
    `replaces` is the process of this user's server at the endpoint; `kept`: a keeper has L1 for the next."""

    kind: str
    table: PluginTable
    diagnose_s: float = 0.0
    replaces: int | None = None
    kept: bool = False
    server: ServerTerms = ServerTerms()


def refusal(error: KVFrameworkError) -> Finding:
    """The finding for an error with which a server would refuse to start; its name is the error's code."""
    hint = f"hint: {error.hint}" if error.hint and error.available else error.hint
    advice = "; ".join(filter(None, (error.available and f"expected: {error.available}", hint)))
    return Finding(error.code, "fail", error.fact, advice, error.where)


def configured(config: Config, *, replaces: int | None = None, kept: bool = False) -> list[Subject]:
    """Every table that names a plugin. `replaces`: the process of this user's server that runs at the endpoint and
    holds memory, as a keeper does if `kept`, so the memory plugin is not asked for more."""
    terms = server_terms(config)
    return [Subject(kind.kind, table, 0.0, replaces, kept, terms) for table, kind in named_tables(config)]


def common_findings(config: Config, *, serving: bool, deadline_s: float) -> list[Finding]:
    """The refusals that are not of one table. `serving`: a server of this user runs at the endpoint."""
    request = msgspec.msgpack.encode((config, serving), enc_hook=int)  # a size
    ran = run_isolated(__name__, request, function="check_configuration", deadline_s=deadline_s)
    found = [msgspec.json.decode(line, type=Finding) for line in ran.lines]
    if ran.ended:
        found.append(Finding("config.check", "fail", f"the process of this check {ran.ended}", "report it"))
    return found or [Finding("config.start", "ok", "key files, stores, socket and ports allow a server to start")]


def table_findings(subject: Subject, *, deadline_s: float) -> Iterator[Finding]:
    use, where = f"{subject.kind}.{subject.table.use}", subject.table.where
    held = subject.kind == "memory" and (subject.kept or subject.replaces is not None)
    request = msgspec.structs.replace(subject, diagnose_s=0.0 if held else deadline_s - _TO_END_S)
    ran = run_isolated(__name__, msgspec.msgpack.encode(request), function="check_plugin", deadline_s=deadline_s)
    yield from (msgspec.json.decode(line, type=Finding) for line in ran.lines)
    if ran.ended:
        said = ran.printed.strip().splitlines()
        fact = f"{use}: the process that diagnoses the plugin {ran.ended}{f': {said[-1]}' if said else ''}"
        name = "plugin.diagnose" if ran.lines else "plugin.usable"
        yield Finding(name, "fail", fact, "run kvframework plugins check, or ask the plugin's author", where)


def check_configuration() -> None:
    """Find the refusals that are not of one table. The request is the configuration, and whether its server runs."""
    from kvframework.preflight import common_refusals  # a plugin's process needs none of it

    config, running = msgspec.msgpack.decode(
        sys.stdin.buffer.read(),
        type=tuple[Config, bool],
        dec_hook=lambda kind, value: ByteSize(value) if kind is ByteSize else value,
    )
    for error in common_refusals(config, PluginRegistry(), running=running):
        _report(refusal(error))


def check_plugin() -> None:
    """Find out whether a plugin can be used, and what its own diagnosis says. The request is a `Subject`."""
    started = time.monotonic()
    subject = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Subject)
    secret = hiding(())
    registry, table = PluginRegistry(), subject.table
    try:
        with bounded(lambda _: None):  # the deadline is that of the process
            provider, options = resolve_table(registry, table, KINDS[subject.kind].provider)
        # A plugin may quote its options, and findings are parts of bug reports.
        secret = hiding(secrets_of(options))
        terms, replaces, kept = subject.server, subject.replaces, subject.kept
        with bounded(lambda _: None):
            check_table(registry, table, provider, options, server=terms, replaces=replaces, kept=kept)
        found = _findings(subject, provider, options, started + subject.diagnose_s)
    except KVFrameworkError as error:
        found = iter([refusal(error)])
    for each in found:
        fact, advice = secret.sub(HIDDEN, each.fact), secret.sub(HIDDEN, each.advice)
        _report(msgspec.structs.replace(each, fact=fact, advice=advice, where=each.where or table.where))


def _report(finding: Finding) -> None:
    os.write(int(sys.argv[1]), msgspec.json.encode(finding) + b"\n")


def _findings(subject: Subject, provider: AnyProvider, options: Options, deadline: float) -> Iterator[Finding]:
    use, place = subject.table.use, subject.table.where
    yield Finding("plugin.usable", "ok", f"{subject.kind} {use} can be used")
    if isinstance(provider, TransportProvider) and provider.is_gpu:
        yield memlock(f"{subject.kind} {use}")
    diagnosed = (MemoryProvider, TierProvider, TransportProvider)
    if not isinstance(provider, diagnosed) or provider.diagnose is None or not subject.diagnose_s:
        return
    try:
        for each in provider.diagnose(options, TableContext(where=place), deadline):
            yield msgspec.json.decode(msgspec.json.encode(each), type=Finding)  # it is made by a plugin
    except KVFrameworkError as error:
        placed = error.where.startswith(place)  # a plugin may name another place
        fact = error.fact if placed or not error.where else f"{error.where}: {error.fact}"
        where = error.where if placed else place
        yield Finding("plugin.diagnose", "fail", fact, error.hint or error.available, where)
    except Exception as error:  # noqa: BLE001  whatever a plugin raises
        fact = f"{use}: the plugin's diagnosis failed with {described(error)}"
        yield Finding("plugin.diagnose", "fail", fact, "ask the plugin's author")
