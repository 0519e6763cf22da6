"""The processes that check a configuration. Each reads its request from standard input, and reports a `Finding` a line
to the descriptor of `argv[1]`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from kvframework.api.driver import DeviceTransportProvider, TableContext
from kvframework.api.memory import MemoryProvider
from kvframework.api.plugin import ByteSize, Finding, Options
from kvframework.api.tier import TierProvider
from kvframework.api.transport import AnyTransportProvider
from kvframework.config import Config
from kvframework.doctor.machine import memlock
from kvframework.doctor.plugins import Subject, refusal
from kvframework.errors import KVFrameworkError
from kvframework.registry import KINDS, PluginRegistry, check_table, resolve_table


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
    for finding in _findings(subject, started + subject.diagnose_s):
        _report(msgspec.structs.replace(finding, where=finding.where or subject.table.where))


def _report(finding: Finding) -> None:
    os.write(int(sys.argv[1]), msgspec.json.encode(finding) + b"\n")


def _findings(subject: Subject, deadline: float) -> Iterator[Finding]:
    use = subject.table.use
    try:
        registry = PluginRegistry()
        provider, options = resolve_table(registry, subject.table, KINDS[subject.kind].providers[0])
        check_table(
            registry,
            subject.table,
            provider,
            options,
            server=subject.server,
            replaces=subject.replaces,
            kept=subject.kept,
        )
    except KVFrameworkError as error:
        yield refusal(error)
        return
    yield Finding("plugin.usable", "ok", f"{subject.kind} {use} can be used")
    if isinstance(provider, AnyTransportProvider) and provider.is_gpu:
        yield memlock(f"{subject.kind} {use}")
    diagnosed = (MemoryProvider, TierProvider, DeviceTransportProvider)
    if isinstance(provider, diagnosed) and provider.diagnose is not None and subject.diagnose_s > 0:
        yield from _diagnosis(provider, options, subject, deadline)


def _diagnosis(
    provider: MemoryProvider[Any] | TierProvider[Any] | DeviceTransportProvider[Any],
    options: Options,
    subject: Subject,
    deadline: float,
) -> Iterator[Finding]:
    assert provider.diagnose is not None
    try:
        yield from _each(provider.diagnose(options, TableContext(where=subject.table.where), deadline))
    except KVFrameworkError as error:
        placed = error.where.startswith(subject.table.where)  # a plugin may name a place of its own
        fact = error.fact if placed or not error.where else f"{error.where}: {error.fact}"
        where = error.where if placed else subject.table.where
        yield Finding("plugin.diagnose", "fail", fact, error.hint or error.available, where)
    except _NoFindings as error:
        fact = f"{subject.table.use}: diagnose returned {error}, expected Sequence[Finding]"
        yield Finding("plugin.diagnose", "fail", fact, "ask the plugin's author")
    except Exception as error:  # noqa: BLE001  whatever a plugin raises
        fact = " ".join(f"{subject.table.use}: its diagnosis failed with {type(error).__name__}: {error}".split())
        yield Finding("plugin.diagnose", "fail", fact, "ask the plugin's author")


class _NoFindings(Exception):
    """The type of the wrong result."""


def _each(returned: object) -> Iterator[Finding]:
    kind = type(returned).__name__
    if isinstance(returned, str) or not isinstance(returned, Iterable):
        raise _NoFindings(kind)
    for each in returned:
        if not isinstance(each, Finding):
            raise _NoFindings(f"{kind}[{type(each).__name__}]")
        yield each
