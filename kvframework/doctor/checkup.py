"""The list of checks and the way to run one: in a thread of its own, with a deadline, with any exception as a finding.
Runs in the process of the command."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from kvframework.api.findings import Finding
from kvframework.config import Config, load_config
from kvframework.doctor import accelerator, interpreter, limits, memory, numa, plugins, sockets
from kvframework.doctor.plugins import refusal
from kvframework.errors import ConfigError
from kvframework.preflight import arena_is_kept, running_server

# The longest wait for a check.
CHECK_S = 5.0

# Most of the time goes into the start of processes.
_AT_ONCE = 4

Check = Callable[[], Iterable[Finding]]


class Checkup(msgspec.Struct, frozen=True):
    """All findings, in the order of the checks."""

    findings: list[Finding]
    ok: int
    warn: int
    fail: int


def examine(path: Path | None = None, overrides: Iterable[str] = ()) -> Checkup:
    """Runs all checks. Blocks for `CHECK_S` seconds a check at most; a configuration that cannot be read is a finding,
    and checks that need none run all the same."""
    findings: list[Finding] = []
    config: Config | None = None
    try:
        config = load_config(path, tuple(overrides))
    except ConfigError as error:
        findings.append(refusal(error))
    else:
        findings.append(Finding("config.load", "ok", f"read from {config.source}"))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for found in pool.map(lambda each: run_check(*each), _checks(config)):
            findings += found
    return Checkup(findings, *(sum(each.level == level for each in findings) for level in ("ok", "warn", "fail")))


def _checks(config: Config | None) -> Iterable[tuple[str, Check]]:
    """Subject and check of each."""
    yield "python", interpreter.python
    yield "kvframework", interpreter.distributions
    yield "accelerator", accelerator.cuda
    yield "memory", memory.memory
    yield "limits", limits.limits
    yield "numa", numa.nodes
    if config is None:
        return
    endpoint = sockets.endpoint_of(config)
    yield "memory", partial(memory.kept, endpoint)
    running = running_server(config)
    yield "socket", partial(sockets.socket_findings, endpoint, running)
    yield "config", partial(plugins.common_findings, config, serving=running is not None, deadline_s=CHECK_S)
    replaces, kept = None if running is None else running.pid, arena_is_kept(config)
    for table in plugins.configured(config):
        yield "plugin", partial(plugins.table_findings, table, replaces=replaces, kept=kept, deadline_s=CHECK_S)


def run_check(subject: str, check: Check, timeout_s: float | None = None) -> list[Finding]:
    """The findings of a check; its failure is a finding too, and so is its timeout (None: a second more than
    `CHECK_S`)."""
    timeout_s = CHECK_S + 1.0 if timeout_s is None else timeout_s
    found: list[Finding] = []
    failure: list[str] = []

    def run() -> None:
        try:
            found.extend(check())
        except Exception as error:  # noqa: BLE001  one check must not hide the others
            failure.append(" ".join(f"{type(error).__name__}: {error}".split()))

    thread = threading.Thread(target=run, name=f"doctor-{subject}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        failure.append(f"it did not end within {timeout_s:g} s")
    ended = [Finding(f"{subject}.check", "fail", f"the check itself failed: {each}", "report it") for each in failure]
    return [*found, *ended]
