"""`kvframework doctor`, its list of checks and the way to run one: in a separate thread, with a deadline, with any
exception as a finding. Runs in the process of the command. And the check of the server's local socket."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import typer
from rich.text import Text

from kvframework.api.command import EXIT_FOUND, AsJson, ConfigFile, Overrides, examples
from kvframework.api.console import print_document, print_rows, stdout
from kvframework.api.endpoint import parse_endpoint
from kvframework.api.plugin import ByteSize, Finding
from kvframework.bounded_calls import call_within
from kvframework.config.endpoint import check_directory, default_endpoint
from kvframework.config.load import load_config
from kvframework.config.schema import Config
from kvframework.doctor import machine, plugins
from kvframework.errors import ConfigError, EndpointError
from kvframework.preflight import RunningServer, arena_is_kept, keeper_status, running_server
from kvframework.text import described

CHECK_S = 5.0
# Most of the time goes into the start of processes.
_AT_ONCE = 4
Check = Callable[[], Iterable[Finding]]

app = typer.Typer()
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


class Checkup(msgspec.Struct, frozen=True):
    findings: list[Finding]
    ok: int
    warn: int
    fail: int


def examine(path: Path | None = None, overrides: Iterable[str] = ()) -> Checkup:
    """Run all checks. Blocks for `CHECK_S` seconds a check at most; an unreadable configuration is a finding."""
    findings: list[Finding] = []
    config: Config | None = None
    try:
        config = load_config(path, tuple(overrides))
    except ConfigError as error:
        findings.append(plugins.refusal(error))
    else:
        findings.append(Finding("config.load", "ok", f"the configuration comes from {config.source}"))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for found in pool.map(lambda each: run_check(*each), _checks(config)):
            findings += found
    return Checkup(findings, *(sum(each.level == level for each in findings) for level in ("ok", "warn", "fail")))


def _checks(config: Config | None) -> Iterable[tuple[str, Check]]:
    yield "python", machine.python
    yield "kvframework", machine.installation
    yield "memory", machine.memory
    yield "limits", machine.limits
    if config is None:
        return
    endpoint = config.server.endpoint or default_endpoint()
    yield "memory", partial(kept, endpoint)
    running = running_server(config)
    yield "socket", partial(socket_findings, endpoint, running)
    yield "config", partial(plugins.common_findings, config, serving=running is not None, deadline_s=CHECK_S)
    for table in plugins.configured(config, replaces=running.pid if running else None, kept=arena_is_kept(config)):
        yield "plugin", partial(plugins.table_findings, table, deadline_s=CHECK_S)


def kept(endpoint: str) -> Iterator[Finding]:
    """What `kvframework hold` keeps for the server at `endpoint`, if it runs. Blocks for a second at most."""
    keeper = keeper_status(endpoint)
    if keeper is None:
        return
    nbytes = ByteSize(sum(row["bytes"] for row in keeper["held"]))
    fact = f"`kvframework hold`, process {keeper['pid']}, holds {nbytes} of memory of the server"
    if keeper["server"] is None and nbytes:
        advice = "see the log of `kvframework hold`; `kvframework hold --drop` frees the memory"
        yield Finding("memory.kept", "warn", f"{fact}, but no server runs", advice)
    else:
        yield Finding("memory.kept", "ok", fact)


def socket_findings(endpoint: str, running: RunningServer | None = None) -> Iterator[Finding]:
    """The state of a usable socket; `kvframework.preflight` refuses any other."""
    try:
        parsed = parse_endpoint(endpoint)
        if parsed.kind == "tcp":
            yield Finding("socket.path", "ok", f"{endpoint} is not a local socket")
            return
        path = Path(parsed.path)
        yield Finding("socket.path", "ok", f"the socket path {path} has {len(os.fsencode(path))} bytes")
        check_directory(path.parent)
    except EndpointError:
        return
    mode = "does not exist; the server will create the socket directory"
    if path.parent.exists():
        mode = f"is private: {stat.filemode(path.parent.stat().st_mode)}"
    yield Finding("socket.directory", "ok", f"{path.parent} {mode}")
    yield Finding("socket.server", "ok", str(running) if running else "no server of this user answers at the endpoint")


def run_check(subject: str, check: Check, timeout_s: float | None = None) -> list[Finding]:
    """The findings of a check; so are its failure and its timeout (None: a second more than `CHECK_S`)."""
    timeout_s = timeout_s or CHECK_S + 1.0
    found: list[Finding] = []
    failure: list[str] = []

    def run() -> None:
        try:
            found.extend(check())
        except Exception as error:  # noqa: BLE001  one check must not hide the others
            failure.append(described(error))

    if call_within(timeout_s, {subject: run}):
        failure.append(f"no result within {timeout_s:g} s")
    ended = [Finding(f"{subject}.check", "fail", f"the check itself failed: {each}", "report it") for each in failure]
    return [*found, *ended]


@app.command(
    epilog=examples(
        "kvframework doctor --config kvf.toml",
        "kvframework doctor --set l2.0.use=redis --set l2.0.url=redis://cache:6379",
        "kvframework doctor --json                      a document of findings",
    )
)
def doctor(config: ConfigFile = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check machine, installation and configuration, with advice.

    Run it as the server's user and with the server's limits, before the server starts or while it runs: it changes
    nothing. It checks the interpreter, memory, limits, the socket, every configured plugin with its devices and nodes,
    and the tiers' stores. A check takes 5 seconds at most. The exit status is 1 if one fails; a warning leaves it 0.
    """
    checkup = examine(config, overrides or ())
    if as_json:
        print_document(checkup)
    else:
        rows = ((Text(each.level, _STYLES[each.level]), each.id, _text(each)) for each in checkup.findings)
        print_rows(("", "CHECK", "FOUND"), rows, whole=("", "CHECK"))
        stdout.print()
        stdout.print(Text(f"{checkup.ok} ok, {checkup.warn} to check, {checkup.fail} failed"))
    if checkup.fail:
        raise typer.Exit(EXIT_FOUND)


def _text(finding: Finding) -> Text:
    """Two lines for people, one for a pipe. `config.load` shows the file, and each failure as other commands do."""
    place = finding.where if finding.level == "fail" else finding.where.partition(": ")[2] or finding.where
    text = Text(f"{place}: {finding.fact}" if place else finding.fact)
    if finding.advice:
        text.append("\n" if stdout.is_terminal else "; ")
        label = "" if finding.advice.startswith("expected: ") else "hint: "
        text.append(f"{label}{finding.advice}", "bold" if finding.level != "ok" else "dim")
    return text
